import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, RandomBatches
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer, StepMetrics
from evenrank.dataloader.balance.config import EXCHANGES
from evenrank.dataloader.batches.batch import JaggedBatch, dense
from evenrank.dataloader.batches.padding import pad_batch
from evenrank.dataloader.batches.schema import lengths_of, schema_of
from tests.dataloader.balance.costs import one_per_sample, rich_tokens
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.dataloader.rich_batch import RichBatch, rich_batch, samples_of
from tests.ranks import RankPool

Step = list[list[tuple[int, int]]]  # a rank's samples in a step: the lengths of their four keys, in pairs
World = tuple[int, list[list[Step]]]  # a batch size and each rank's steps
WAYS: list[dict[str, Any]] = [
    *({"strategy": strategy} for strategy in STRATEGIES),
    {"window": 2},
    {"window": 8},
    {"pack": True, "max_tokens_per_rank": 200},
    {"pack": True, "max_tokens_per_rank": 40, "on_overflow": "warn"},
]


def _batches(rank: int, steps: list[Step], rows: int | None = None) -> list[RichBatch]:
    batches = [rich_batch(samples, first_id=1000 * rank + 10 * number) for number, samples in enumerate(steps)]
    return batches if rows is None else [pad_batch(batch, rows) for batch in batches]


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


def _balance(rank: int, world_size: int, world: World, is_padded: bool, options: dict[str, Any]) -> list[Any]:
    rows, steps = world
    metrics: list[StepMetrics] = []
    config = BalanceConfig(cost=rich_tokens, on_step=metrics.append, batch_size=None if is_padded else rows, **options)
    seen = []
    with Balancer(_batches(rank, steps[rank], rows if is_padded else None), config) as balancer:
        for batch in balancer:
            assert lengths_of(batch)[:, batch.num_real :].sum() == 0
            assert batch.ids[batch.num_real :].eq(-1).all()
            longest = lengths_of(batch).max(axis=1, initial=0)
            assert batch.max_lengths == dict(zip(schema_of(batch).key_names, longest, strict=True))
            numbers = batch.batch_size, batch.epoch, batch.step, batch.position, batch.world_loss_tokens, batch.dp_size
            seen.append((samples_of(batch), batch.loss_tokens, numbers))
    return list(zip(seen, metrics, strict=True))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draw a batch size and each rank's steps: partial and empty batches, ranks that end early or have no batches."""
    batch_size = draw(st.integers(1, 4))
    length = st.one_of(st.just(0), st.integers(0, 30))
    sample = st.tuples(length, length, length, length).map(lambda n: [(n[0], n[1]), (n[2], n[3])])
    steps = st.lists(st.lists(sample, max_size=batch_size), max_size=5)
    return batch_size, draw(st.lists(steps, min_size=1, max_size=4))


def _lengths(sample: dict[str, Any]) -> list[int]:
    return [len(sample[f"{key} values"]) for key in ("first a", "first b", "weighted a", "weighted c")]


def _cost(sample: dict[str, Any]) -> int:
    a, b, weighted_a, c = _lengths(sample)
    return a + 2 * b + weighted_a + c


