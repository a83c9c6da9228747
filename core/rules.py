"""Rules that the annotation of an option may carry: its range, its choices, what it needs, and what it applies to.

`Annotated[int, Bounds(at_least=1)]`, or `Count` for short. Rules with `allows` are about the value alone, and their
text says what it must be; `evenrank.core.settings` checks all of them. `fault_finder` says whether a value is of the
type of an annotation, and keeps these rules.
"""

import inspect
import math
import pkgutil
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, reduce
from itertools import cycle
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

_UNIONS, _SEQUENCES = (Union, UnionType), (tuple, Sequence)


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


class Fault(NamedTuple):
    """What is wrong with a value."""

    rule: Any
    """The one that is broken; None: it is of another type."""
    value: Any
    """Or the part of it that breaks the rule."""
    place: str = ""
    """Of the part in a mapping, such as `['item_id']`."""


@lru_cache(maxsize=1024)
def fault_finder(kind: Any) -> Callable[[Any], Fault | None]:
    """Return a function that returns the fault of a value that should be of a type; None: it is, and keeps its rules.

    Types that cannot be checked, such as protocols without a call, have no faults. No rule is about None.
    """
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        of_type, rules = fault_finder(arguments[0]), [rule for rule in arguments[1:] if hasattr(rule, "allows")]

        def of_rules(value: Any) -> Fault | None:
            broken = (rule for rule in rules if value is not None and not rule.allows(value))
            return of_type(value) or next((Fault(rule, value) for rule in broken), None)

        return of_rules
    if origin in _UNIONS:
        options = [fault_finder(one) for one in arguments]

        def of_option(value: Any) -> Fault | None:
            faults = []
            for find in options:
                if (fault := find(value)) is None:
                    return None
                faults.append(fault)
            return next((fault for fault in faults if fault.rule), faults[0])

        return of_option
    is_a = _type_test(origin, arguments)
    if not arguments or origin not in (*_SEQUENCES, Mapping):
        return lambda value: None if is_a(value) else Fault(None, value)
    finders = [fault_finder(one) for one in arguments if one is not ...]

    def of_parts(value: Any) -> Fault | None:
        if not is_a(value):
            return Fault(None, value)
        if origin is not Mapping:
            return next(filter(None, (find(part) for find, part in zip(cycle(finders), value, strict=False))), None)
        find_in_key, find = finders
        faults = ((key, find_in_key(key) or find(one)) for key, one in value.items())
        return next((fault._replace(place=f"[{key!r}]{fault.place}") for key, fault in faults if fault), None)

    return of_parts


def _type_test(origin: Any, arguments: tuple[Any, ...]) -> Callable[[Any], bool]:
    """Return a function that tells whether a value is of a type, whatever its parts are."""
    if origin is Literal:
        return lambda value: any(type(value) is type(one) and value == one for one in arguments)
    if origin is tuple and arguments and arguments[-1] is not ...:
        return lambda value: isinstance(value, tuple) and len(value) == len(arguments)
    if origin in (int, float):  # `True` is no number, but a whole number is a float
        return lambda value: isinstance(value, int | origin) and not isinstance(value, bool)
    if origin is Path:
        return lambda value: isinstance(value, str | Path)
    if getattr(origin, "_is_protocol", False):
        return callable if "__call__" in vars(origin) else lambda value: True
    if not isinstance(origin, type) or origin in (Any, inspect.Parameter.empty):
        return lambda value: True
    return lambda value: isinstance(value, origin)


def without_rules(kind: Any) -> Any:
    """Return a type without `Annotated`, also in its parts."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return without_rules(parts[0])
    if origin in _UNIONS:
        return reduce(or_, map(without_rules, parts))
    if origin in (*_SEQUENCES, Mapping):
        return origin[tuple(map(without_rules, parts))]
    return kind


def declared_rules(kind: Any) -> Iterator[Any]:
    """Yield the rules of a type and of its parts."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        parts, rules = parts[:1], parts[1:]
        yield from rules
    if origin in (Annotated, *_UNIONS, *_SEQUENCES, Mapping):
        for part in parts:
            yield from declared_rules(part)


def converted(value: object, kind: Any) -> object:
    """Return a list as a tuple, and a number as a time, where that is of the type, and the value itself is not."""
    find_fault = fault_finder(without_rules(kind))
    if find_fault(value) is None:
        return value
    try:
        made: Any = tuple(value) if isinstance(value, list) else timedelta(seconds=value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return value
    return value if find_fault(made) else made
