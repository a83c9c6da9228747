import dataclasses
import itertools
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from evenrank.core.errors import ConfigError
from evenrank.dataloader import (
    Loader,
    LoaderConfig,
    Mixture,
    TimeWindows,
    build_loader,
    random_codes,
)
from evenrank.dataloader.balance import BalanceConfig, Balancer, StepMetrics
from evenrank.dataloader.sampling import balanced_steps
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import ids_of
from tests.ranks import RankPool


def _measured(metrics: StepMetrics) -> list[Any]:
    """Return the counts and loads of a step, without times."""
    values = {name: value for name, value in dataclasses.asdict(metrics).items() if not name.endswith("_seconds")}
    return [np.asarray(value).tolist() for value in values.values()]


def _both_ways(
    rank: int, world_size: int, path: Path | Mixture, config: LoaderConfig, epochs: int, options: Any
) -> None:
    ways = []
    for has_exchange in (False, True):
        metrics: list[StepMetrics] = []
        balance = BalanceConfig(**{"cost": COST, **options}, on_step=metrics.append)
        build = partial(build_loader, path, config, rank=rank, world_size=world_size)
        batches: Any = Balancer(build(), balance) if has_exchange else build(balance=balance)
        steps = [bits_of(batch) for _ in range(epochs) for batch in batches]
        batches.close()
        ways.append(list(zip(steps, map(_measured, metrics), strict=True)))
    without, with_exchange = ways
    assert len(without) == len(with_exchange) > 0
    for step, other in zip(without, with_exchange, strict=True):
        assert step == other


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {"strategy": "lpt-swap"}),
        (2, {"strategy": "karmarkar-karp"}),
        (3, {"strategy": "min-move", "tolerance": 0.1}),
        (4, {"max_tokens_per_rank": 75}),
        (4, {"strategy": "none"}),
        (8, {"strategy": "lpt-swap"}),
    ],
    ids=str,
)
def test_batches_are_a_balancers(ranks: RankPool, small_dataset: Path, world_size: int, options: Any) -> None:
    config = LoaderConfig(batch_size=5, max_history_length=20, user_id=True, num_workers=2, prefetch=3)
    ranks.run(world_size, _both_ways, small_dataset, config, 2, options)


@pytest.mark.parametrize(
    "options",
    [
        {"order": TimeWindows(every="1w"), "max_num_candidates": 2},
        {"order": "rows", "drop_last": True},
        {"split": "eval", "max_num_candidates": 2},
        {"max_num_candidates": 3, "candidate_actions": True, "num_tasks": 2},
        {"num_tasks": 1, "extra_events": ("timestamp_ms",)},
        {"max_history_length": 0},
    ],
    ids=str,
)
def test_settings_are_planned_as_trained(ranks: RankPool, small_dataset: Path, options: dict[str, Any]) -> None:
    ranks.run(3, _both_ways, small_dataset, LoaderConfig(**{"batch_size": 4, **options}), 1, {})


@pytest.mark.parametrize(
    "options",
    [
        {"extra_events": ("price", "dwell"), "weight": "dwell"},
        {"max_num_candidates": 2, "label": ("dwell", "price"), "weight": "share", "context": ("tags",)},
        {"label": "price", "weight": "price", "context": ("share",)},
    ],
    ids=str,
)
def test_columns_of_every_kind_are_moved_and_planned_as_trained(
    ranks: RankPool, rich_dataset: Path, options: dict[str, Any]
) -> None:
    ranks.run(2, _both_ways, rich_dataset, LoaderConfig(batch_size=6, prefetch=3, **options), 1, {})


@pytest.mark.parametrize("options", [{}, {"history_labels": True, "candidate_feature": True, "user_id": True}], ids=str)
def test_semantic_ids_are_planned_by_their_codes(ranks: RankPool, small_dataset: Path, options: dict[str, Any]) -> None:
    codes = random_codes(501, levels=2, codebook_size=8)
    config = LoaderConfig(batch_size=4, codes=codes, max_history_length=9, **options)
    cost = dataclasses.replace(COST, history_key="semantic_id")
    ranks.run(2, _both_ways, small_dataset, config, 1, {"cost": cost})


def test_mixtures_are_balanced_too(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(small_dataset)
    mixture = Mixture(weights={small_dataset: 2.0, other: 1.0})
    ranks.run(3, _both_ways, mixture, LoaderConfig(batch_size=4), 2, {})


def _loaders(path: Path, world_size: int, **options: Any) -> list[Loader[Any]]:
    config = LoaderConfig(**{"batch_size": 4, **options})
    build = partial(build_loader, path, config, world_size=world_size, balance=BalanceConfig(cost=COST))
    return [build(rank=rank) for rank in range(world_size)]


def _all_ids(path: Path) -> list[int]:
    loader = build_loader(path, LoaderConfig(batch_size=64), rank=0, world_size=1)
    return sorted(sample for batch in loader for sample in ids_of(batch))


def _steps(path: Path, **options: Any) -> list[Any]:
    metrics: list[StepMetrics] = []
    balance = BalanceConfig(cost=COST, on_step=metrics.append)
    loader = build_loader(path, LoaderConfig(batch_size=4, **options), rank=1, world_size=3, balance=balance)
    batches = list(loader)
    return [(bits_of(batch), _measured(of_step)) for batch, of_step in zip(batches, metrics, strict=True)]


@pytest.mark.parametrize("at_once", [1, 7, 29, 1 << 20])
def test_steps_can_be_planned_together(small_dataset: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    one_by_one = _steps(small_dataset, prefetch=1)
    assert len(one_by_one) > 10
    monkeypatch.setattr(balanced_steps, "_SAMPLES_AT_ONCE", at_once)
    assert _steps(small_dataset, prefetch=5) == one_by_one


def test_nothing_is_measured_unless_on_step_is_given(small_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balanced_steps, "measure_step", None)
    assert len(list(_loaders(small_dataset, 2)[0])) > 10
    with pytest.raises(TypeError):
        _steps(small_dataset)


def test_a_transform_is_refused(small_dataset: Path) -> None:
    balance = BalanceConfig(cost=COST)
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "balance": balance, "transform": lambda batch, rng: batch}
    with pytest.raises(ConfigError, match="balance plans from the lengths in the store, which a transform may change"):
        build_loader(small_dataset, LoaderConfig(batch_size=4), **options)


def _pickled(rank: int, world_size: int, path: Path) -> list[list[int]]:
    balance = BalanceConfig(cost=COST, on_step=lambda metrics: None)
    build = partial(build_loader, path, LoaderConfig(batch_size=4), balance=balance)
    loader = build(rank=rank, world_size=world_size, group=dist.group.WORLD)
    copy = pickle.loads(pickle.dumps(loader))
    assert [bits_of(batch) for batch in copy] == [bits_of(batch) for batch in loader]
    return [ids_of(batch) for batch in copy]


def test_a_loader_that_balances_over_a_group_can_be_pickled(ranks: RankPool, small_dataset: Path) -> None:
    first, second = ranks.run(2, _pickled, small_dataset)
    assert sorted(itertools.chain(*first, *second)) == _all_ids(small_dataset)
