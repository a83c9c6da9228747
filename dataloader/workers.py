"""`Workers`: threads that compute results ahead of their consumer, in order.

Collating runs in compiled loops that release the GIL, and threads, unlike processes, need not serialize batches.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


class Workers:
    """A pool of threads; without any, the consumer's thread computes each result when it is requested.

    At most `ahead` results wait for the consumer. With `persistent`, threads are kept between calls of `map`.
    """

    def __init__(self, num_workers: int, *, ahead: int, persistent: bool) -> None:
        self._num_workers = num_workers
        self._ahead = ahead
        self._persistent = persistent
        self._executor: ThreadPoolExecutor | None = None
        self._process = 0  # id of the process that started the threads

    def map(self, function: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
        """Yield function(item) for each item, in order; a StopIteration of the function becomes a RuntimeError."""
        if not self._num_workers:
            for item in items:  # not map(): a StopIteration of the function would end it as if there were no more items
                yield function(item)
            return
        executor = self._threads()
        pending: deque[Future[Out]] = deque()
        waits = True
        try:
            for item in items:
                pending.append(executor.submit(function, item))
                if len(pending) > self._ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except GeneratorExit:
            # The garbage collector may finalize an iterator that was left, while its thread holds a lock of `threading`
            # that joining another thread needs as well.
            waits = False
            raise
        finally:
            for future in pending:
                future.cancel()
            if not self._persistent:
                executor.shutdown(wait=waits)

    def _threads(self) -> ThreadPoolExecutor:
        # A forked child inherits the executor but not its threads, and would wait for them forever.
        if self._executor is None or self._process != os.getpid() or not self._persistent:
            self._executor = ThreadPoolExecutor(self._num_workers, thread_name_prefix="evenrank-loader")
            self._process = os.getpid()
        return self._executor

    def close(self) -> None:
        """Stop the threads; the next call of `map` starts new ones."""
        executor, self._executor = self._executor, None
        if executor is not None and self._process == os.getpid():
            executor.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_executor": None}
