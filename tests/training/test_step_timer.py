import contextlib
from collections.abc import Iterator
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evenrank.dataloader.balance import StepMetrics, summarize
from evenrank.dataloader.balance.ranks.process_group import Members
from evenrank.training import StepTimer, step_timer
from tests.dataloader.balance.metrics.example_steps import step

OTHERS = 100.0  # seconds of what is between two steps and counts as computing, such as of the optimizer


class Time:
    """A clock that only the code below advances."""

    now = 0.0  # seconds


@contextlib.contextmanager
def slow_time() -> Iterator[None]:
    Time.now = 0.0
    with mock.patch("evenrank.training.step_timer.time", SimpleNamespace(perf_counter=lambda: Time.now)):
        yield


@pytest.fixture(autouse=True)
def _own_time() -> Iterator[None]:
    with slow_time():
        yield


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        Time.now += forward
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        Time.now += ctx.backward_seconds
        return gradients[0], None, None


def timed(forward: float, backward: float, x: Tensor | None = None) -> Tensor:
    """Pass values and gradients on, which takes this time in the forward and in the backward pass."""
    x = torch.ones(2, 3, requires_grad=True) if x is None else x
    return _Timed.apply(x, forward, backward)  # type: ignore[no-any-return,no-untyped-call]


Spans = list[tuple[int, tuple[list[float], list[float]] | None]]


class Written(list[StepMetrics]):
    """A writer that keeps the options and the steps."""

    options: Any = None

    def begin(self, options: Any) -> None:
        self.options = options

    __call__ = list.append

    def spans(self) -> Spans:
        """Return each step, and the seconds of each rank to compute and to wait in it; None if it was not measured."""
        times = [(one.step, one.compute_seconds, one.wait_seconds) for one in self]
        return [(n, None if a is None or b is None else (a.tolist(), b.tolist())) for n, a, b in times]


def _step(timer: StepTimer, number: int, *, compute: float, wait: float) -> None:
    timer(step(number, before=(6,), after=(5,)))
    Time.now += compute
    with timer.waiting():
        Time.now += wait


@pytest.mark.parametrize(("within", "compute", "wait"), [(False, OTHERS + 9, 0), (True, OTHERS + 4, 5)])
def test_computing_is_all_from_one_step_to_the_last_gradient_of_the_next_or_to_that_of_a_tensor(
    within: bool, compute: float, wait: float
) -> None:
    written = Written()
    model, timer = nn.Linear(3, 1), StepTimer(written)
    for number in range(3):
        timer(step(number))
        embeddings = timed(1, 5)
        loss = model(timed(1, 2, embeddings)).sum()
        timer.watch(loss, **({"until": embeddings} if within else {}))
        loss.backward()  # 2 seconds until the gradient of the embeddings, then 5 of their exchange
        Time.now += OTHERS
    timer.close()
    assert written.spans() == [(0, None), *((number, ([compute], [wait])) for number in (1, 2))]


def test_a_step_after_an_interruption_is_not_measured_and_a_batch_left_untrained_is_not_written() -> None:
    written = Written()
    with StepTimer(written, every=2) as timer:
        for epoch in range(2):
            for number in range(3):
                _step(timer, number, compute=10 * epoch + number, wait=0)
                if (epoch, number) == (1, 1):
                    Time.now += OTHERS
                    timer.restart()
            timer(step(3))  # handed out, but the loop ends
            timer.drop_untrained()
    of_first: Spans = [(0, None), (1, ([1], [0])), (2, ([2], [0]))]
    assert written.spans() == [*of_first, (0, ([10], [0])), (1, ([11], [0])), (2, None)]


@pytest.fixture
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group_of_one")
def test_the_wait_ends_when_ddp_has_the_gradients() -> None:
    written, model = Written(), DistributedDataParallel(nn.Linear(3, 1, bias=False))

    def wait() -> None:
        Time.now += 4  # until the slowest rank is there

    def all_reduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        step_timer._after_backward(wait)
        reduced: torch.futures.Future[Tensor] = torch.futures.Future()
        reduced.set_result(torch.full_like(bucket.buffer(), 7))
        return reduced

    model.register_comm_hook(None, all_reduce)
    timer, gradients = StepTimer(written, every=2), list[Any]()
    release = timer._release

    def watched_release() -> None:
        gradients.append(model.module.weight.grad.tolist())
        release()

    with mock.patch.object(timer, "_release", watched_release):
        for number in range(5):
            timer(step(number))
            loss = model(timed(1, 2)).sum()
            timer.watch(loss)
            loss.backward()
        timer.close()
    assert gradients == [[[7, 7, 7]]] * 5
    assert written.spans() == [(0, None), *((number, ([3], [4])) for number in range(1, 5))]


@given(
    every=st.lists(st.integers(1, 6) | st.just(50), min_size=1, max_size=3),
    steps=st.lists(st.integers(0, 20), min_size=3, max_size=3),
    turns=st.lists(st.integers(1, 20), min_size=1, max_size=6),
)
@example(every=[3, 50], steps=[40, 40], turns=[1])
@example(every=[50, 3], steps=[40, 40], turns=[1])
@example(every=[1, 1, 1], steps=[4, 3, 5], turns=[9])
@example(every=[2], steps=[5], turns=[1])
def test_steps_in_common_have_the_times_of_all_ranks_whatever_their_numbers_and_intervals(
    every: list[int], steps: list[int], turns: list[int]
) -> None:
    store, world_size, timers = dist.HashStore(), len(every), dict[int, StepTimer]()  # type: ignore[attr-defined]
    written, plain = [Written() for _ in every], [list[StepMetrics]() for _ in every]
    times, done = [0.0] * world_size, [0] * world_size
    for turn in cycle(turns):
        for rank in reversed(range(world_size)):  # others train before rank 0, whose interval counts, has a timer
            if rank not in timers:
                members = Members(rank=rank, world_size=world_size, store=store)
                with mock.patch("evenrank.training.step_timer.members_of", return_value=members):
                    timers[rank] = StepTimer(written[rank], plain[rank].append, every=every[rank])
                timers[rank].begin({"rank": rank})
            Time.now = times[rank]
            for number in range(done[rank], min(done[rank] + turn, steps[rank])):
                assert world_size > 1 or len(written[0]) == number // every[0] * every[0]
                _step(timers[rank], number, compute=rank + 1, wait=world_size - rank)
                done[rank] = number + 1
            times[rank] = Time.now
        if done == steps[:world_size]:
            break
    for rank in (*timers, 0):  # the first one waits for the others, and writes nothing twice
        timers[rank].close()
    of_step = [rank + 1 for rank in range(world_size)], [world_size - rank for rank in range(world_size)]
    assert written[0].spans() == [(number, of_step if number else None) for number in range(min(done))]
    assert (plain[0], written[0].options) == (written[0], {"rank": 0})
    assert summarize(written[0]).measured_steps == max(min(done) - 1, 0)
    assert written[1:] == plain[1:] == [[]] * (world_size - 1)  # only the first rank calls writers
