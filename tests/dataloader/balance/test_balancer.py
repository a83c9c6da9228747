import gc
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer, StepMetrics, step_planner
from evenrank.dataloader.balance.config import EXCHANGES
from evenrank.dataloader.balance.exchange.exchange import Handle
from evenrank.dataloader.balance.metrics.step_metrics import measure_step
from evenrank.dataloader.batches.batch import JaggedBatch, dense
from evenrank.dataloader.batches.padding import pad_batch
from evenrank.dataloader.batches.schema import lengths_of, schema_of
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.balance.costs import COST, one_per_sample, rich_tokens
from tests.dataloader.batch_helpers import ids_of
from tests.dataloader.rich_batch import RichBatch, rich_batch, samples_of
from tests.ranks import RankPool

Step = list[list[tuple[int, int]]]  # a rank's samples in a step: the lengths of their four keys, in pairs
World = tuple[int, list[list[Step]]]  # a batch size and each rank's steps


def _batches(rank: int, steps: list[Step], batch_size: int | None) -> list[RichBatch]:
    batches = [rich_batch(samples, first_id=1000 * rank + 10 * number) for number, samples in enumerate(steps)]
    return batches if batch_size is None else [pad_batch(batch, batch_size) for batch in batches]


def _balance(
    rank: int, world_size: int, steps: list[list[Step]], batch_size: int, is_padded: bool, strategy: str
) -> list[Any]:
    batches = _batches(rank, steps[rank], batch_size if is_padded else None)
    metrics: list[StepMetrics] = []
    rows = None if is_padded else batch_size
    config = BalanceConfig(cost=rich_tokens, strategy=strategy, on_step=metrics.append, batch_size=rows)
    seen: list[dict[str, Any]] = []
    with Balancer(batches, config) as balancer:
        for batch in balancer:
            assert lengths_of(batch)[:, batch.num_real :].sum() == 0
            assert batch.ids[batch.num_real :].eq(-1).all()
            longest = lengths_of(batch).max(axis=1, initial=0)
            assert batch.max_lengths == dict(zip(schema_of(batch).key_names, longest, strict=True))
            loss = (batch.loss_tokens, batch.world_loss_tokens, batch.dp_size)
            numbers = (batch.batch_size, batch.step, batch.position)
            seen.append({"samples": samples_of(batch), "loss": loss, "numbers": numbers})
    assert len(metrics) == len(seen)
    return [{**batch, "after": step.after, "before": step.before} for batch, step in zip(seen, metrics, strict=True)]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draw a batch size and each rank's steps: partial and empty batches, ranks that end early or have no batches."""
    batch_size = draw(st.integers(1, 4))
    length = st.one_of(st.just(0), st.integers(0, 30))
    sample = st.tuples(length, length, length, length).map(lambda n: [(n[0], n[1]), (n[2], n[3])])
    steps = st.lists(st.lists(sample, max_size=batch_size), max_size=5)
    return batch_size, draw(st.lists(steps, min_size=1, max_size=4))


def _check_world(ranks: RankPool, strategy: str, world: World, is_padded: bool) -> None:
    batch_size, steps = world
    seen = ranks.run(len(steps), _balance, steps, batch_size, is_padded, strategy)
    rows = batch_size if is_padded else None
    loaded = [_batches(rank, steps_of_rank, rows) for rank, steps_of_rank in enumerate(steps)]
    num_steps = max(map(len, steps))
    assert [len(seen_by_rank) for seen_by_rank in seen] == [num_steps] * len(steps)
    for number in range(num_steps):
        before = [batches[number] for batches in loaded if number < len(batches)]
        after = [seen_by_rank[number] for seen_by_rank in seen]
        samples = [sample for batch_seen in after for sample in batch_seen["samples"]]
        # The same samples, each once, complete.
        assert sorted(samples, key=lambda sample: sample["id"]) == [s for batch in before for s in samples_of(batch)]
        total = sum(batch.loss_tokens for batch in before)
        for rank, batch_seen in enumerate(after):
            ids = [sample["id"] for sample in batch_seen["samples"]]
            assert ids == sorted(ids)
            assert len(ids) <= batch_size
            assert batch_seen["numbers"] == (batch_size, number, number + 1)
            loss_tokens = sum(len(sample["weighted c values"]) for sample in batch_seen["samples"])
            assert batch_seen["loss"] == (loss_tokens, total, len(steps))
            if strategy == "none":
                own = samples_of(loaded[rank][number]) if number < len(loaded[rank]) else []
                assert batch_seen["samples"] == own
        loads = after[0]["after"].tolist()
        assert loads == [sum(map(_tokens_of, batch_seen["samples"])) for batch_seen in after]
        assert max(loads) <= max(after[0]["before"]) or strategy == "karmarkar-karp"


