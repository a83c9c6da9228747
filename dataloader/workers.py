"""Threads that compute ahead, in order.

Threads are enough because collating runs in compiled loops that release the interpreter's lock; and batches need no
handing over, which is what limits worker processes.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


class Workers:
    """Applies functions ahead of the consumer.

    Args:
        num_workers: threads; 0: the consumer's thread computes, when it asks.
        ahead: results that may wait for the consumer, at most.
        persistent: keep the threads from one use to the next.

    """

    def __init__(self, num_workers: int, *, ahead: int, persistent: bool) -> None:
        self._num_workers = num_workers
        self._ahead = ahead
        self._persistent = persistent
        self._executor: ThreadPoolExecutor | None = None
        self._process = 0  # that the threads belong to

    def map(self, function: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
        """Yield function(item) for each item, in order; an exception comes where its result would have come."""
        if not self._num_workers:
            yield from map(function, items)
            return
        executor = self._threads()
        pending: deque[Future[Out]] = deque()
        try:
            for item in items:
                pending.append(executor.submit(function, item))
                if len(pending) > self._ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
            if not self._persistent:
                executor.shutdown()

    def _threads(self) -> ThreadPoolExecutor:
        # Threads do not follow their process into a fork: a child that inherited them would wait for ever.
        if self._executor is None or self._process != os.getpid() or not self._persistent:
            self._executor = ThreadPoolExecutor(self._num_workers, thread_name_prefix="evenrank-loader")
            self._process = os.getpid()
        return self._executor

    def close(self) -> None:
        """End the threads; they start anew when they are needed."""
        executor, self._executor = self._executor, None
        if executor is not None and self._process == os.getpid():
            executor.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_executor": None}
