import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, RandomBatches, build_loader
from evenrank.dataloader.balance import COSTS, STRATEGIES, BalanceConfig, Balancer, partition, register_strategy
from tests.dataloader.balance.costs import one_per_sample
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.ranks import RankPool
from tests.registrations import restored

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "extending.md"
CONFIG = LoaderConfig(batch_size=6, max_history_length=50, drop_last=True)


def _snippets() -> dict[str, str]:
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]
    return {text.splitlines()[0]: "\n".join(re.findall(r"```python\n(.*?)```", text, re.S)) for text in sections}


Sample = tuple[int, list[int]]


def _samples(batch: Any) -> list[Sample]:
    return list(zip(ids_of(batch), rows_of(batch.features, "item_id"), strict=False))


def _run_page(rank: int, world_size: int, path: Path) -> list[list[Sample]]:
    """Run the page's code; return the samples of each step."""
    snippets = _snippets()
    trained: list[Any] = []
    names = {"path": path, "config": CONFIG, "rank": rank, "world_size": world_size, "train": trained.append}
    with restored(COSTS, STRATEGIES):
        exec(snippets["A cost"] + snippets["A strategy"], names)
    return [_samples(batch) for batch in trained]


def test_the_strategy_of_the_page_balances_every_sample(ranks: RankPool, small_dataset: Path) -> None:
    by_rank = ranks.run(2, _run_page, small_dataset)
    loaders = [build_loader(small_dataset, CONFIG, rank=rank, world_size=2) for rank in range(2)]
    for loaded, shares in zip(zip(*loaders, strict=True), zip(*by_rank, strict=True), strict=True):
        expected = [sample for batch in loaded for sample in _samples(batch)]
        assert sorted(sample for share in shares for sample in share) == sorted(expected)
        # Assigned back and forth by descending cost.
        lengths = sorted((len(items) for _, items in expected), reverse=True)
        assigned = [[lengths[i] for i in range(12) if (i % 4 in (1, 2)) == rank] for rank in range(2)]
        assert [sorted((len(items) for _, items in share), reverse=True) for share in shares] == assigned


def _all_to_the_first(problem: Any) -> np.ndarray[Any, Any]:
    return np.zeros(len(problem.costs), dtype=np.int32)


def _register_on_some_ranks(rank: int, world_size: int, name: str, missing: int) -> None:
    with restored(STRATEGIES):
        if rank != missing:
            register_strategy(name.format(rank=rank))(_all_to_the_first)
        config = BalanceConfig(cost=one_per_sample, strategy=name.format(rank=rank))
        Balancer(RandomBatches(CONFIG, num_batches=1), config)


UNKNOWN = "BalanceConfig: strategy must be one of none, karmarkar-karp, lpt-swap, min-move, got 'mine'; did you mean "
UNKNOWN += "min-move?"
DIFFERENT = "strategy differs between ranks: mine of rank 0 on rank 0, mine of rank 1 on rank 1"


@pytest.mark.parametrize(
    ("name", "missing", "messages"),
    [("mine", 1, [f"rank 1 failed: {UNKNOWN}", UNKNOWN]), ("mine of rank {rank}", -1, [DIFFERENT, DIFFERENT])],
)
def test_other_strategies_are_an_error_on_all(ranks: RankPool, name: str, missing: int, messages: list[str]) -> None:
    failures = ranks.try_run(2, _register_on_some_ranks, name, missing)
    assert [failure.message for failure in failures] == messages


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([0, 0, 1, 1], r"the strategy 'mine' must return integers of shape \(4,\), got list"),
        (np.array([0, 1]), r"must return integers of shape \(4,\), got int64 \(2,\)"),
        (np.array([0.0, 0.0, 1.0, 1.0]), r"must return integers of shape \(4,\), got float64 \(4,\)"),
        (np.array([0, 0, 1, 2]), r"the strategy 'mine' must return ranks 0..1, got 0..2"),
        (np.array([0, -1, 1, 1]), r"the strategy 'mine' must return ranks 0..1, got -1..1"),
        (np.array([0, 1, 1, 1]), "must assign 2 of the 4 slots, padding included, to each rank; rank 0 got 1"),
    ],
)
def test_what_a_strategy_returns_is_checked(returned: Any, message: str) -> None:
    with restored(STRATEGIES):
        register_strategy("mine")(lambda problem: returned)
        with pytest.raises(ConfigError, match=message):
            partition(np.array([3, 2, 1, 0]), 2, strategy="mine")


def test_an_assignment_of_other_integers_is_the_same() -> None:
    with restored(STRATEGIES):
        register_strategy("mine")(lambda problem: np.array([1, 0, 0, 1], dtype=np.uint8))
        rank_of = partition(np.array([3, 2, 1, 0]), 2, strategy="mine").rank_of
    assert rank_of.dtype == np.int32
    assert rank_of.tolist() == [[1, 0], [0, 1]]


def test_something_else_cannot_be_registered_and_nothing_is_called_before_a_step() -> None:
    with pytest.raises(ConfigError, match="the strategy 'mine' must be a function of a PartitionProblem, got 'lpt'"):
        register_strategy("mine")("lpt")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot register the strategy 'lpt-swap', which evenrank"):
        register_strategy("lpt-swap")(_all_to_the_first)
    with restored(STRATEGIES):
        called = mock.Mock()
        register_strategy("mine")(called)
        Balancer(RandomBatches(CONFIG, num_batches=1), BalanceConfig(cost=one_per_sample, strategy="mine")).close()
    called.assert_not_called()
