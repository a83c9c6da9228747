"""Rules that the annotation of an option may carry: its range, its choices, what it needs, and what it applies to.

`Annotated[int, Bounds(at_least=1)]`, or `Count` for short. Rules with `allows` are about the value alone, and their
text says what it must be; `evenrank.core.settings` checks all of them.
"""

import math
import pkgutil
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a number or a time; NaN is in none. `below=math.inf`: it is finite."""

    at_least: Any = None
    above: Any = None
    at_most: Any = None
    below: Any = None

    def __str__(self) -> str:
        given = ((name.replace("_", " "), getattr(self, name)) for name in self.__slots__)
        return " and ".join(
            "finite" if limit == math.inf else f"{text} {_power(limit)}"
            for text, limit in given
            if limit not in (None, -math.inf)
        )

    def allows(self, value: Any) -> bool:
        """Return whether a value is in the range."""
        return bool(
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )


def _power(limit: Any) -> Any:
    """Return a limit, as a power if it is a large one of 2."""
    is_power = isinstance(limit, int) and abs(limit) >> 31 and abs(limit).bit_count() == 1
    return f"{'-' * (limit < 0)}2^{abs(limit).bit_length() - 1}" if is_power else limit


@dataclass(frozen=True, slots=True, eq=False)
class OneOf:
    """The names that a text may be, such as those of a registry, which may grow."""

    names: Collection[str]

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"

    def allows(self, value: str) -> bool:
        """Return whether a value is one of the names."""
        return value in self.names


@dataclass(frozen=True, slots=True)
class Valid:
    """What a function is true for, as described for messages: `Valid(str.isprintable, "text of one line")`."""

    is_valid: Callable[[Any], object]
    expected: str

    def __str__(self) -> str:
        return self.expected

    def allows(self, value: Any) -> bool:
        """Return whether the function is true for a value."""
        return bool(self.is_valid(value))


@dataclass(frozen=True, slots=True)
class Parsed:
    """A text whose form a function checks, which raises a ConfigError with the text and the forms that it knows."""

    parse: Callable[[Any], object] | str
    """The function or, if its module is slow to import, its name: `package.module:function`."""

    def allows(self, value: Any) -> bool:
        """Return True, or raise the ConfigError of the function."""
        (pkgutil.resolve_name(self.parse) if isinstance(self.parse, str) else self.parse)(value)
        return True


@dataclass(frozen=True, slots=True)
class Needs:
    """Another option, without which this one would be ignored."""

    other: str


@dataclass(frozen=True, slots=True)
class Only:
    """The function or class for which alone this option of a shared record has an effect."""

    user: str


class AppliesTo:
    """Values of other options, with which alone this one has an effect: `AppliesTo(engine=("ray",))`.

    Of several options, one is enough; several of these rules must all hold.
    """

    def __init__(self, **values: Container[Any]) -> None:
        self.values = values


class AllBut(tuple[Any, ...]):
    """All values of an option but these, for `AppliesTo`."""

    def __contains__(self, value: object) -> bool:
        return not super().__contains__(value)


@dataclass(frozen=True, slots=True)
class Where:
    """The values of an option that a function accepts, and a text that says which these are, for `AppliesTo`."""

    text: str
    accepts: Callable[[Any], bool]

    def __contains__(self, value: object) -> bool:
        return self.accepts(value)


@dataclass(frozen=True, slots=True)
class Option:
    """How commands show an option, where that does not follow from its declaration."""

    metavar: str = ""
    name: str = ""
    panel: str = ""
    """Heading above it, which is also that of the options below."""
    completions: Callable[[], Iterable[str]] = tuple
    """Returns beginnings of values, for shells."""
    is_argument: bool = False
    """Whether it is given by its position."""
    paths: str = "(?!)"
    """Pattern of the paths in its text, which are relative to the folder of the file that has it."""
    parse: Callable[[Any], Any] | None = None
    """Makes the value of its text, or of its texts if there may be several."""


PER_RANK = "per rank"
"""Marks an option in which ranks may differ; all others are compared between them."""
Count = Annotated[int, Bounds(at_least=1)]
NonNegative = Annotated[int, Bounds(at_least=0)]
Positive = Annotated[float, Bounds(above=0, below=math.inf)]
Seed = Annotated[int, Bounds(at_least=-(1 << 63), below=1 << 63)]
