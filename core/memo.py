"""`Memo`: results that threads share, each computed once."""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Memo(Generic[Value]):
    """Keeps the values that were computed last. A thread that asks for one that another computes waits for it.

    Pickling keeps no values.

    Args:
        size: limit to the number of values.

    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._values: dict[Hashable, Future[Value]] = {}

    def get(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return the value of a key, computing it if it is not kept. What `compute` raises is raised, and not kept."""
        with self._lock:
            value = self._values.get(key)
            is_new = value is None
            if value is None:
                value = self._values[key] = Future()
                if len(self._values) > self._size:
                    del self._values[next(iter(self._values))]
        if is_new:
            try:
                value.set_result(compute())
            except BaseException as error:
                value.set_exception(error)
                with self._lock:
                    self._values.pop(key, None)
        return value.result()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._size,)