def _tokens_of(sample: dict[str, Any]) -> int:
    lengths = {name.removesuffix(" values"): len(sample[name]) for name in sample if name.endswith("values")}
    return lengths["first a"] + 2 * lengths["first b"] + lengths["weighted a"] + lengths["weighted c"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("examples", [25, pytest.param(1500, marks=pytest.mark.long)])
def test_balancing_never_loses_duplicates_or_alters_a_sample(ranks: RankPool, strategy: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(world=worlds(), is_padded=st.booleans())
    def check(world: World, is_padded: bool) -> None:
        _check_world(ranks, strategy, world, is_padded)

    check()


def _rows(rank: int, world_size: int, batch_size: int | None) -> list[tuple[int, int]]:
    batches = _batches(rank, [[[(1, 1), (1, 1)]] * rows for rows in ([3, 1, 2] if rank == 0 else [2, 3])], None)
    with Balancer(batches, BalanceConfig(cost=rich_tokens, batch_size=batch_size)) as balancer:
        return [(batch.batch_size, batch.num_real) for batch in [*balancer, *balancer]]


def test_shorter_batches_are_padded_to_the_longest_first_one_or_to_the_batch_size(ranks: RankPool) -> None:
    for batch_size, rows in [(None, 3), (5, 5)]:
        first, second = ranks.run(2, _rows, batch_size)
        assert [number for number, _ in first] == [number for number, _ in second] == [rows] * 6
        assert [one + other for (_, one), (_, other) in zip(first, second, strict=True)] == [5, 4, 2] * 2


def _bits(rank: int, world_size: int, steps: list[list[Step]], batch_size: int, exchange: str) -> list[Any]:
    batches = _batches(rank, steps[rank], batch_size)
    with Balancer(batches, BalanceConfig(cost=rich_tokens, exchange=exchange)) as balancer:
        return [bits_of(batch) for batch in balancer]


@settings(max_examples=20)
@given(world=worlds())
def test_all_exchanges_give_the_same_batches_bit_for_bit(ranks: RankPool, world: World) -> None:
    batch_size, steps = world
    first, second = (ranks.run(len(steps), _bits, steps, batch_size, exchange) for exchange in EXCHANGES)
    assert first == second


def _walk(rank: int, world_size: int, path: Path, stop: int | None, state: Any, batch_size: int) -> Any:
    loader = build_loader(path, LoaderConfig(batch_size=batch_size, seed=3), rank=rank, world_size=world_size)
    with Balancer(loader, BalanceConfig(cost=COST, lookahead=3)) as balancer:
        if state is not None:
            balancer.load_state_dict(state)
        batches = list(itertools.islice(balancer, stop))
        return [i for batch in batches for i in ids_of(batch)], balancer.state_dict(after=batches[-1])


def test_training_resumes_on_another_world_size(ranks: RankPool, small_dataset: Path) -> None:
    first = ranks.run(3, _walk, small_dataset, 4, None, 8)
    states = [state for _, state in first]
    assert states[0] == states[1] == states[2]
    assert states[0]["position"] == 4 * 3 * 8
    second = ranks.run(2, _walk, small_dataset, None, states[0], 16)
    trained = [sample for samples, _ in first + second for sample in samples]
    assert sorted(trained) == list(range(states[0]["num_samples"]))


def _walk_without_fbgemm(rank: int, world_size: int, path: Path) -> tuple[list[int], list[int], str]:
    with mock.patch.object(torch.ops, "fbgemm", None):
        exchanged, _ = _walk(rank, world_size, path, None, None, 16)
        balance = BalanceConfig(cost=COST)
        config = LoaderConfig(batch_size=16, seed=3)
        batches = list(build_loader(path, config, rank=rank, world_size=world_size, balance=balance))
        with pytest.raises(AttributeError) as raised:
            batches[0].to("cpu").features.offsets()
    return exchanged, [i for batch in batches for i in ids_of(batch)], str(raised.value)


def test_loading_and_balancing_call_no_operator_of_fbgemm(ranks: RankPool, small_dataset: Path) -> None:
    for exchanged, read, error in ranks.run(2, _walk_without_fbgemm, small_dataset):
        assert exchanged == read != []
        assert error == "'NoneType' object has no attribute 'asynchronous_complete_cumsum'"


def test_a_step_is_launched_and_finished_once() -> None:
    message = r"^{}\(\) needs a {} step; this step is {}$"
    batches = _batches(0, [[[(1, 1), (1, 1)]]], 2)
    with Balancer(batches, BalanceConfig(cost=rich_tokens)) as balancer:
        handle = balancer.start(batches[0])
        with pytest.raises(ConfigError, match=message.format("finish", "launched", "only started")):
            balancer.finish(handle)
        balancer.launch(handle)
        with pytest.raises(ConfigError, match=message.format("launch", "started", "already launched")):
            balancer.launch(handle)
        assert balancer.finish(handle) is not None
        assert balancer.finish(balancer.launch(balancer.start(None))) is None
        with pytest.raises(ConfigError, match=message.format("finish", "launched", "already finished")):
            balancer.finish(handle)


def _count(kind: type) -> int:
    return sum(type(found) is kind for found in gc.get_objects())


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"pack": True, "max_tokens_per_rank": 100}])
def test_batches_are_freed_without_the_garbage_collector(options: dict[str, Any]) -> None:
    gc.collect()
    samples: Step = [[(2, 1), (1, 2)], [(3, 1), (1, 1)]]
    gc.disable()
    try:
        before, most, balanced = _count(RichBatch), 0, []
        with Balancer(_Endless(samples), BalanceConfig(cost=rich_tokens, lookahead=1, **options)) as balancer:
            for batch in itertools.islice(balancer, 60):
                balanced.append(weakref.ref(batch))
                del batch
                assert not any(reference() is not None for reference in balanced[:-1])
                most = max(most, _count(RichBatch) - before)
            assert 1 < most < 25  # those of a group, and of the next one
            left = _count(Handle)
        assert left < 25
    finally:
        gc.enable()