def _by_id(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(samples, key=lambda sample: sample["id"])


def _check_world(ranks: RankPool, world: World, is_padded: bool, options: dict[str, Any]) -> None:
    rows, steps = world
    is_packed, is_one_step = "pack" in options, not {"window", "pack"} & options.keys()
    of_ranks = ranks.run(len(steps), _balance, world, is_padded, options)
    loaded = [[samples_of(batch) for batch in _batches(rank, of_rank)] for rank, of_rank in enumerate(steps)]
    trained = [sample for seen in of_ranks for (samples, _, _), _ in seen for sample in samples]
    assert _by_id(trained) == _by_id([sample for of_rank in loaded for batch in of_rank for sample in batch])
    assert is_packed or len(of_ranks[0]) == max(map(len, steps))
    num_trained = 0
    for number, of_step in enumerate(zip(*of_ranks, strict=True)):
        after, metrics = [samples for (samples, _, _), _ in of_step], [of_rank for _, of_rank in of_step]
        num_trained += sum(map(len, after))
        losses = [sum(_lengths(sample)[3] for sample in samples) for samples in after]
        assert [loss for (_, loss, _), _ in of_step] == losses
        position = num_trained if is_packed else number + 1
        assert {numbers for (_, _, numbers), _ in of_step} == {(rows, 0, number, position, sum(losses), len(steps))}
        for of_rank in metrics:
            assert (of_rank.step, of_rank.samples) == (number, sum(map(len, after)))
            assert of_rank.rank_tokens.tolist() == [sum(sum(_lengths(sample)) for sample in batch) for batch in after]
            assert of_rank.after.tolist() == [sum(map(_cost, batch)) for batch in after]
        before = [of_rank[number] if number < len(of_rank) else [] for of_rank in loaded]
        if not is_packed:
            assert metrics[0].before.tolist() == [sum(map(_cost, batch)) for batch in before]
        if is_one_step:
            assert _by_id([*itertools.chain(*after)]) == _by_id([*itertools.chain(*before)])
            assert all(_by_id(batch) == batch for batch in after)
            assert metrics[0].after.max() <= metrics[0].before.max() or options["strategy"] == "karmarkar-karp"
            assert options["strategy"] != "none" or after == before


@pytest.mark.parametrize("examples", [80, pytest.param(6000, marks=pytest.mark.long)])
def test_balancing_never_loses_duplicates_or_alters_a_sample(ranks: RankPool, examples: int) -> None:
    @settings(max_examples=examples)
    @given(worlds(), st.booleans(), st.sampled_from(WAYS), st.sampled_from(EXCHANGES))
    def check(world: World, is_padded: bool, options: dict[str, Any], exchange: str) -> None:
        _check_world(ranks, world, is_padded, {**options, "exchange": exchange})

    check()


def _rows(rank: int, world_size: int, batch_size: int | None) -> list[tuple[int, int]]:
    batches = _batches(rank, [[[(1, 1), (1, 1)]] * rows for rows in ([3, 1, 2] if rank == 0 else [2, 3])])
    with Balancer(batches, BalanceConfig(cost=rich_tokens, batch_size=batch_size)) as balancer:
        return [(batch.batch_size, batch.num_real) for batch in [*balancer, *balancer]]


def test_shorter_batches_are_padded_to_the_longest_first_one_or_to_the_batch_size(ranks: RankPool) -> None:
    for batch_size, rows in [(None, 3), (5, 5)]:
        first, second = ranks.run(2, _rows, batch_size)
        assert [number for number, _ in first] == [number for number, _ in second] == [rows] * 6
        assert [one + other for (_, one), (_, other) in zip(first, second, strict=True)] == [5, 4, 2] * 2


@pytest.mark.parametrize(
    "options", [{"lookahead": 1}, {"lookahead": 20}, {"window": 2}, {"pack": True, "max_tokens_per_rank": 100}]
)
def test_few_steps_are_loaded_ahead_and_batches_are_freed_without_the_garbage_collector(
    options: dict[str, Any],
) -> None:
    alive, num_loaded, handed_out = weakref.WeakSet[RichBatch](), 0, []

    def load() -> Iterator[RichBatch]:
        nonlocal num_loaded
        for num_loaded in itertools.count(1):
            alive.add(batch := rich_batch([[(2, 1), (1, 2)], [(3, 1), (1, 1)]], first_id=10 * num_loaded))
            yield batch
            del batch

    gc.disable()
    try:
        with Balancer(load(), BalanceConfig(cost=rich_tokens, **options)) as balancer:
            ahead = []
            for step, batch in enumerate(itertools.islice(balancer, 60)):
                handed_out.append(weakref.ref(batch))
                del batch
                assert not any(reference() is not None for reference in handed_out[:-1])
                assert len(alive) < 25 + options.get("lookahead", 2)  # those of a group, and of the next one
                ahead.append(num_loaded - step)
    finally:
        gc.enable()
    if "lookahead" in options:  # one is loaded for each that is handed out, up to 8 at once
        assert all(options["lookahead"] < number <= options["lookahead"] + 9 for number in ahead)
        assert len({*ahead[40:]}) == 1


@dataclass(kw_only=True, eq=False, repr=False)
class DenseBatch(JaggedBatch):
    """A batch without jagged keys, with a fill that differs from itself."""

    ids: torch.Tensor = dense(fill=float("nan"))


def _balance_dense(rank: int, world_size: int) -> list[float]:
    num_real = 4 * (1 - rank)  # all samples are on rank 0
    ids = torch.tensor([0.0, 1.0, 2.0, 3.0] if rank == 0 else [float("nan")] * 4, dtype=torch.float64)
    seen: list[StepMetrics] = []
    batches = [DenseBatch(batch_size=4, num_real=num_real, ids=ids)]
    with Balancer(batches, BalanceConfig(cost=one_per_sample, on_step=seen.append)) as balancer:
        (batch,) = balancer
    assert (batch.num_real, seen[0].samples, seen[0].sample_bytes) == (2, 4, 4 * 8)
    assert batch.ids[2:].isnan().all()
    return batch.ids[:2].tolist()


def test_batches_without_jagged_keys_are_balanced_and_measured(ranks: RankPool) -> None:
    first, second = ranks.run(2, _balance_dense)
    assert sorted(first + second) == [0, 1, 2, 3]


@contextlib.contextmanager
def _set(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


MODES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "meta device": lambda: _set(torch.set_default_device, "meta", None),
    "float64": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
}


def _train(rank: int, world_size: int, exchange: str, on_gpus: bool) -> list[Any]:
    """Return, for each mode, the samples of two epochs, and the gradients of an embedding table.

    One rank has fewer batches, so that empty ones are made, and batches are padded.
    """
    of_modes: list[Any] = []
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    data = LoaderConfig(batch_size=6, max_history_length=50)
    rich = [rich_batch([[(1, 2), (3, 4)]] * (2 + rank), first_id=10 * rank)] * 2
    config = BalanceConfig(cost=one_per_sample, exchange=exchange)
    for mode in MODES.values():
        trained: list[Any] = []
        of_modes.append(trained)
        weight = torch.ones(97, 2, device=device, requires_grad=True)
        with mode():
            loader = list(RandomBatches(data, num_batches=3 - rank, rank=rank, world_size=world_size))
            with Balancer(loader, config, device=device) as balancer:
                for batch in (*balancer, *balancer):
                    trained.append((ids_of(batch), rows_of(batch.features, "item_id"), str(batch.features.device())))
                    with torch.inference_mode(False), torch.enable_grad():
                        (weight[batch.features["item_id"].values() % 97] * batch.num_real).sum().backward()
            with Balancer(rich, replace(config, batch_size=5), device=device) as balancer_of_rich:
                for each in balancer_of_rich:
                    trained.append((samples_of(each.to("cpu")), each.matrix.tolist(), schema_of(each.to("cpu"))))
                    with torch.inference_mode(False):
                        each.ids.add_(1)  # which tensors of the inference mode do not allow
        assert weight.grad is not None
        trained.append(weight.grad.tolist())
    return of_modes


@pytest.mark.parametrize(
    ("exchange", "on_gpus"),
    [("all-to-all", False), ("all-gather", False), pytest.param("all-to-all", True, marks=pytest.mark.multi_gpu)],
)
def test_modes_of_pytorch_change_nothing(ranks: RankPool, exchange: str, on_gpus: bool) -> None:
    for of_modes in ranks.run(2, _train, exchange, on_gpus):
        assert len(of_modes[0]) == 2 * 3 + 2 + 1
        for mode, trained in zip(MODES, of_modes, strict=True):
            assert trained == of_modes[0], mode
