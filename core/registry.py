"""`Registry`: implementations chosen by name, built in or registered by users."""

import sys
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from evenrank.core.errors import ConfigError

Value = TypeVar("Value")


class Registry(Generic[Value]):
    """Implementations of one kind by name, in the order of registration.

    Messages name the kind, such as `strategy`, and describe the values it `accepts`, such as `a function`.
    """

    def __init__(self, kind: str, *, expected: str, accepts: Callable[[object], bool]) -> None:
        self._kind, self._expected, self._accepts = kind, expected, accepts
        self._values: dict[str, Value] = {}
        self._modules: dict[str, str] = {}  # that registered each name

    def register(self, name: str) -> Callable[[Value], Value]:
        """Return a decorator that registers an object under a name and returns it unchanged.

        The module that registered a name, such as a notebook whose cell runs again, may replace its object.

        Raises:
            ConfigError: another module registered the name, or the decorated object is not accepted.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of a registered {self._kind} must be a string, got {name!r}; pass it a name")

        def add(value: Value) -> Value:
            if not self._accepts(value):
                raise ConfigError(f"the {self._kind} {name!r} must be {self._expected}, got {value!r}")
            module = sys._getframe(1).f_globals.get("__name__", "?")  # not the object's, which a partial object lacks
            if (owner := self._modules.get(name, module)) != module:
                raise ConfigError(
                    f"{module} cannot register the {self._kind} {name!r}, which {owner} has registered, as "
                    f"{self._values[name]!r}; choose another name, or unregister it first"
                )
            self._values[name], self._modules[name] = value, module
            return value

        return add

    def unregister(self, name: str) -> None:
        """Remove a name; a ConfigError that lists the registered names if it is not one of them."""
        self.check(name)
        del self._values[name], self._modules[name]

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
