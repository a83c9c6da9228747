"""`Workers`: threads that compute results ahead of their consumer, in order.

Collating runs in compiled loops that release the GIL, and threads, unlike processes, need not serialize batches.
"""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


class Workers:
    """A pool of threads; without any, the consumer's thread computes each result when it is requested.

    So it does in a forked child, which has none of the threads, also within an iteration of its parent. At most `ahead`
    results of `map` wait for the consumer. With `persistent`, threads are kept between iterations.
    """

    def __init__(self, num_workers: int, *, ahead: int = 0, persistent: bool = False) -> None:
        self._num_workers = num_workers
        self._ahead = ahead
        self._persistent = persistent
        self._executor: ThreadPoolExecutor | None = None
        self._process = 0  # id of the process that started the threads

    def map(self, function: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
        """Yield function(item) for each item, in order; a StopIteration of the function becomes a RuntimeError."""
        pending: deque[Callable[[], Out]] = deque()
        with self.open() as submit:
            for item in items:
                pending.append(submit(partial(function, item)))
                if len(pending) > self._ahead:
                    yield pending.popleft()()
            while pending:
                yield pending.popleft()()

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable[[Callable[[], Out]], Callable[[], Out]]]:
        """Provide a function that has threads compute a result, and returns one that waits for it."""
        process = os.getpid()
        executor = None if self._persistent or not self._num_workers else self._start()

        def submit(compute: Callable[[], Out]) -> Callable[[], Out]:
            if not self._num_workers or process != os.getpid():
                return compute
            future = (executor or self._kept()).submit(compute)
            return lambda: future.result() if process == os.getpid() else compute()

        is_over = False
        try:
            yield submit
            is_over = True
        finally:
            if executor is not None and process == os.getpid():
                # After an error, threads may wait for other ranks. And the garbage collector may finalize an iterator
                # that was left, while its thread holds a lock of `threading` that joining another thread needs as well.
                executor.shutdown(wait=is_over, cancel_futures=True)

    def _start(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_workers, thread_name_prefix="evenrank-loader")

    def _kept(self) -> ThreadPoolExecutor:
        if self._executor is None or self._process != os.getpid():
            self._executor, self._process = self._start(), os.getpid()
        return self._executor

    def close(self) -> None:
        """Stop the threads that are kept; whoever computes after that starts new ones."""
        executor, self._executor = self._executor, None
        if executor is not None and self._process == os.getpid():
            executor.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_executor": None}
