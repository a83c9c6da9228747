from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from evenrank.dataloader.balance import BalanceConfig
from evenrank.dataloader.balance.exchange.exchange import Handle
from evenrank.dataloader.balance.steps_ahead import StepsAhead
from tests.dataloader.balance.costs import one_per_sample


def _same(loaded: Handle) -> Sequence[Handle]:
    assert loaded.group is not None
    return loaded.group.result()


class _Recorder:
    """Counts the batches that are loaded, and the steps that are started together."""

    def __init__(self) -> None:
        self.num_loaded = 0
        self.groups: list[int] = []

    def load(self) -> Handle:
        self.num_loaded += 1
        return Handle(None)

    def start(self, steps: Sequence[Handle]) -> None:
        self.groups.append(len(steps))
        planned: Future[Sequence[Handle]] = Future()
        planned.set_result(steps)
        for step in steps:
            step.group = planned


@pytest.mark.parametrize("lookahead", [1, 2, 5, 20])
def test_steps_are_started_together_and_ahead_but_not_more_than_needed(lookahead: int) -> None:
    recorder = _Recorder()
    ahead = StepsAhead(recorder.load, recorder.start, BalanceConfig(cost=one_per_sample, lookahead=lookahead), _same)
    loads = []
    for step in range(100):
        before = recorder.num_loaded
        handle = ahead.take()
        loads.append(recorder.num_loaded - before)
        handle.await_plan()
        started = sum(recorder.groups)
        assert started - step >= lookahead  # this step and those after it
        assert started <= recorder.num_loaded <= step + lookahead + 7
    assert recorder.groups[:5] == [1, 1, 2, 4, 8]
    assert set(recorder.groups[4:]) == {8}
    assert set(loads[40:]) == {1}  # a loader is asked for one batch per step


def test_steps_come_in_order_with_the_plan_of_their_group() -> None:
    recorder, loaded = _Recorder(), []

    def load() -> Handle:
        loaded.append(recorder.load())
        return loaded[-1]

    ahead = StepsAhead(load, recorder.start, BalanceConfig(cost=one_per_sample), _same)
    handles = [ahead.take() for _ in range(12)]
    assert handles == loaded[:12]
    groups = {id(handle.group): handle.group for handle in handles}
    of_groups = [[handle for handle in handles if handle.group is group] for group in groups.values()]
    assert [len(of_group) for of_group in of_groups] == [1, 1, 2, 4, 4]


def test_the_error_of_a_step_is_raised_for_it_and_all_after_it() -> None:
    error = ValueError("no such sample")

    def start(steps: Sequence[Handle]) -> None:
        _Recorder().start(steps)
        for step in steps[1:]:
            step.error = error

    ahead = StepsAhead(lambda: Handle(None), start, BalanceConfig(cost=one_per_sample, lookahead=8), _same)
    handles = [ahead.take() for _ in range(8)]
    of_group = [handle for handle in handles if handle.group is handles[-1].group]
    of_group[0].await_plan()
    for handle in of_group[1:]:
        with pytest.raises(ValueError, match="no such sample"):
            handle.await_plan()
