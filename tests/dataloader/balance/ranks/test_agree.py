"""What is wrong or different on one rank alone is an error on all ranks, at once: none waits, and nothing moves."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from evenrank.core.errors import ConfigError, EvenrankError, RankError
from evenrank.dataloader import ElasticSampler, JaggedBatch, LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, LinearCost
from evenrank.dataloader.balance.ranks import process_group
from evenrank.dataloader.balance.ranks.agree import common_schema, steps_to_plan
from evenrank.dataloader.balance.ranks.metadata import StepMetadata, new_message
from evenrank.dataloader.batches.padding import pad_batch
from evenrank.dataloader.batches.schema import schema_of
from evenrank.training import StepTimer
from tests.dataloader.balance.costs import COST, Ints, Lengths, one_per_sample, rich_tokens
from tests.dataloader.rich_batch import rich_batch
from tests.ranks import RankPool

BATCH = rich_batch([[(1, 1), (1, 1)]])


class _Power:
    """Costs of one name, which are compared by what they return."""

    def __init__(self, power: int) -> None:
        self._power = power

    def __call__(self, lengths: Lengths, num_candidates: Ints) -> Ints:
        return lengths["item_id"] ** self._power


def _negative(lengths: Lengths, num_candidates: Ints) -> Ints:
    return 5 - lengths["a"]


def _loader(data: Path, rank: int, **changes: Any) -> None:
    options: dict[str, Any] = {"path": data, "config": {}, "balance": {}, "rank": rank, "world_size": 3} | changes
    if isinstance(config := options.pop("config"), dict):
        config = LoaderConfig(**{"batch_size": 4, **config})
    balance = BalanceConfig(**{"cost": _Power(1), "timeout": timedelta(seconds=30), **options.pop("balance")})
    build_loader(options.pop("path"), config, **options, balance=balance)


def _balancer(data: Path, rank: int, batches: Any = (BATCH, BATCH), device: Any = None, **options: Any) -> None:
    with Balancer(batches, BalanceConfig(**{"cost": _negative, **options}), device=device) as balancer:
        list(balancer)


def _packed(data: Path, rank: int, length: int = 3) -> None:
    batches = [rich_batch([[(length, 0), (0, 0)]])] * 3
    _balancer(data, rank, batches, cost=rich_tokens, pack=True, max_tokens_per_rank=20)


def _balancer_without_group(data: Path, rank: int, **options: Any) -> None:
    # A rank that creates a group would wait there for the others.
    with patch.object(process_group.FailFastGroup, "__init__", side_effect=AssertionError("created a group")):
        _balancer(data, rank, **options)


def _balanced_loader(data: Path, rank: int, state_of: int | None = None, leaves: bool = False) -> None:
    loader = build_loader(data, LoaderConfig(batch_size=4), rank=rank, world_size=3)
    with Balancer(loader, BalanceConfig(cost=COST)) as balancer:
        for batch in balancer:
            if leaves and batch.step == 2:
                break
        if state_of is not None:
            other = build_loader(data, LoaderConfig(batch_size=4, seed=state_of), rank=0, world_size=1)
            next(iter(other))
            balancer.load_state_dict(other.state_dict())
        list(balancer)


def _sampler(data: Path, rank: int, **options: Any) -> None:
    given = {"num_samples": 8, "batch_size": 2, "rank": rank, "world_size": 3, "lengths": {"item_id": np.arange(8)}}
    ElasticSampler(**{**given, "balance": BalanceConfig(cost=one_per_sample), **options})


def _refitted(data: Path, rank: int, on_step: Any = None) -> None:
    linear = LinearCost(interleave_actions=False)
    Balancer([BATCH], BalanceConfig(cost=linear, on_step=on_step or StepTimer(), refit_every=20))


def _local_batch() -> JaggedBatch:
    @dataclass(kw_only=True, eq=False, repr=False)
    class Local(JaggedBatch):
        ids: torch.Tensor

    return Local(batch_size=1, num_real=1, ids=torch.zeros(1))


GRADIENT = replace(BATCH, matrix=BATCH.matrix.clone().requires_grad_())
OTHER = "ValueError: a batch differs from the first one"
TIMER = "ConfigError: refit_every=20 needs the times of all ranks, but on_step is builtin_function_or_method; pass on"
# What is made; with which options on rank 1; and the line there. If it begins with an error's name, others raise a
# RankError with "rank 1 failed: " before it; else it is the same RankError on all ranks. With !, all say that rank 1
# has failed, in a batch of its own; with =, all find the error.
CASES: list[tuple[Callable[..., None], dict[str, Any], str]] = [
    (_loader, {"path": Path("/nowhere")}, "DataError: /nowhere"),
    (_loader, {"config": {"seed": 1}}, "seed differs between ranks: 0 on rank 0, 1 on rank 1"),
    (_loader, {"balance": {"compare_every": 4}}, "compare_every differs between ranks: None on rank 0, 4 on rank 1"),
    (_loader, {"balance": {"cost": COST}}, "cost differs between ranks: _Power on rank 0, HSTUCost("),
    (_loader, {"balance": {"cost": _Power(2)}}, "costs and plan of the first step differs between ranks: "),
    (_loader, {"balance": {"tolerance": 2}}, "ConfigError: BalanceConfig: tolerance must be at least 0 and below 1"),
    (_loader, {"rank": 0}, "the loader of rank 1 was created for rank 0; pass each rank its own number"),
    (_loader, {"world_size": 4}, "ConfigError: the loader is created for world_size 4, but 3 ranks would"),
    (_loader, {"config": 4}, "ConfigError: build_loader: config must be of type LoaderConfig, got 4"),
    (_balancer, {"timeout": timedelta(seconds=-1)}, "ConfigError: BalanceConfig: timeout must be above 0:00:00"),
    (_balancer, {"strategy": "none"}, "strategy differs between ranks: lpt-swap on rank 0, none on rank 1"),
    (_balancer_without_group, {"lookahead": 0}, "ConfigError: BalanceConfig: lookahead must be at least 1, got 0"),
    (_balancer, {"batches": [replace(BATCH, ids=BATCH.ids.int())]}, "batches differ between rank 0 and rank 1: ids"),
    (_balancer, {"batches": [BATCH, pad_batch(BATCH, 2)]}, "! a batch has 2 rows, but balanced batches have 1:"),
    (_balancer, {"batches": [BATCH, replace(BATCH, flags=BATCH.flags[:, :2])]}, f"! {OTHER}: flags: torch.bool[3] "),
    (_balancer, {"batches": [BATCH, rich_batch([[(6, 1), (1, 1)]])]}, "! the cost _negative must not be negative"),
    (_balancer, {"batches": [BATCH, replace(BATCH, num_real=7)]}, "! ValueError: num_real must be between 0 and "),
    (_balancer, {"batches": [BATCH, GRADIENT]}, "! ValueError: matrix must be on the CPU and require no gradient"),
    (_balancer, {"batches": [_local_batch()]}, "! "),
    (_packed, {"length": 30}, "= row 0 of the batch of rank 1 in step 0 of epoch 0 has 30 tokens, more than "),
    (_balanced_loader, {"state_of": 0}, "ranks are out of step: "),
    (_balanced_loader, {"state_of": 5}, "seed differs between ranks: 0 on rank 0, 5 on rank 1"),
    (_balanced_loader, {"leaves": True}, "ranks are out of step: epoch is 0 on rank 0, 1 on rank 1; iterate over "),
    (_sampler, {"rank": 3}, "ConfigError: rank must be between 0 and world_size - 1, got rank 3 of 3"),
    (_sampler, {"lengths": None}, "ConfigError: lengths and balance belong together"),
    (_refitted, {"on_step": print}, TIMER),
]
if not torch.cuda.is_available():  # where there is one, exchange/test_cuda.py has these faults
    GPU = "ConfigError: device is cuda:7, but PyTorch finds no CUDA device on this host; pass device=None"
    CASES.append((_balancer_without_group, {"device": "cuda:7"}, GPU))


def _errors(rank: int, world_size: int, data: Path) -> list[str]:
    """Return the error of each case, with its name unless it is a RankError."""
    errors = []
    for make, options, _ in CASES:
        try:
            make(data, **{"rank": rank, **(options if rank == 1 else {})})
            errors.append("no error")
        except RankError as error:
            errors.append(str(error))
        except EvenrankError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


@pytest.fixture(scope="module")
def errors(ranks: RankPool, small_dataset: Path) -> list[tuple[str, ...]]:
    """Return the errors of three ranks in each case, all of which they meet one after the other."""
    return list(zip(*ranks.run(3, _errors, small_dataset), strict=True))


@pytest.mark.processes
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number][2][:50])
def test_a_mistake_or_a_difference_of_one_rank_is_an_error_of_all(errors: list[tuple[str, ...]], number: int) -> None:
    first, own, last = errors[number]
    kind, line = CASES[number][2][:2], CASES[number][2].removeprefix("! ").removeprefix("= ")
    assert first == last
    if kind in ("! ", "= "):
        assert first == own
        assert first.startswith(f"rank 1 failed: {line}" if kind == "! " else f"ConfigError: {line}")
    else:
        assert own.startswith(line)
        is_own = line.split(":")[0] in ("ConfigError", "DataError")
        assert first == (f"rank 1 failed: {own.partition(': ')[2]}" if is_own else own)


def _pass_wrong_group(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    of_other = [dist.new_group([other]) for other in range(world_size)][1 - rank]
    wrong: list[tuple[Any, str]] = [
        (mesh, r"group is a device mesh of the dimensions \('dp', 'tp'\); pass one dimension, such as"),
        (of_other, "this process is not a rank of the group; pass a group on its own ranks only"),
        ("dp", "group must be a process group or a device mesh, got str"),
    ]
    for group, message in wrong:
        with pytest.raises(ConfigError, match=message):
            Balancer([BATCH], BalanceConfig(cost=COST), group=group)
    if rank > 0:
        return ""
    with pytest.raises(RankError) as raised:
        Balancer([BATCH], BalanceConfig(cost=COST, timeout=timedelta(seconds=1)))
    return str(raised.value)


def test_a_wrong_group_and_a_rank_that_creates_no_balancer_are_named(ranks: RankPool) -> None:
    message, _ = ranks.run(2, _pass_wrong_group)
    assert message.startswith("rank 1 has not created its Balancer in time (")
    assert message.endswith("create one on every rank of the group, in the same order, or raise timeout")


SCHEMA = schema_of(rich_batch([[(1, 2), (0, 3)], [(2, 0), (1, 1)]]))


def _steps(num_steps: int, world_size: int) -> StepMetadata:
    steps = np.stack([new_message(SCHEMA)[:num_steps]] * world_size, axis=1)
    steps["started"] = 1
    return steps


@given(st.integers(1, 8), st.integers(2, 5), st.data())
def test_steps_are_planned_up_to_the_first_that_ranks_are_not_in_together(
    num_steps: int, world_size: int, data: st.DataObject
) -> None:
    known = _steps(num_steps, world_size)
    assert steps_to_plan(known, []) == (num_steps, None)
    index, rank = data.draw(st.integers(0, num_steps - 1)), data.draw(st.integers(0, world_size - 1))
    known["ended"][index:, rank] = 1
    for name in ("epoch", "step", "position"):  # which a rank that has ended has none of
        known[name][index:, rank] = 99
    assert steps_to_plan(known, []) == (num_steps, None)

    word = data.draw(st.sampled_from(["schema_hash", "epoch", "step", "position", "plan_hash"]))
    differing, missing = _steps(num_steps, world_size), _steps(num_steps, world_size)
    differing[word][index, rank] = 7
    missing["started"][index:, rank] = 0
    errors = [[None] * index + ["no data"] if each == rank else [None] * num_steps for each in range(world_size)]
    for found, texts in (
        (steps_to_plan(differing, []), (f"ranks are out of step: {word} is ", f" 7 on rank {rank}")),
        (steps_to_plan(missing, []), (f"rank {rank} has not started a step of others",)),
        (steps_to_plan(_steps(num_steps, world_size), errors), (f"rank {rank} failed: no data",)),
    ):
        assert (found[0], type(found[1])) == (index, RankError)
        assert all(text in str(found[1]) for text in texts)

    known["ended"][index:] = 1
    assert steps_to_plan(known, []) == (index, None)


def test_the_schema_of_all_ranks_has_the_rows_of_the_largest_batch() -> None:
    short = dataclasses.replace(SCHEMA, batch_size=1)
    assert common_schema([short, None, SCHEMA]) == SCHEMA
    assert common_schema([short], 5) == dataclasses.replace(SCHEMA, batch_size=5)
    assert common_schema([None, None]) is None
