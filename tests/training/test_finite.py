import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from evenrank.core.errors import RankError
from evenrank.dataloader import JaggedBatch, dense
from evenrank.training import FiniteCheck, LossAverage, accumulate, scale_loss
from tests.ranks import RankPool

NUM_STEPS = 5
Values = Mapping[tuple[int, int], float]  # by rank and step


@dataclass(kw_only=True, eq=False, repr=False)
class _Batch(JaggedBatch):
    sample_ids: Tensor = dense(fill=-1)


SECOND = "rank 2 in epoch 2, step 1 is [-inf]; its samples are 210, 211, 212"
ADVICE = "load a checkpoint of an earlier step, as the weights may have been trained with it since"


def _batch(rank: int, step: int, num_real: int = 3, device: str = "cpu") -> _Batch:
    ids = torch.cat([100 * rank + 10 * step + torch.arange(num_real), torch.tensor([-1])]).to(device)
    counts: dict[str, Any] = {"loss_tokens": 1, "world_loss_tokens": 1, "dp_size": 1}
    return _Batch(batch_size=num_real + 1, num_real=num_real, epoch=2, step=step, sample_ids=ids, **counts)


def _train(rank: int, world_size: int, values: Values, device: str) -> tuple[int, str | None]:
    """Train with losses of these values in these steps of these ranks; return the steps trained, and the error."""
    group = None
    if device == "cuda":
        torch.cuda.set_device(rank)
        group = dist.new_group(backend="nccl")
    model = DistributedDataParallel(torch.nn.Linear(2, 2).to(device), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    check = FiniteCheck(group=group)
    trained, message = 0, None
    try:
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            # The second task has a loss of its own.
            factor = torch.tensor([1.0, values.get((rank, step), 1.0)], device=device)
            loss_sums = model(torch.ones(2, device=device)).sigmoid() * factor
            batch = _batch(rank, step, device=device)
            check.update(loss_sums, batch)
            loss_sums.sum().backward()
            optimizer.step()
            batch.sample_ids.zero_()  # as a loader that uses its buffers again
            trained += 1
        check.finish()
    except RankError as error:
        message = str(error)
    still_works = torch.ones(1, device=device)
    dist.all_reduce(still_works, group=group)
    assert still_works.item() == world_size
    return trained, message


def _check_raise(ranks: RankPool, world_size: int, values: Values, trained: int, message: str, device: str) -> None:
    ((steps, error),) = set(ranks.run(world_size, _train, values, device))
    assert steps == trained
    assert error is not None
    assert re.sub(r"\[0\.\d+, ", "[", error) == f"the loss of {message}; {ADVICE}"


@pytest.mark.parametrize(
    ("world_size", "values", "trained", "message"),
    [
        # From the next step on the losses of all ranks are NaN, but the first one is named.
        (2, {(1, 2): math.nan}, 3, "rank 1 in epoch 2, step 2 is [nan]; its samples are 120, 121, 122"),
        (4, {(3, 1): math.nan, (2, 1): -math.inf}, 2, f"{SECOND}; it is one of 2 such ranks"),
        (2, {(0, 4): math.nan}, NUM_STEPS, "rank 0 in epoch 2, step 4 is [nan]; its samples are 40, 41, 42"),
    ],
    ids=str,
)
def test_all_ranks_raise_one_step_later(
    ranks: RankPool, world_size: int, values: Values, trained: int, message: str
) -> None:
    _check_raise(ranks, world_size, values, trained, message, "cpu")


@pytest.mark.multi_gpu
def test_all_ranks_raise_over_nccl(gpu_ranks: RankPool) -> None:
    message = "rank 1 in epoch 2, step 2 is [nan]; its samples are 120, 121, 122"
    _check_raise(gpu_ranks, 2, {(1, 2): math.nan}, 3, message, "cuda")


def test_finite_losses_end_nothing(ranks: RankPool) -> None:
    assert ranks.run(2, _train, {(0, 1): 1e30}, "cpu") == [(NUM_STEPS, None)] * 2


def _check_a_mesh(rank: int, world_size: int) -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    messages = []
    for group in (mesh["dp"], None):
        check = FiniteCheck(group=group)
        check.update(torch.tensor(math.nan if rank == 3 else 1.0), _batch(rank, 0))
        try:
            check.finish()
            messages.append("finite")
        except RankError as error:
            messages.append(str(error).split(";")[0])
    return messages[0], messages[1]


def test_ranks_are_named_by_their_numbers_in_the_job_and_only_those_of_the_group_raise(ranks: RankPool) -> None:
    message = "the loss of rank 3 in epoch 2, step 0 is nan"
    results = ranks.run(4, _check_a_mesh)
    assert results == [("finite", message), (message, message), ("finite", message), (message, message)]


def _message_alone(batch: JaggedBatch) -> str:
    check = FiniteCheck()
    check.update(torch.tensor(math.nan), batch)
    with pytest.raises(RankError) as raised:
        check.update(torch.tensor(1.0), batch)
    check.finish()  # an error is raised once
    return str(raised.value)


def test_samples_and_losses_are_named_up_to_a_limit() -> None:
    start = "the loss of rank 0 in epoch"
    assert _message_alone(_batch(0, 7)) == f"{start} 2, step 7 is nan; its samples are 70, 71, 72; {ADVICE}"
    ids = ", ".join(str(sample) for sample in range(64))
    assert f"; its samples are {ids} and 36 more; load" in _message_alone(_batch(0, 0, num_real=100))
    assert f"; its samples are {ids}; load" in _message_alone(_batch(0, 0, num_real=64))
    assert "; its samples are none; load" in _message_alone(_batch(0, 0, num_real=0))
    message = _message_alone(JaggedBatch(batch_size=4, num_real=3))
    assert message.startswith(f"{start} 0, step 0 is nan; its 3 samples have no ids; load")
    check = FiniteCheck()
    check.update(torch.tensor([1.0, math.nan, math.inf]).repeat(30), _batch(0, 0, num_real=90))
    with pytest.raises(RankError, match="in epoch 2, step 0 is not finite in 60 of 90 entries; its samples are 0, 1, "):
        check.finish()


@pytest.mark.gpu
def test_no_step_synchronizes_with_the_device() -> None:
    check, average = FiniteCheck(), LossAverage(2, device="cuda")
    weight = torch.ones(2, device="cuda", requires_grad=True)
    batches = [_batch(0, step, device="cuda") for step in range(NUM_STEPS)]
    tokens = torch.tensor([3, 0], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for (batch,) in accumulate(batches, 1, task_tokens=lambda batch: tokens):
            loss_sums = weight * 6
            check.update(loss_sums, batch)
            average.update(loss_sums, batch, task_tokens=tokens)
            scale_loss(loss_sums, batch).sum().backward()
        check.update(weight * math.nan, batches[3])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert weight.grad is not None
    assert weight.grad.tolist() == [6 / 3 * NUM_STEPS, 0]
    first, second = average.compute()
    assert first == 2
    assert math.isnan(second)
    with pytest.raises(RankError, match=r"in epoch 2, step 3 is \[nan, nan\]; its samples are 30, 31, 32;"):
        check.finish()
