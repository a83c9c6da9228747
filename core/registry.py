"""`Registry`: implementations chosen by name, built in or registered by users."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from evenrank.core.errors import ConfigError

Value = TypeVar("Value")


class Registry(Generic[Value]):
    """Implementations of one kind by name; iteration yields the names in the order of registration.

    Args:
        kind: name of the kind in messages, such as `strategy`.
        expected: description of a valid implementation in messages, such as `a function`.
        accepts: whether an object is a valid implementation.
    """

    def __init__(self, kind: str, *, expected: str, accepts: Callable[[object], bool]) -> None:
        self._kind = kind
        self._expected = expected
        self._accepts = accepts
        self._values: dict[str, Value] = {}

    def register(self, name: str) -> Callable[[Value], Value]:
        """Return a decorator that registers an object under a name and returns it unchanged.

        Raises:
            ConfigError: the name is taken or no string, or the object is no valid implementation.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of a registered {self._kind} must be a string, got {name!r}; pass it a name")

        def add(value: Value) -> Value:
            if not self._accepts(value):
                raise ConfigError(f"the {self._kind} {name!r} must be {self._expected}, got {value!r}")
            if name in self._values:
                raise ConfigError(
                    f"the {self._kind} {name!r} is registered already, as {self._values[name]!r}; choose another name"
                )
            self._values[name] = value
            return value

        return add

    def check(self, name: str) -> None:
        """Raise a ConfigError that lists the registered names unless `name` is one of them."""
        if name not in self:
            known = ", ".join(self._values) or "none"
            raise ConfigError(f"no {self._kind} is called {name!r}; known are {known}")

    def __getitem__(self, name: str) -> Value:
        self.check(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
