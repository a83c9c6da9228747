import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evenrank.dataloader.balance import StepMetrics, summarize
from evenrank.training import StepTimer, step_timer
from tests.dataloader.balance.metrics.example_steps import step
from tests.ranks import RankPool

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


class Timed(torch.autograd.Function):
    """Passes values and gradients on, which takes a time in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        Time.now += forward
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        Time.now += ctx.backward_seconds
        return gradients[0], None, None


def _timed(forward: float, backward: float, x: Tensor | None = None) -> Tensor:
    x = torch.ones(2, 3, requires_grad=True) if x is None else x
    timed: Tensor = Timed.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return timed


Spans = list[tuple[int, tuple[list[float], list[float]] | None]]


class Written(list[StepMetrics]):
    """A writer that keeps the options and the steps."""

    options: Any = None

    def begin(self, options: Any) -> None:
        self.options = options

    __call__ = list.append

    def spans(self) -> Spans:
        """Return each step, and the seconds of each rank to compute and to wait in it; None if it was not measured."""
        return [
            (each.step, None)
            if each.compute_seconds is None or each.wait_seconds is None
            else (each.step, (each.compute_seconds.tolist(), each.wait_seconds.tolist()))
            for each in self
        ]


def _step(timer: StepTimer, number: int, *, compute: float, wait: float) -> None:
    timer(step(number, before=(6,), after=(5,)))
    Time.now += compute
    with timer.waiting():
        Time.now += wait


@pytest.mark.parametrize("every", [1, 2, 3, 50])
def test_a_step_has_the_time_to_compute_and_that_to_wait(every: int) -> None:
    written, plain = Written(), list[StepMetrics]()
    with StepTimer(written, plain.append, every=every) as timer:
        timer.begin({"strategy": "none"})
        for number in range(5):
            assert len(written) == number // every * every
            _step(timer, number, compute=number + 1, wait=0.5)
    timer.close()  # which writes nothing twice
    assert written.spans() == [(0, None), *((number, ([number + 1], [0.5])) for number in range(1, 5))]
    assert (plain, written.options) == (written, {"strategy": "none"})
    assert summarize(written).measured_steps == 4


@pytest.mark.parametrize(("within", "compute", "wait"), [(False, OTHERS + 9, 0), (True, OTHERS + 4, 5)])
def test_computing_is_all_from_one_step_to_the_last_gradient_of_the_next_or_to_that_of_a_tensor(
    within: bool, compute: float, wait: float
) -> None:
    written = Written()
    model, timer = nn.Linear(3, 1), StepTimer(written)
    for number in range(3):
        timer(step(number))
        embeddings = _timed(1, 5)
        loss = model(_timed(1, 2, embeddings)).sum()
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


def _train(rank: int, world_size: int, every: int) -> Spans:
    """Train with DDP, where each rank computes for a second more than the one before; return the steps written."""
    written, model = Written(), DistributedDataParallel(nn.Linear(3, 1, bias=False))

    def wait() -> None:
        Time.now += world_size - 1 - rank  # until the slowest rank is there

    def all_reduce(
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        step_timer._after_backward(wait)
        reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        reduced.set_result(torch.full_like(bucket.buffer(), 7))
        return reduced

    model.register_comm_hook(None, all_reduce)
    with slow_time(), mock.patch.multiple(dist, all_gather=None, all_reduce=None, barrier=None, broadcast=None):
        timer, gradients = StepTimer(written, every=every), list[Any]()
        release = timer._release

        def watched_release() -> None:
            gradients.append(model.module.weight.grad)
            release()

        with mock.patch.object(timer, "_release", watched_release):
            for number in range(5):
                timer(step(number))
                loss = model(_timed(1, 2 + rank)).sum()
                timer.watch(loss)
                loss.backward()
                assert gradients[-1].tolist() == [[7, 7, 7]]  # DDP was done when the wait ended
        timer.close()
    return written.spans()


@pytest.mark.parametrize(("world_size", "every"), [(2, 1), (3, 2), (3, 50)])
def test_the_slowest_rank_computes_longest_and_the_others_wait(ranks: RankPool, world_size: int, every: int) -> None:
    written, *others = ranks.run(world_size, _train, every)
    assert others == [[]] * (world_size - 1)
    compute = [3 + rank for rank in range(world_size)]
    wait = [world_size - 1 - rank for rank in range(world_size)]
    assert written == [(0, None), *((number, (compute, wait)) for number in range(1, 5))]


Job = tuple[tuple[int, int], tuple[int, int]]  # of each rank, the interval and the number of steps


def _manual(rank: int, world_size: int, jobs: list[Job]) -> list[Spans]:
    """Return what the timers of a group of two ranks write, of which none gets another's times."""
    group, found = dist.new_group([1, 2]), list[Spans]()
    for every, steps in jobs if rank else ():
        written = Written()
        with slow_time(), StepTimer(written, every=every[rank - 1], group=group) as timer:
            for number in range(steps[rank - 1]):
                _step(timer, number, compute=rank, wait=2 - rank)
        found.append(written.spans())
    return found


def test_ranks_with_other_numbers_of_steps_and_intervals_end_with_the_steps_in_common(ranks: RankPool) -> None:
    steps = [(4, 4), (5, 3), (3, 8), (0, 2), (2, 0)]
    jobs: list[Job] = [((every, every), of_ranks) for every in (1, 2, 4) for of_ranks in steps]
    jobs += [(every, (40, 40)) for every in ((3, 50), (50, 3), (7, 5))]
    _, written, others = ranks.run(3, _manual, jobs)
    assert others == [[]] * len(jobs)  # only the first rank calls writers
    for found, (_, of_ranks) in zip(written, jobs, strict=True):
        assert found == [(number, ([1, 2], [1, 0]) if number else None) for number in range(min(of_ranks))]
