import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from evenrank.core.errors import ConfigError, StateError
from evenrank.dataloader import LoaderConfig, RandomBatches, build_loader
from evenrank.dataloader.balance import COSTS, STRATEGIES, BalanceConfig, Balancer, partition, register_strategy
from evenrank.datasets import ORDERS, Order, SampleOrder, open_store, register_order
from tests.dataloader.balance.costs import item_tokens, one_per_sample
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


def test_the_order_of_the_page_has_blocks_of_similar_length(small_dataset: Path) -> None:
    trained: list[Any] = []
    names: dict[str, Any] = {"__name__": "extending", "path": small_dataset, "rank": 0, "world_size": 1}
    names["train"] = trained.append
    with restored(ORDERS):
        exec(_snippets()["An order"], names)
    lengths = open_store(small_dataset).lengths
    seen = [lengths[sample] for batch in trained for sample in ids_of(batch)]
    num_full = len(lengths) // 4
    blocks = [sorted(block) for block in np.split(np.array(seen)[: 4 * num_full], num_full)]
    assert np.concatenate([*sorted(blocks), seen[4 * num_full :]]).tolist() == sorted(lengths)
    assert blocks != sorted(blocks)
    assert repr(names["in_pairs"].order) == "SimilarLengths(block=2)"


class _Listed(SampleOrder):
    def __init__(self, rows: Any, num_samples: Any = None) -> None:
        self.listed, self.num_samples = rows, len(rows) if num_samples is None else num_samples

    def rows(self, positions: Any, *, seed: int, epoch: int) -> Any:
        return self.listed[positions + epoch]


class _Mine(Order):
    """Rows that are given, from the one with the epoch's number on."""

    def __init__(self, rows: Any, num_samples: Any = None) -> None:
        self._rows, self._num_samples = rows, num_samples

    def arrange(self, stores: Any, samples: Any) -> _Listed:
        return _Listed(self._rows, self._num_samples)


def _load(path: Path, order: Any, **options: Any) -> Any:
    config = LoaderConfig(**{"batch_size": 3, "order": order, **options})
    return build_loader(path, config, rank=0, world_size=1)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            _Mine(np.array([0, 2, 1, 2])),
            "has row 2 at position 3 of epoch 0, which is none of the samples in 0..197, o",
        ),
        (_Mine(np.array([0, 198])), "has row 198 at position 1 of epoch 0, which is none of the samples in 0..197, or"),
        (_Mine(np.array([-1])), "has row -1 at position 0 of epoch 0, which is none of the samples in 0..197, or c"),
        (_Mine(np.array([0, 1], dtype=np.uint64) - 1), "has row -1 at position 0 of epoch 0"),
        (_Mine(np.array([0.0, 1.0])), r"must return integers of shape \(2,\), got float64 of shape \(2,\)"),
        (_Mine(np.zeros((3, 1), dtype=np.int64)), r"must return integers of shape \(3,\), got int64 of shape \(3, 1\)"),
        (_Mine(np.arange(3), 2.5), "must be of type int, got 2.5"),
        (_Mine(np.arange(3), -1), "must be at least 0, got -1"),
    ],
)
def test_an_order_that_is_wrong_is_refused_when_its_loader_is_created(
    small_dataset: Path, order: Order, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^(num_samples of )?the order _Mine\(\) {message}[^\n]*$"):
        _load(small_dataset, order)


def test_a_row_that_a_later_epoch_has_no_right_to_is_refused_before_it_is_read(small_dataset: Path) -> None:
    rows = np.array([0, 1, 2, 3, 99_999])
    loader = _load(small_dataset, _Mine(rows, 4))
    assert sorted(sample for batch in loader for sample in ids_of(batch)) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="has row 99999 at position 3 of epoch 1, which is none of the samples in"):
        list(loader)
    too_short = int(np.argmin(open_store(small_dataset).lengths))
    with pytest.raises(ConfigError, match=f"has row {too_short} at position 0 of epoch 0, which is none of"):
        _load(small_dataset, _Mine(np.array([too_short])), max_num_candidates=3)


def test_a_state_is_of_the_order_that_it_was_saved_with(small_dataset: Path) -> None:
    """Of its settings, its length and, as code has no version, its first rows."""
    rows = np.arange(50)
    state = _load(small_dataset, _Mine(rows)).state_dict()
    _load(small_dataset, _Mine(rows.copy())).load_state_dict(state)
    for other in (_Mine(rows[::-1].copy()), _Mine(rows, 40), "rows"):
        with pytest.raises(StateError, match="the loader's state is of other data, codes or filters"):
            _load(small_dataset, other).load_state_dict(state)


def _balance_other_orders(rank: int, world_size: int, path: Path, lengths: list[int], reverse: bool) -> None:
    rows = np.arange(lengths[rank])
    config = LoaderConfig(batch_size=3, order=_Mine(rows[::-1] if reverse and rank else rows))
    balance = BalanceConfig(cost=item_tokens)
    build_loader(path, config, rank=rank, world_size=world_size, balance=balance)


@pytest.mark.parametrize(
    ("lengths", "reverse", "message"),
    [
        ([12, 15], False, "num_samples differs between ranks: 12 on rank 0, 15 on rank 1"),
        ([12, 12], True, "costs and plan of the first step differs between ranks: .* on rank 0, .* on rank 1"),
    ],
)
def test_orders_that_differ_between_ranks_are_an_error_on_all(
    ranks: RankPool, small_dataset: Path, lengths: list[int], reverse: bool, message: str
) -> None:
    for failure in ranks.try_run(2, _balance_other_orders, small_dataset, lengths, reverse):
        assert re.search(message, failure.message)


def test_an_order_is_registered_as_a_strategy_is() -> None:
    with restored(ORDERS):
        register_order("mine")(_Mine(np.arange(3)))
        assert LoaderConfig(batch_size=2, order="mine").order == "mine"
        register_order("mine")(_Mine)
        with pytest.raises(ConfigError, match=r"^the order 'mine': missing a required argument: 'rows'; its sett"):
            LoaderConfig(batch_size=2, order="mine")
        with pytest.raises(ConfigError, match="cannot register the order 'shuffle', which evenrank"):
            register_order("shuffle")(_Mine)
        with pytest.raises(ConfigError, match="the order 'other' must be an Order, or a class of them, got <function"):
            register_order("other")(_load)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="LoaderConfig: order must be one of rows, shuffle, got 'mine'"):
        LoaderConfig(batch_size=2, order="mine")
