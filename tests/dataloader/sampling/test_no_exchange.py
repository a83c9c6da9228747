import dataclasses
import itertools
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from evenrank.dataloader import LoaderConfig, Mixture, Negatives, TimeWindows, build_loader, random_codes
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


def _both_ways(rank: int, world_size: int, data: Any, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for options, of_balance in cases:
        config, ways = LoaderConfig(**{"batch_size": 4, "prefetch": 3, **options}), []
        for has_exchange in (False, True):
            metrics: list[StepMetrics] = []
            balance = BalanceConfig(**{"cost": COST, **of_balance}, on_step=metrics.append)
            build = partial(build_loader, data, config, rank=rank, world_size=world_size)
            batches: Any = Balancer(build(), balance) if has_exchange else build(balance=balance)
            steps = [bits_of(batch) for _ in range(2) for batch in batches]
            batches.close()
            ways.append(list(zip(steps, map(_measured, metrics), strict=True)))
        assert ways[0] == ways[1] != [], (options, of_balance)


OF_STRATEGIES: list[Any] = [
    ({"user_id": True, "num_workers": 2, "max_history_length": 20}, {"strategy": "karmarkar-karp"}),
    ({}, {"strategy": "min-move", "tolerance": 0.1}),
    ({"max_history_length": 20}, {"max_tokens_per_rank": 75}),
    ({}, {"strategy": "none"}),
]
CODES = {"codes": random_codes(501, levels=2, codebook_size=8), "max_history_length": 9}
OF_CODES = {"cost": dataclasses.replace(COST, history_key="semantic_id")}
OF_SETTINGS: list[Any] = [
    ({"order": TimeWindows(every="1w"), "max_num_candidates": 2}, {}),
    ({"order": "rows", "drop_last": True}, {}),
    ({"split": "eval", "max_num_candidates": 2}, {}),
    ({"max_num_candidates": 3, "candidate_actions": True, "num_tasks": 2}, {}),
    ({"max_num_candidates": 1, "negatives": Negatives(count=5, by="popularity")}, {}),
    ({"num_tasks": 1, "extra_events": ("timestamp_ms",)}, {}),
    ({"max_history_length": 0}, {}),
    (CODES, OF_CODES),
    ({**CODES, "history_labels": True, "candidate_feature": True, "user_id": True}, OF_CODES),
]
OF_COLUMNS: list[Any] = [
    ({"extra_events": ("price", "dwell"), "weight": "dwell"}, {}),
    ({"max_num_candidates": 2, "label": ("dwell", "price"), "weight": "share", "context": ("tags",)}, {}),
    ({"label": "price", "weight": "price", "context": ("share",)}, {}),
]


def test_batches_and_their_measures_are_a_balancers(ranks: RankPool, small_dataset: Path, rich_dataset: Path) -> None:
    ranks.run(4, _both_ways, small_dataset, OF_STRATEGIES)
    ranks.run(3, _both_ways, small_dataset, OF_SETTINGS)
    ranks.run(2, _both_ways, rich_dataset, OF_COLUMNS)
    ranks.run(1, _both_ways, small_dataset, OF_STRATEGIES[:1])
    ranks.run(3, _both_ways, Mixture(weights={small_dataset: 2.0, str(small_dataset): 1.0}), [({}, {})])


def test_steps_can_be_planned_together(small_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(**options: Any) -> list[Any]:
        metrics: list[StepMetrics] = []
        config, balance = LoaderConfig(batch_size=4, **options), BalanceConfig(cost=COST, on_step=metrics.append)
        batches = list(build_loader(small_dataset, config, rank=1, world_size=3, balance=balance))
        return [(bits_of(batch), _measured(of_step)) for batch, of_step in zip(batches, metrics, strict=True)]

    one_by_one = steps(prefetch=1)
    assert len(one_by_one) > 10
    for at_once in (1, 7, 29, 1 << 20):
        monkeypatch.setattr(balanced_steps, "_SAMPLES_AT_ONCE", at_once)
        assert steps(prefetch=5) == one_by_one


def _pickled(rank: int, world_size: int, path: Path) -> list[list[int]]:
    balance = BalanceConfig(cost=COST, on_step=lambda metrics: None)
    build = partial(build_loader, path, LoaderConfig(batch_size=4), balance=balance)
    loader = build(rank=rank, world_size=world_size, group=dist.group.WORLD)
    copy = pickle.loads(pickle.dumps(loader))
    assert [bits_of(batch) for batch in copy] == [bits_of(batch) for batch in loader]
    return [ids_of(batch) for batch in copy]


def test_a_loader_that_balances_over_a_group_can_be_pickled(ranks: RankPool, small_dataset: Path) -> None:
    first, second = ranks.run(2, _pickled, small_dataset)
    loader = build_loader(small_dataset, LoaderConfig(batch_size=64), rank=0, world_size=1)
    assert sorted(itertools.chain(*first, *second)) == sorted(sample for batch in loader for sample in ids_of(batch))
