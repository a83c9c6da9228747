"""`Loader.pick` names the samples of the batches that a loader yields, in their order, whether it balances or not."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError
from evenrank.dataloader import Loader, LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, HSTUCost, StepMetrics
from tests.dataloader.batch_helpers import ids_of

COST = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)


def _loader(
    path: Path, rank: int, world_size: int, balance: BalanceConfig | None = None, **options: Any
) -> Loader[SequenceBatch]:
    config = LoaderConfig(**{"batch_size": 8, **options})
    return build_loader(path, config, rank=rank, world_size=world_size, balance=balance)


@settings(max_examples=30)
@given(
    world_size=st.integers(1, 5),
    batch_size=st.integers(1, 9),
    stop=st.integers(0, 12),
    strategy=st.sampled_from([None, *STRATEGIES]),
    order=st.sampled_from(["shuffle", "rows", "time"]),
    drop_last=st.booleans(),
)
def test_picks_are_the_batches_also_of_a_resumed_loader(
    small_dataset: Path, world_size: int, batch_size: int, stop: int, strategy: str | None, order: str, drop_last: bool
) -> None:
    balance = None if strategy is None else BalanceConfig(cost=COST, strategy=strategy)
    options = {"batch_size": batch_size, "order": order, "drop_last": drop_last, "seed": 3}
    for rank in range(world_size):
        loader = _loader(small_dataset, rank, world_size, balance, **options)
        stopped = _loader(small_dataset, rank, world_size, balance, **options)
        before = list(itertools.islice(stopped, stop))
        state = stopped.state_dict()
        stopped.load_state_dict(state)
        after = list(itertools.islice(stopped, 3))
        for batches, resumed_from in ((before, {"epoch": 0, "position": 0}), (after, state)):
            for batch in batches:
                start = resumed_from["position"] if batch.epoch == resumed_from["epoch"] else 0
                pick = loader.pick(batch.step, epoch=batch.epoch, start=start)
                assert pick.sample_ids.tolist() == ids_of(batch)
                assert pick.num_rows == batch.batch_size


def test_picking_leaves_an_iteration_as_it_is(small_dataset: Path) -> None:
    expected = [ids_of(batch) for batch in _loader(small_dataset, 1, 2)]
    loader = _loader(small_dataset, 1, 2)
    seen = []
    for batch in loader:
        loader.pick(0, epoch=7, start=5)
        seen.append(ids_of(batch))
        assert loader.state_dict()["position"] == batch.position
    assert seen == expected


def test_a_plan_has_the_tokens_and_costs_of_the_samples(small_dataset: Path) -> None:
    metrics: list[StepMetrics] = []
    loaders = [_loader(small_dataset, rank, 3, BalanceConfig(cost=COST, on_step=metrics.append)) for rank in range(3)]
    for rank, loader in enumerate(loaders):
        metrics.clear()
        for step, batch in enumerate(loader):
            plan = loader.pick(step).plan
            assert plan is not None
            assert plan.metrics is not None
            lengths = batch.features["item_id"].lengths()[: batch.num_real].numpy()
            assert plan.tokens.tolist() == lengths.tolist()
            expected = COST({"item_id": lengths, "action": lengths}, np.zeros_like(lengths))
            assert plan.costs.tolist() == expected.tolist()
            assert plan.costs.sum() == plan.metrics.after[rank] == metrics[step].after[rank]


def test_a_plain_loader_has_no_plan(small_dataset: Path) -> None:
    assert _loader(small_dataset, 0, 2).pick(0).plan is None


def test_a_step_or_position_that_does_not_exist_is_refused(small_dataset: Path) -> None:
    loader = _loader(small_dataset, 0, 2)
    total, num_steps = loader.num_samples, len(loader)
    for step in (-1, num_steps):
        message = f"there is no step {step}: an epoch of {total} samples has {num_steps} from position 0 on"
        with pytest.raises(ConfigError, match=message):
            loader.pick(step)
    with pytest.raises(ConfigError, match=f"there is no step 0: .* has 0 from position {total} on"):
        loader.pick(0, start=total)
    with pytest.raises(ConfigError, match=f"start must be between 0 and num_samples = {total}, got {total + 1}"):
        loader.pick(0, start=total + 1)
