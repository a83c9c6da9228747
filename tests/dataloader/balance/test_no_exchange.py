"""A loader that balances its steps yields what a Balancer over a plain loader does, on Gloo groups of 1 to 8 ranks."""

import dataclasses
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader import (
    Loader,
    LoaderConfig,
    Mixture,
    SemanticIdConfig,
    SequenceBatch,
    build_loader,
    random_codes,
)
from evenrank.dataloader.balance import BalanceConfig, Balancer, HSTUCost, StepMetrics, no_exchange
from evenrank.dataloader.balance.exchange.batch_buffer import as_bytes
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.config import ReadConfig
from evenrank.dataloader.sampling import balanced_steps
from tests.dataloader.batch_helpers import ids_of
from tests.ranks import RankPool

COST = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)
CODES = random_codes(501, levels=2, codebook_size=8)
CODE_COST = dataclasses.replace(COST, history_key="semantic_id")
TIMES = ("gather_seconds", "plan_seconds", "exchange_seconds", "waited_seconds")
Folders = list[tuple[Path, float]]


def _bits(batch: JaggedBatch) -> list[Any]:
    """Return every field of a batch, and every bit of its tensors, but not the hash of a plan that is not confirmed."""
    bits: list[Any] = []
    for field in dataclasses.fields(batch):
        if field.name == "plan_hash":
            continue
        value = getattr(batch, field.name)
        parts = [value]
        if isinstance(value, KeyedJaggedTensor):
            bits += [value.keys(), value.stride(), value.length_per_key(), value.offset_per_key()]
            parts = [value.values(), value.lengths()]
        for part in parts:
            if isinstance(part, torch.Tensor):
                part = (part.dtype, part.shape, as_bytes(part.contiguous()).numpy().tobytes())
            bits.append((field.name, part))
    return bits


def _measured(metrics: StepMetrics) -> list[Any]:
    """Return what balancing did, without times."""
    values = [getattr(metrics, field.name) for field in dataclasses.fields(metrics) if field.name not in TIMES]
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]


def _data(folders: Folders) -> Path | Mixture:
    return folders[0][0] if len(folders) == 1 else Mixture(weights=dict(folders))


def _without_and_with_exchange(
    rank: int, world_size: int, folders: Folders, config: ReadConfig[Any], balance: dict[str, Any], epochs: int
) -> list[Any]:
    """Return the epochs of a balancing loader, and those of a Balancer: per step, the batch and its metrics."""
    ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}
    ways = []
    for has_exchange in (False, True):
        metrics: list[StepMetrics] = []
        batches: Any
        if has_exchange:
            batches = Balancer(
                build_loader(_data(folders), config, **ranks), BalanceConfig(**balance, on_step=metrics.append)
            )
        else:
            way = BalanceConfig(**balance, on_step=metrics.append)
            batches = build_loader(_data(folders), config, **ranks, balance=way)
        steps = [_bits(batch) for _ in range(epochs) for batch in batches]
        batches.close()
        ways.append(list(zip(steps, map(_measured, metrics), strict=True)))
    return ways


def check_ways(
    ranks: RankPool,
    world_size: int,
    folders: Folders,
    config: ReadConfig[Any],
    *,
    epochs: int = 1,
    **balance: Any,
) -> None:
    balance = {"cost": COST} | balance
    for without, with_exchange in ranks.run(world_size, _without_and_with_exchange, folders, config, balance, epochs):
        assert len(without) == len(with_exchange) > 0
        for step, other in zip(without, with_exchange, strict=True):
            assert step == other


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(1, "lpt-swap"), (2, "karmarkar-karp"), (3, "min-move"), (4, "lpt-swap"), (8, "karmarkar-karp")],
)
def test_batches_are_those_of_a_balancer(ranks: RankPool, small_dataset: Path, world_size: int, strategy: str) -> None:
    config = LoaderConfig(batch_size=5, max_history_length=20, user_id=True, num_workers=2, prefetch=3)
    check_ways(ranks, world_size, [(small_dataset, 1.0)], config, strategy=strategy, epochs=2)


@pytest.mark.parametrize(
    "options",
    [
        {"order": "time"},
        {"order": "rows", "drop_last": True},
        {"split": "eval", "max_num_candidates": 2},
        {"max_num_candidates": 3, "candidate_actions": True, "num_tasks": 2},
        {"num_tasks": 1, "extra_events": ("timestamp_ms",)},
        {"max_history_length": 0},
    ],
    ids=str,
)
def test_all_settings_of_a_loader_are_planned_as_they_are_trained(
    ranks: RankPool, small_dataset: Path, options: dict[str, Any]
) -> None:
    check_ways(ranks, 3, [(small_dataset, 1.0)], LoaderConfig(**{"batch_size": 4, **options}))


@pytest.mark.parametrize("options", [{}, {"history_labels": True, "candidate_feature": True, "user_id": True}], ids=str)
def test_semantic_ids_are_planned_by_their_codes(ranks: RankPool, small_dataset: Path, options: dict[str, Any]) -> None:
    config = SemanticIdConfig(batch_size=4, codes=CODES, max_history_length=9, **options)
    check_ways(ranks, 2, [(small_dataset, 1.0)], config, cost=CODE_COST)


