import logging
import math
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from evenrank.core.errors import ConfigError, RankError
from evenrank.dataloader import JaggedBatch, dense
from evenrank.dataloader.balance.ranks.process_group import members_of
from evenrank.training import FiniteCheck, LossAverage, MemoryUsage, MemoryWatch, StallWatch, accumulate, scale_loss
from evenrank.training.watch import GIB, STORE_TIMEOUT, Alarm, arrivals_line
from tests.ranks import RankPool


def test_an_alarm_rings_once_per_stall_between_the_first_heartbeat_and_the_last() -> None:
    alarm = Alarm(10)
    assert not alarm.rings(1e9)
    for beat in (100, 200):
        alarm.beat(beat)
        assert [alarm.rings(beat + later) for later in (0, 9.9, 10, 90)] == [False, False, True, False]
    assert alarm.count == 2
    alarm.disarm()
    assert not alarm.rings(1e9)
    with StallWatch(60) as watch:
        watch.beat()
        assert "evenrank-stall-watch" in {thread.name for thread in threading.enumerate()}
    assert "evenrank-stall-watch" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ConfigError, match="the StallWatch is closed; create another one"):
        watch.beat()


def _stall_twice(rank: int, world_size: int) -> list[str]:
    """Let rank 1 stay behind, while rank 0 waits for it, and return the reports of this rank."""
    ends = os.pipe()
    reader, writer = os.fdopen(ends[0]), os.fdopen(ends[1], "w")

    def report(last_line: str) -> str:
        """Return what is written up to a line that matches; blocks until then."""
        lines = [reader.readline()]
        while not re.search(last_line, lines[-1]):
            lines.append(reader.readline())
        return "".join(lines)

    reports = []
    with StallWatch(0.2, file=writer) as watch:
        store = members_of(None, STORE_TIMEOUT).substore("test")  # a Balancer's, for which a watch changes nothing
        store.set(str(rank), "here")
        watch.beat()
        for heartbeat in (2, 3):
            if rank == 0:
                watch.beat()
                reports.append(report(f"not arrived at heartbeat {heartbeat}: 1 "))
                dist.barrier()
            else:
                if heartbeat == 2:
                    reports.append(report("ranks have"))
                dist.barrier()
                watch.beat()
            dist.barrier()
        assert store.check(["0", "1"])
    return reports


def test_stacks_and_the_ranks_that_have_not_arrived_are_reported_in_each_stall(ranks: RankPool) -> None:
    reports, (of_rank_1,) = ranks.run(2, _stall_twice)
    assert "rank 1 has had no heartbeat for 0.2 s, since heartbeat 1" in of_rank_1
    for number, report in enumerate(reports):
        line = rf"evenrank: rank 0: 1 of 2 ranks have not arrived at heartbeat {number + 2}: 1 \(at \d\)"
        assert re.fullmatch(line, report.splitlines()[-1])
        assert "in _stall_twice" in report


def test_exactly_the_ranks_behind_the_furthest_have_not_arrived() -> None:
    named = ", ".join(f"{rank} (at 1,234)" for rank in range(1, 17))
    for counts, line in (
        ([3], "all 1 ranks have arrived at heartbeat 3"),
        ([0, 0], "all 2 ranks have arrived at heartbeat 0"),
        ([5, 2, 5, 0], "2 of 4 ranks have not arrived at heartbeat 5: 1 (at 2), 3 (at 0)"),
        ([1235, *[1234] * 16], f"16 of 17 ranks have not arrived at heartbeat 1,235: {named}"),
        ([1235, *[1234] * 18], f"18 of 19 ranks have not arrived at heartbeat 1,235: {named} and 2 more"),
    ):
        assert arrivals_line(counts) == line


HALF, LEAST = "more than 50% of the device is reserved but unallocated", "less than 2 GiB is free"


