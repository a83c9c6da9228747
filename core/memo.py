"""Results shared by threads, each computed once."""

import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Memo(Generic[Value]):
    """Keeps the `size` values used last, except in pickles and forks; threads wait for a value being computed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._clear()

    def _clear(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._values: dict[Hashable, Future[Value]] = {}  # the one used last comes last

    def get(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return the value of a key, computed if it is not kept; exceptions of `compute` are not kept."""
        if self._process != os.getpid():
            self._clear()  # a forked child would wait forever for threads of its parent
        own: Future[Value] = Future()
        try:
            with self._lock:
                value = self._values[key] = self._values.pop(key, own)
                if len(self._values) > self._size:
                    del self._values[next(iter(self._values))]
            if value is own:
                own.set_result(compute())
        except BaseException as error:  # also interrupts, or other threads would wait forever
            with self._lock:
                if self._values.get(key) is own:
                    del self._values[key]
            own.set_exception(error)
            raise
        return value.result()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._size,)
