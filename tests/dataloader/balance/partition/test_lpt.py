import numpy as np
import pytest

from evenrank.dataloader.balance.partition.lpt import IGNORE_HOME, lpt
from evenrank.dataloader.balance.partition.rank_loads import argsort_descending


def _assign(costs: list[int], world_size: int, percentile: int = 0, keep_below: int = IGNORE_HOME) -> list[int]:
    values = np.array(costs)
    rank_of: list[int] = lpt(values, argsort_descending(values), world_size, percentile, keep_below).tolist()
    return rank_of


@pytest.mark.parametrize(
    ("costs", "world_size", "keep_below", "ranks"),
    [
        ([4, 9, 5, 1], 2, IGNORE_HOME, [1, 0, 1, 0]),  # 9 to rank 0, 5 to rank 1, 4 to rank 1, which is full then
        ([5, 5, 5, 5, 5, 0], 3, IGNORE_HOME, [0, 1, 2, 0, 1, 2]),  # ties go to the lower rank
        ([5] * 6, 3, IGNORE_HOME, [0, 0, 1, 1, 2, 2]),  # open places count as 5 each, so all ranks start equal
        ([8, 7, 3, 2], 2, 10, [0, 1, 1, 0]),  # 8 stays on rank 0, 7 does not fit below 10
        ([8, 7, 3, 2], 2, 15, [0, 0, 1, 1]),
    ],
)
def test_the_lightest_rank_gets_largest(costs: list[int], world_size: int, keep_below: int, ranks: list[int]) -> None:
    assert _assign(costs, world_size, keep_below=keep_below) == ranks


def test_open_places_count_as_cheap_samples() -> None:
    costs = [20, 9, 8, 4, 4, 4]
    assert _assign(costs, 2, percentile=0) == _assign(costs, 2, percentile=25)
    costs = [10, 6, 5, 3, 3, 3]
    ranks = np.array(_assign(costs, 2, percentile=25))
    loads = [int(np.array(costs)[ranks == rank].sum()) for rank in range(2)]
    assert sorted(loads) == [14, 16]


def test_costs_near_the_limit_do_not_overflow() -> None:
    giant = 2**61
    ranks = _assign([giant, giant // 2, giant // 4, 1, 1, 1], 2)
    assert sorted(ranks) == [0, 0, 0, 1, 1, 1]
    assert ranks[0] != ranks[1] == ranks[2]