@pytest.mark.parametrize(
    ("options", "unallocated", "free", "reason"),
    [
        ({}, 40 * GIB + 1, 10 * GIB, HALF),
        ({}, GIB, 2 * GIB - 1, LEAST),
        *(({}, *usage, None) for usage in ((40 * GIB, 10 * GIB), (GIB, 2 * GIB), (0, 0))),  # nothing to release
        ({"max_unallocated": 0.25}, 20 * GIB + 1, 10 * GIB, HALF.replace("50%", "25%")),
        ({"min_free_gib": 0.5}, GIB, GIB // 2 - 1, LEAST.replace("2 GiB", "0.5 GiB")),
    ],
)
def test_the_cache_is_released_beyond_limits_which_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, options: Any, unallocated: int, free: int, reason: str | None
) -> None:
    reserved, watch = [5 * GIB + unallocated], MemoryWatch("cuda", **options)

    def usage() -> MemoryUsage:
        return MemoryUsage(allocated=5 * GIB, reserved=reserved[0], free=free, total=80 * GIB)

    monkeypatch.setattr(watch, "usage", usage)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: reserved.__setitem__(0, 5 * GIB))
    with caplog.at_level(logging.WARNING, logger="evenrank"):
        assert watch.check().unallocated == (unallocated if reason is None else 0)
    line = r"memory: 5\.0 GiB allocated, .* of 80\.0; (.*), so .* of cache were released"
    assert [re.sub(line, r"\1", message) for message in caplog.messages] == [reason] * (reason is not None)


