from concurrent.futures import Future

import pytest

from evenrank.dataloader.balance.own_steps import LoadedStep
from evenrank.dataloader.balance.step_planner import PlannedStep
from evenrank.dataloader.balance.steps_ahead import StepsAhead


class _Recorder:
    """Counts the batches that are loaded, and the steps that are started together."""

    def __init__(self) -> None:
        self.num_loaded = 0
        self.groups: list[int] = []

    def load(self) -> LoadedStep:
        self.num_loaded += 1
        return LoadedStep(None)

    def start(self, loaded: object) -> "Future[list[PlannedStep | Exception]]":
        assert isinstance(loaded, list)
        self.groups.append(len(loaded))
        planned: Future[list[PlannedStep | Exception]] = Future()
        planned.set_result([PlannedStep() for _ in loaded])
        return planned


@pytest.mark.parametrize("lookahead", [1, 2, 5, 20])
def test_steps_are_started_together_and_ahead_but_not_more_than_needed(lookahead: int) -> None:
    recorder = _Recorder()
    ahead = StepsAhead(recorder.load, recorder.start, lookahead)
    loads = []
    for step in range(100):
        before = recorder.num_loaded
        handle = ahead.take()
        loads.append(recorder.num_loaded - before)
        assert handle.plan() == PlannedStep()
        started = sum(recorder.groups)
        assert started - step >= lookahead  # this step and those after it
        assert started <= recorder.num_loaded <= step + lookahead + 7
    assert recorder.groups[:5] == [1, 1, 2, 4, 8]
    assert set(recorder.groups[4:]) == {8}
    assert set(loads[40:]) == {1}  # a loader is asked for one batch per step


def test_steps_come_in_order_with_the_plan_of_their_group() -> None:
    recorder = _Recorder()
    ahead = StepsAhead(recorder.load, recorder.start, 2)
    handles = [ahead.take() for _ in range(12)]
    assert [handle.index for handle in handles] == [0, 0, 0, 1, 0, 1, 2, 3, 0, 1, 2, 3]
    assert len({id(handle.group) for handle in handles}) == 5


def test_the_error_of_a_step_is_raised_for_it_and_all_after_it() -> None:
    error = ValueError("no such sample")

    def start(loaded: object) -> "Future[list[PlannedStep | Exception]]":
        planned: Future[list[PlannedStep | Exception]] = Future()
        planned.set_result([PlannedStep(), error])
        return planned

    ahead = StepsAhead(lambda: LoadedStep(None), start, 8)
    handles = [ahead.take() for _ in range(8)]
    of_group = [handle for handle in handles if handle.group is handles[-1].group]
    assert of_group[0].plan() == PlannedStep()
    for handle in of_group[1:]:
        with pytest.raises(ValueError, match="no such sample"):
            handle.plan()
