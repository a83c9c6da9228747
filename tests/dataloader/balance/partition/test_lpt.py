import numpy as np

from evenrank.dataloader.balance.partition.lpt import NOBODY_STAYS, longest_first
from evenrank.dataloader.balance.partition.radix_sort import descending


def _deal(costs: list[int], world_size: int, percent: int = 0, stay_below: int = NOBODY_STAYS) -> list[int]:
    values = np.array(costs)
    return longest_first(values, descending(values), world_size, percent, stay_below).tolist()


def test_the_longest_goes_to_the_lightest_rank_with_room() -> None:
    # 9 -> 0, 5 -> 1, 4 -> 1 (5 < 9), and now rank 1 is full.
    assert _deal([4, 9, 5, 1], 2) == [1, 0, 1, 0]


def test_ties_go_to_the_lower_rank() -> None:
    assert _deal([5, 5, 5, 5, 5, 0], 3) == [0, 1, 2, 0, 1, 2]
    assert _deal([5] * 6, 3) == [0, 0, 1, 1, 2, 2]  # what is counted for open places levels them already


def test_open_places_are_reckoned_with() -> None:
    # With nothing for an open place, 9 and 8 share a rank, and 4 is left for the place beside 20 and 1; with 4 for an
    # open place the rank of 20 counts as 28.
    costs = [20, 9, 8, 4, 4, 4]
    assert _deal(costs, 2, percent=0) == _deal(costs, 2, percent=25)
    costs = [10, 6, 5, 3, 3, 3]
    ranks = np.array(_deal(costs, 2, percent=25))
    loads = [int(np.array(costs)[ranks == rank].sum()) for rank in range(2)]
    assert sorted(loads) == [14, 16]


def test_slots_stay_with_their_own_rank_below_a_load() -> None:
    # Rank 0 has 8 and 7, rank 1 has 3 and 2: 8 stays, 7 does not fit below 10.
    assert _deal([8, 7, 3, 2], 2, stay_below=10) == [0, 1, 1, 0]
    assert _deal([8, 7, 3, 2], 2, stay_below=15) == [0, 0, 1, 1]


def test_costs_near_the_limit_do_not_overflow() -> None:
    giant = 2**61
    ranks = _deal([giant, giant // 2, giant // 4, 1, 1, 1], 2)
    assert sorted(ranks) == [0, 0, 0, 1, 1, 1]
    assert ranks[0] != ranks[1] == ranks[2]
