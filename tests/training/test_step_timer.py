import contextlib
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evenrank.core.errors import ConfigError, RankLostError
from evenrank.dataloader.balance import StepMetrics, summarize
from evenrank.training import StepTimer, step_timer
from tests.dataloader.balance.metrics.example_steps import step
from tests.ranks import RankPool

OTHERS = 100.0  # seconds of what is between two steps and counts as computing, such as of the optimizer


class _Time:
    """A clock that only the code below advances."""

    now = 0.0  # seconds


@contextlib.contextmanager
def _slow_time() -> Iterator[None]:
    _Time.now = 0.0
    clock = SimpleNamespace(perf_counter=lambda: _Time.now)
    with mock.patch("evenrank.training.step_timer.time", clock):
        yield


@pytest.fixture(autouse=True)
def _own_time() -> Iterator[None]:
    with _slow_time():
        yield


class _Timed(torch.autograd.Function):
    """Passes values and gradients on, which takes a time in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        _Time.now += forward
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _Time.now += ctx.backward_seconds
        return gradients[0], None, None


def _loss(model: nn.Module, forward: float, backward: float) -> Tensor:
    loss: Tensor = model(_Timed.apply(torch.ones(2, 3, requires_grad=True), forward, backward)).sum()  # type: ignore[no-untyped-call]
    return loss


def _spans(steps: list[StepMetrics]) -> list[Any]:
    """Return the seconds of each rank to compute and to wait in each step; None where it was not measured."""
    return [
        None
        if metrics.compute_seconds is None or metrics.wait_seconds is None
        else (metrics.compute_seconds.tolist(), metrics.wait_seconds.tolist())
        for metrics in steps
    ]


def _step(timer: StepTimer, number: int, *, compute: float, wait: float) -> None:
    timer(step(number))
    _Time.now += compute
    with timer.waiting():
        _Time.now += wait


@pytest.mark.parametrize("every", [1, 2, 3, 50])
def test_a_step_has_the_time_to_compute_and_that_to_wait(every: int) -> None:
    written: list[StepMetrics] = []
    with StepTimer(written.append, every=every) as timer:
        for number in range(5):
            assert len(written) == number // every * every
            _step(timer, number, compute=number + 1, wait=0.5)
    assert [metrics.step for metrics in written] == [0, 1, 2, 3, 4]
    assert _spans(written) == [None, *(([number + 1], [0.5]) for number in range(1, 5))]
    assert summarize(written).measured_steps == 4


def test_computing_is_all_from_one_step_to_the_last_gradient_of_the_next() -> None:
    written: list[StepMetrics] = []
    model, timer = nn.Linear(3, 1), StepTimer(written.append)
    for number in range(3):
        timer(step(number))
        loss = _loss(model, forward=1, backward=2)
        timer.watch(loss)
        loss.backward()
        _Time.now += OTHERS
    timer.close()
    assert _spans(written) == [None, *[([OTHERS + 3], [0])] * 2]


def test_computing_may_end_with_the_gradient_of_a_tensor_within_the_backward_pass() -> None:
    written: list[StepMetrics] = []
    model, timer = nn.Linear(3, 1), StepTimer(written.append)
    for number in range(3):
        timer(step(number))
        embeddings = _Timed.apply(torch.ones(2, 3, requires_grad=True), 1, 5)  # type: ignore[no-untyped-call]
        loss = model(_Timed.apply(embeddings, 1, 2)).sum()  # type: ignore[no-untyped-call]
        timer.watch(loss, until=embeddings)
        loss.backward()  # 2 seconds until the gradient of the embeddings, then 5 of their exchange
        _Time.now += OTHERS
    timer.close()
    assert _spans(written) == [None, *[([OTHERS + 4], [5])] * 2]


def _kept_step(timer: StepTimer, number: int) -> None:
    timer(step(number, before=(6,), after=(5,)))
    _Time.now += number
    with timer.waiting():
        _Time.now += 1


def test_the_last_measured_steps_are_kept_for_a_fit() -> None:
    timer = StepTimer(every=2)
    assert not timer.takes_steps
    timer.keep(3, world_size=1)
    assert timer.takes_steps
    assert timer.kept().seconds.shape == (0, 1)
    for number in range(8):
        _kept_step(timer, number)
        if number == 4:
            timer.restart()
    kept = timer.kept()
    assert kept.seconds.tolist() == [[4], [6], [7]]
    assert kept.loads.tolist() == [[5]] * 3
    assert kept.tokens.tolist() == kept.squares.tolist() == [[1]] * 3
    timer.keep(1, world_size=1)  # for another loader
    assert len(timer.kept().seconds) == 0
    _kept_step(timer, 8)
    _kept_step(timer, 9)
    assert timer.kept().seconds.tolist() == [[9]]


def test_times_that_fit_no_step_are_not_kept() -> None:
    timer = StepTimer(every=1)
    with timer.waiting():
        pass
    with pytest.raises(ConfigError, match="the StepTimer was used before, without writers; create another one for"):
        timer.keep(3, world_size=1)
    message = "steps are balanced over 2 ranks, but the StepTimer measures 1; pass both the same group"
    with pytest.raises(ConfigError, match=message):
        StepTimer().keep(3, world_size=2)


def test_a_step_after_an_interruption_is_not_measured() -> None:
    written: list[StepMetrics] = []
    with StepTimer(written.append, every=2) as timer:
        for number in range(5):
            _step(timer, number, compute=1, wait=1)
            if number == 2:
                _Time.now += OTHERS
                timer.restart()
    assert [spans is not None for spans in _spans(written)] == [False, True, True, False, True]


def test_a_batch_that_an_iteration_leaves_untrained_is_not_written() -> None:
    written: list[StepMetrics] = []
    with StepTimer(written.append) as timer:
        for epoch in range(2):
            for number in range(3):
                _step(timer, number, compute=10 * epoch + number, wait=0)
            timer(step(3))  # handed out, but the loop ends
            timer.drop_untrained()
    assert [metrics.step for metrics in written] == [0, 1, 2, 0, 1, 2]
    assert _spans(written)[1:] == [([1], [0]), ([2], [0]), ([10], [0]), ([11], [0]), ([12], [0])]


def test_steps_are_matched_where_batches_are_handed_out_ahead() -> None:
    written: list[StepMetrics] = []
    with StepTimer(written.append, every=2) as timer:
        for number in range(3):
            timer(step(number))
        for number in range(6):
            _Time.now += number
            with timer.waiting():
                pass
            if number < 3:
                timer(step(number + 3))
    assert [metrics.step for metrics in written] == list(range(6))
    assert _spans(written)[1:] == [([number], [0]) for number in range(1, 6)]


def test_all_writers_get_the_options_and_steps_and_closing_twice_writes_once() -> None:
    class Writer(list[StepMetrics]):
        options: Any = None

        def begin(self, options: Any) -> None:
            self.options = options

        __call__ = list.append

    first, second, plain = Writer(), Writer(), []  # type: ignore[var-annotated]
    timer = StepTimer(first, plain.append, second)
    timer.begin({"strategy": "none"})
    assert first.options == second.options == {"strategy": "none"}
    _step(timer, 0, compute=1, wait=1)
    timer.close()
    timer.close()
    assert first == second == plain
    assert len(plain) == 1


def test_an_error_in_the_loop_writes_nothing_more() -> None:
    written: list[StepMetrics] = []
    timer = StepTimer(written.append)
    _step(timer, 0, compute=1, wait=1)
    with pytest.raises(ValueError, match="of the job"), timer:
        raise ValueError("of the job")
    assert written == []


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="every must be at least 1, got 0"):
        StepTimer(every=0)
    written: list[StepMetrics] = []
    timer = StepTimer(written.append)
    with pytest.raises(ConfigError, match=r"the loss requires no gradient, .* use waiting\(\) instead"):
        timer.watch(torch.ones(()))
    monkeypatch.setattr(step_timer, "_MAX_UNTRAINED", 3)
    for number in range(3):
        timer(step(number))
    with pytest.raises(ConfigError, match=r"4 steps were taken and not measured; call watch\(loss\) or waiting\(\) in"):
        timer(step(3))


def _train(rank: int, world_size: int, every: int) -> list[tuple[int, Any]]:
    """Train with DDP, where each rank computes for a second more than the one before; return the steps written."""
    written: list[StepMetrics] = []
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False))

    def wait() -> None:
        _Time.now += world_size - 1 - rank  # until the slowest rank is there

    def all_reduce(
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        step_timer._after_backward(wait)
        reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        reduced.set_result(torch.full_like(bucket.buffer(), 7))
        return reduced

    model.register_comm_hook(None, all_reduce)
    with _slow_time(), mock.patch.multiple(dist, all_gather=None, all_reduce=None, barrier=None, broadcast=None):
        timer = StepTimer(written.append, every=every)
        gradients: list[Any] = []
        release = timer._release

        def watched_release() -> None:
            gradients.append(model.module.weight.grad)
            release()

        with mock.patch.object(timer, "_release", watched_release):
            for number in range(5):
                timer(step(number))
                loss = _loss(model, forward=1, backward=2 + rank)
                timer.watch(loss)
                loss.backward()
                assert gradients[-1].tolist() == [[7, 7, 7]]  # DDP was done when the wait ended
        timer.close()
    return [(metrics.step, spans) for metrics, spans in zip(written, _spans(written), strict=True)]


@pytest.mark.parametrize(("world_size", "every"), [(2, 1), (3, 2), (3, 50)])
def test_the_slowest_rank_computes_longest_and_the_others_wait(ranks: RankPool, world_size: int, every: int) -> None:
    written, *others = ranks.run(world_size, _train, every)
    assert others == [[]] * (world_size - 1)
    compute = [3 + rank for rank in range(world_size)]
    wait = [world_size - 1 - rank for rank in range(world_size)]
    assert written == [(0, None), *((number, (compute, wait)) for number in range(1, 5))]


def _manual(rank: int, world_size: int, every: int, steps: dict[int, int]) -> list[tuple[int, Any]]:
    written: list[StepMetrics] = []
    with _slow_time(), StepTimer(written.append, every=every) as timer:
        for number in range(steps[rank]):
            _step(timer, number, compute=1 + rank, wait=1 - rank)
    return [(metrics.step, spans) for metrics, spans in zip(written, _spans(written), strict=True)]


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("steps", [{0: 4, 1: 4}, {0: 5, 1: 3}, {0: 3, 1: 8}, {0: 0, 1: 2}, {0: 2, 1: 0}])
def test_ranks_with_different_numbers_of_steps_end_with_those_in_common(
    ranks: RankPool, every: int, steps: dict[int, int]
) -> None:
    written, others = ranks.run(2, _manual, every, steps)
    assert others == []  # only rank 0 calls writers
    common = min(steps.values())
    assert written == [(number, ([1, 2], [1, 0]) if number else None) for number in range(common)]


def _with_every(rank: int, world_size: int, every: dict[int, int]) -> list[tuple[int, Any]]:
    return _manual(rank, world_size, every[rank], {0: 40, 1: 40})


@pytest.mark.parametrize("every", [{0: 3, 1: 50}, {0: 50, 1: 3}, {0: 7, 1: 5}], ids=str)
def test_ranks_may_have_been_given_other_intervals(ranks: RankPool, every: dict[int, int]) -> None:
    written, _ = ranks.run(2, _with_every, every)
    assert written == [(number, ([1, 2], [1, 0]) if number else None) for number in range(40)]


def _subgroup(rank: int, world_size: int) -> Any:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    written: list[StepMetrics] = []
    with _slow_time():
        for _ in range(2):  # timers of a group do not get each other's times
            timer = StepTimer(written.append, every=1, group=group)
            for number in range(2):
                _step(timer, number, compute=rank, wait=0)
            timer.close()
    assert rank == 2 or not timer._store.check(["0/0"])
    return _spans(written)


def test_times_are_those_of_the_group(ranks: RankPool) -> None:
    expected = [None, ([1, 2], [0, 0])]
    assert ranks.run(3, _subgroup) == [None, expected * 2, []]


def _lost(rank: int, world_size: int) -> str:
    with mock.patch.object(step_timer, "_STORE_TIMEOUT", timedelta(seconds=1)):
        timer = StepTimer()
        if rank == 0:
            with pytest.raises(RankLostError) as raised:
                timer.close()
            return str(raised.value)
    return ""


def test_a_rank_that_never_closes_is_lost_after_a_while(ranks: RankPool) -> None:
    message, _ = ranks.run(2, _lost)
    assert message.startswith("the process group does not respond (no answer within 1 s)")


def test_times_are_read_when_the_device_has_passed_them() -> None:
    written: list[StepMetrics] = []
    passed = 0.0
    timer = StepTimer(written.append, every=2)
    with mock.patch.object(timer._clock, "has_passed", lambda mark: mark <= passed):
        for number in range(7):
            _step(timer, number, compute=1, wait=1)
            assert len(written) == 0
        passed = 9.0  # which is in the fifth step, so that two blocks are complete
        _step(timer, 7, compute=1, wait=1)
        assert [metrics.step for metrics in written] == [0, 1, 2, 3]
    timer.close()
    assert len(written) == 8
    assert _spans(written)[1:] == [([1], [1])] * 7