@pytest.mark.gpu
def test_on_a_gpu_a_large_cache_is_released(caplog: pytest.LogCaptureFixture) -> None:
    torch.cuda.empty_cache()
    watch = MemoryWatch(torch.device("cuda", torch.cuda.current_device()))
    if (start := watch.usage()).free < 0.6 * start.total:
        pytest.skip(f"the device is in use: {start.line()}")
    kept = torch.ones(GIB // 4, device="cuda")
    assert watch.check().allocated >= start.allocated + kept.nbytes
    assert not caplog.messages  # there is no reason
    torch.empty(int(0.55 * start.total), dtype=torch.uint8, device="cuda")  # freed at once
    with caplog.at_level(logging.WARNING, logger="evenrank"):
        after = watch.check()
    assert HALF in caplog.text
    assert after.unallocated < GIB <= torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()


ADVICE = "load a checkpoint of an earlier step, as the weights may have been trained with it since"


@dataclass(kw_only=True, eq=False, repr=False)
class _Batch(JaggedBatch):
    sample_ids: Tensor = dense(fill=-1)


def _batch(rank: int, step: int, num_real: int = 3, device: str = "cpu") -> _Batch:
    ids = torch.cat([100 * rank + 10 * step + torch.arange(num_real), torch.tensor([-1])]).to(device)
    counts: dict[str, Any] = {"loss_tokens": 1, "world_loss_tokens": 1, "dp_size": 1}
    return _Batch(batch_size=num_real + 1, num_real=num_real, epoch=2, step=step, sample_ids=ids, **counts)


OF_RANK_1 = f"the loss of rank 1 in epoch 2, step 2 is [nan]; its samples are 120, 121, 122; {ADVICE}"
OF_RANK_2 = "the loss of rank 2 in epoch 2, step 1 is [-inf]; its samples are 210, 211, 212; it is one of 2 such ranks"
Losses = Mapping[tuple[int, int], float]  # by rank and step
# Losses, the device, and of each rank the number of steps that were trained and the error.
CASES: list[tuple[Losses, str, Any]] = [
    # From the next step on the losses of all ranks are NaN, but the first one is named.
    ({(1, 2): math.nan}, "cpu", [(3, OF_RANK_1)] * 4),
    ({(3, 1): math.nan, (2, 1): -math.inf}, "cpu", [(2, f"{OF_RANK_2}; {ADVICE}")] * 4),
    ({(1, 4): math.nan}, "cpu", [(5, OF_RANK_1.replace("step 2", "step 4").replace("12", "14"))] * 4),
    ({(0, 1): 1e30}, "cpu", [(5, None)] * 4),
    # Ranks are named by their numbers in the job, and only those of the group raise.
    ({(1, 2): math.nan}, "mesh", [(5, None), (3, OF_RANK_1)] * 2),
]


def _train(rank: int, world_size: int, cases: list[tuple[Losses, str]]) -> list[tuple[int, str | None]]:
    """Train with losses of these values in these steps of these ranks."""
    found = []
    for values, device in cases:
        group: Any = None
        if device == "mesh":  # of two data-parallel ranks
            group, device = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"], "cpu"
        elif device == "cuda":
            torch.cuda.set_device(rank)
            group = dist.new_group(backend="nccl")
        of_model = {"device_mesh": group} if hasattr(group, "mesh") else {"process_group": group}
        model = DistributedDataParallel(torch.nn.Linear(2, 2).to(device), **of_model)
        optimizer, check = torch.optim.SGD(model.parameters(), lr=0.1), FiniteCheck(group=group)
        trained, message = 0, None
        try:
            for step in range(5):
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
            message = re.sub(r"\[0\.\d+, ", "[", str(error))
        still_works = torch.ones(1, device=device)
        dist.all_reduce(still_works, group=group if device == "cuda" else None)
        assert still_works.item() == world_size
        found.append((trained, message))
    return found


def test_all_ranks_raise_one_step_after_a_loss_that_is_not_finite(ranks: RankPool) -> None:
    of_ranks = ranks.run(4, _train, [case for *case, _ in CASES])
    assert [list(found) for found in zip(*of_ranks, strict=True)] == [expected for *_, expected in CASES]


@pytest.mark.multi_gpu
def test_all_ranks_raise_over_nccl(gpu_ranks: RankPool) -> None:
    assert gpu_ranks.run(2, _train, [(CASES[0][0], "cuda")]) == [[(3, OF_RANK_1)]] * 2


def test_samples_and_losses_are_named_up_to_a_limit() -> None:
    ids, plain = ", ".join(map(str, range(64))), JaggedBatch(batch_size=4, num_real=3)
    nan = torch.tensor(math.nan)
    for loss_sums, batch, line in (
        (nan, _batch(0, 7), "2, step 7 is nan; its samples are 70, 71, 72"),
        (nan, _batch(0, 0, num_real=100), f"2, step 0 is nan; its samples are {ids} and 36 more"),
        (nan, _batch(0, 0, num_real=64), f"2, step 0 is nan; its samples are {ids}"),
        (nan, _batch(0, 0, num_real=0), "2, step 0 is nan; its samples are none"),
        (nan, plain, "0, step 0 is nan; its 3 samples have no ids"),
        (nan.repeat(90), _batch(0, 0), "2, step 0 is not finite in 90 of 90 entries; its samples are 0, 1, 2"),
    ):
        check = FiniteCheck()
        check.update(loss_sums, batch)
        with pytest.raises(RankError) as raised:
            check.update(torch.tensor(1.0), batch)
        assert str(raised.value) == f"the loss of rank 0 in epoch {line}; {ADVICE}"
        check.finish()  # an error is raised once


@pytest.mark.gpu
def test_no_step_synchronizes_with_the_device() -> None:
    check, average = FiniteCheck(), LossAverage(2, device="cuda")
    weight = torch.ones(2, device="cuda", requires_grad=True)
    batches = [_batch(0, step, device="cuda") for step in range(5)]
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
    assert weight.grad.tolist() == [6 / 3 * 5, 0]
    assert average.compute() == pytest.approx([2, math.nan], nan_ok=True)
    with pytest.raises(RankError, match=r"in epoch 2, step 3 is \[nan, nan\]; its samples are 30, 31, 32;"):
        check.finish()
