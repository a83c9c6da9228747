import numpy as np

from evenrank.dataloader.balance.partition.lpt import IGNORE_HOME, lpt
from evenrank.dataloader.balance.partition.rank_loads import argsort_descending


def _assign(costs: list[int], world_size: int, percentile: int = 0, keep_below: int = IGNORE_HOME) -> list[int]:
    values = np.array(costs)
    rank_of: list[int] = lpt(values, argsort_descending(values), world_size, percentile, keep_below).tolist()
    return rank_of


def test_the_most_expensive_slot_goes_to_the_lightest_rank_with_room() -> None:
    # 9 to rank 0, 5 to rank 1, 4 to rank 1 because 5 < 9; then rank 1 is full.
    assert _assign([4, 9, 5, 1], 2) == [1, 0, 1, 0]


def test_ties_go_to_the_lower_rank() -> None:
    assert _assign([5, 5, 5, 5, 5, 0], 3) == [0, 1, 2, 0, 1, 2]
    assert _assign([5] * 6, 3) == [0, 0, 1, 1, 2, 2]  # open places count as 5 each, so all ranks start equal


def test_open_places_count_as_cheap_samples() -> None:
    costs = [20, 9, 8, 4, 4, 4]
    assert _assign(costs, 2, percentile=0) == _assign(costs, 2, percentile=25)
    costs = [10, 6, 5, 3, 3, 3]
    ranks = np.array(_assign(costs, 2, percentile=25))
    loads = [int(np.array(costs)[ranks == rank].sum()) for rank in range(2)]
    assert sorted(loads) == [14, 16]


def test_slots_stay_on_their_own_rank_below_a_load() -> None:
    # Rank 0 has 8 and 7, rank 1 has 3 and 2: 8 stays, 7 does not fit below 10.
    assert _assign([8, 7, 3, 2], 2, keep_below=10) == [0, 1, 1, 0]
    assert _assign([8, 7, 3, 2], 2, keep_below=15) == [0, 0, 1, 1]


def test_costs_near_the_limit_do_not_overflow() -> None:
    giant = 2**61
    ranks = _assign([giant, giant // 2, giant // 4, 1, 1, 1], 2)
    assert sorted(ranks) == [0, 0, 0, 1, 1, 1]
    assert ranks[0] != ranks[1] == ranks[2]