class _Endless:
    """A loader of equal batches."""

    def __init__(self, samples: Step) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[RichBatch]:
        for number in itertools.count():
            yield rich_batch(self._samples, first_id=10 * number)


def test_steps_are_measured_only_where_somebody_reads_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def count(*args: Any, step: int, **options: Any) -> StepMetrics:
        measured.append(step)
        return measure_step(*args, step=step, **options)

    monkeypatch.setattr(step_planner, "measure_step", count)
    batches = _batches(0, [[[(1, 2), (3, 4)]], [[(5, 0), (1, 1)]]], None)
    with Balancer(batches, BalanceConfig(cost=rich_tokens)) as balancer:
        assert len(list(balancer)) == 2
    assert measured == []
    with Balancer(batches, BalanceConfig(cost=rich_tokens, on_step=lambda metrics: None)) as balancer:
        assert len(list(balancer)) == 2
    assert measured == [0, 1]


@dataclass(kw_only=True, eq=False, repr=False)
class DenseBatch(JaggedBatch):
    """A batch without jagged keys, with a fill that differs from itself."""

    ids: torch.Tensor = dense(fill=float("nan"))


def _balance_dense(rank: int, world_size: int, options: dict[str, Any]) -> list[float]:
    num_real = 4 * (1 - rank)  # all samples are on rank 0
    ids = torch.full((4,), float("nan"), dtype=torch.float64)
    ids[:num_real] = torch.arange(num_real)
    batches = [DenseBatch(batch_size=4, num_real=num_real, ids=ids)]
    seen: list[StepMetrics] = []
    with Balancer(batches, BalanceConfig(cost=one_per_sample, on_step=seen.append, **options)) as balancer:
        (batch,) = balancer
    assert batch.num_real == 2
    assert [(step.samples, step.sample_bytes) for step in seen] == [(4, 4 * 8)]
    assert batch.ids[2:].isnan().all()
    return batch.ids[:2].tolist()


@pytest.mark.parametrize("options", [*({"exchange": name} for name in EXCHANGES), {"window": 2}])
def test_batches_without_jagged_keys_are_balanced_and_measured(ranks: RankPool, options: dict[str, Any]) -> None:
    assert sorted(itertools.chain(*ranks.run(2, _balance_dense, options))) == [0, 1, 2, 3]


def _soak(rank: int, world_size: int, path: Path, steps: int) -> list[float]:
    loader = build_loader(path, LoaderConfig(batch_size=4), rank=rank, world_size=world_size)
    resident = []
    with Balancer(loader, BalanceConfig(cost=COST)) as balancer:
        batches = itertools.chain.from_iterable(iter(balancer) for _ in itertools.count())
        for number, _ in enumerate(itertools.islice(batches, steps)):
            if number % (steps // 4) == steps // 4 - 1:
                resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20)
    return resident


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_memory_stays_flat_over_thousands_of_steps(small_dataset: Path) -> None:
    pool = RankPool(timeout=1500)
    try:
        for resident in pool.run(4, _soak, small_dataset, 10_000):
            assert max(resident[1:]) - resident[0] < 8, f"MiB after each quarter: {resident}"
    finally:
        pool.stop()
