"""`Replay`: batches of recorded requests, at the pace at which the requests came."""

import time
from collections.abc import Iterable, Iterator
from typing import Generic

from torch import Tensor

from evenrank.core.errors import ConfigError
from evenrank.core.rules import Positive
from evenrank.core.settings import check_types
from evenrank.dataloader.batches.batch import Batch


def due_seconds(request_ms: Tensor, first_ms: int, speed: float) -> float:
    """Return when the last of some requests [n] is due, in seconds after `first_ms`."""
    return (int(request_ms.max()) - first_ms) / 1000 / speed


class Replay(Generic[Batch]):
    """Yields each batch when its last request is due, and the first batch at once; no batch is left out.

    Each iteration starts a clock at its first batch; ranks have clocks of their own.

    Args:
        batches: of a loader with `order=Requests()`, or of a Balancer over it.
        speed: how many seconds of the recording pass in one second.

    Raises:
        ConfigError: the speed is not a positive number; while iterating, batches have no times of requests.
    """

    lag_seconds: float = 0.0
    """Delay of the batch yielded last, if batches are consumed or made more slowly than they are due."""

    def __init__(self, batches: Iterable[Batch], *, speed: Positive = 1.0) -> None:
        check_types(Replay, {"speed": speed})
        self._batches = batches
        self._speed = speed

    def __iter__(self) -> Iterator[Batch]:
        first_ms, begin = None, 0.0
        for batch in self._batches:
            times = getattr(batch, "request_ts_ms", None)
            if times is None:
                raise ConfigError(
                    "batches have no request_ts_ms; make their loader with LoaderConfig(order=Requests())"
                )
            if batch.num_real:
                times = times[: batch.num_real]
                if first_ms is None:
                    first_ms, begin = int(times.max()), time.monotonic()
                due = begin + due_seconds(times, first_ms, self._speed)
                time.sleep(max(0.0, due - time.monotonic()))
                self.lag_seconds = max(0.0, time.monotonic() - due)
            yield batch