def test_mixtures_are_balanced_too(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(small_dataset)
    check_ways(ranks, 3, [(small_dataset, 2.0), (other, 1.0)], LoaderConfig(batch_size=4), epochs=2)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "min-move", "tolerance": 0.1},
        {"max_tokens_per_rank": 400},
        {"strategy": "none"},
    ],
    ids=str,
)
def test_all_options_of_a_partition_are_those_of_a_balancer(
    ranks: RankPool, small_dataset: Path, options: dict[str, Any]
) -> None:
    config = LoaderConfig(batch_size=4, max_history_length=30)
    check_ways(ranks, 4, [(small_dataset, 1.0)], config, **options)


def _loaders(path: Path, world_size: int, **options: Any) -> list[Loader[SequenceBatch]]:
    """Return the loaders of all ranks, without a process group."""
    config = LoaderConfig(**{"batch_size": 4, **options})
    balance = BalanceConfig(cost=COST)
    return [build_loader(path, config, rank=rank, world_size=world_size, balance=balance) for rank in range(world_size)]


def _all_ids(path: Path) -> list[int]:
    loader = build_loader(path, LoaderConfig(batch_size=64), rank=0, world_size=1)
    return [sample for batch in loader for sample in ids_of(batch)]


@settings(max_examples=20)
@given(
    world_size=st.integers(1, 8),
    other_size=st.integers(1, 8),
    batch_size=st.integers(1, 9),
    stop=st.integers(0, 12),
    order=st.sampled_from(["shuffle", "rows", "time"]),
)
def test_each_sample_comes_once_also_if_it_resumes_on_other_ranks(
    small_dataset: Path, world_size: int, other_size: int, batch_size: int, stop: int, order: str
) -> None:
    loaders = _loaders(small_dataset, world_size, batch_size=batch_size, order=order)
    before = [list(itertools.islice(iter(loader), stop)) for loader in loaders]
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    resumed = _loaders(small_dataset, other_size, batch_size=3, order=order)
    for loader in resumed:
        loader.load_state_dict(states[0])
    after = [list(loader) for loader in resumed]
    ids = [sample for batches in [*before, *after] for batch in batches for sample in ids_of(batch)]
    epochs = 2 if stop >= len(loaders[0]) else 1  # nothing is left of the first one, or the rest of it
    assert sorted(ids) == sorted(epochs * _all_ids(small_dataset))


def _steps(path: Path, **options: Any) -> list[Any]:
    """Return the steps of rank 1 of 3: per step, the batch and its metrics."""
    metrics: list[StepMetrics] = []
    balance = BalanceConfig(cost=COST, on_step=metrics.append)
    loader = build_loader(path, LoaderConfig(batch_size=4, **options), rank=1, world_size=3, balance=balance)
    batches = list(loader)
    return [(_bits(batch), _measured(of_step)) for batch, of_step in zip(batches, metrics, strict=True)]


@pytest.mark.parametrize("at_once", [1, 7, 29, 1 << 20])
def test_steps_are_the_same_planned_in_parts_or_several_at_once(
    small_dataset: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    one_by_one = _steps(small_dataset, prefetch=1)
    assert len(one_by_one) > 10
    monkeypatch.setattr(balanced_steps, "_SAMPLES_AT_ONCE", at_once)
    assert _steps(small_dataset, prefetch=5) == one_by_one


def test_nothing_is_measured_unless_on_step_is_given(small_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(no_exchange, "measure_step", None)
    assert len(list(_loaders(small_dataset, 2)[0])) > 10
    with pytest.raises(TypeError):
        _steps(small_dataset)


def test_a_transform_is_refused(small_dataset: Path) -> None:
    with pytest.raises(ConfigError, match="balance plans from the lengths in the store, which a transform may change"):
        build_loader(
            small_dataset,
            LoaderConfig(batch_size=4),
            rank=0,
            world_size=1,
            transform=lambda batch, rng: batch,
            balance=BalanceConfig(cost=COST),
        )


def _pickled(rank: int, world_size: int, path: Path) -> list[list[int]]:
    balance = BalanceConfig(cost=COST, on_step=lambda metrics: None)
    loader = build_loader(
        path, LoaderConfig(batch_size=4), rank=rank, world_size=world_size, balance=balance, group=dist.group.WORLD
    )
    copy = pickle.loads(pickle.dumps(loader))
    assert [_bits(batch) for batch in copy] == [_bits(batch) for batch in loader]
    return [ids_of(batch) for batch in copy]


def test_a_loader_that_balances_over_a_group_can_be_pickled(ranks: RankPool, small_dataset: Path) -> None:
    first, second = ranks.run(2, _pickled, small_dataset)
    assert sorted(sample for step in [*first, *second] for sample in step) == sorted(_all_ids(small_dataset))
