"""`StopSignals`: SIGINT and SIGTERM end the job after the same step on all ranks."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Notes signals, which ranks receive at different times or not at all, and lets all ranks agree on a step to stop.

    The ranks' answers are gathered on the CPU while the next step is computed, so that no rank waits for them: a signal
    ends the job one step later. Signals are noted while the context is open. Collective: every rank must create one,
    and enter it on its main thread.
    """

    def __init__(self) -> None:
        self._received = 0
        self._group = dist.new_group(backend="gloo")
        self._in_flight: tuple[dist.Work, Tensor] | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def poll(self) -> signal.Signals | None:
        """Return the signal that some rank had received at the last call, or None. Collective: call it once a step."""
        agreed = self._await_answers()
        answer = torch.tensor(self._received)
        work = dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._in_flight = (work, answer)
        return signal.Signals(agreed) if agreed else None

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if error is None:
            self._await_answers()  # so that nothing is in flight when the process group ends

    def _await_answers(self) -> int:
        if self._in_flight is None:
            return 0
        (work, answer), self._in_flight = self._in_flight, None
        work.wait()
        return int(answer)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number  # the first one decides
