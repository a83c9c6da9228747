"""Questions about annotations: whether a value is of a type, and keeps the rules that `Annotated` adds to it."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache, reduce
from itertools import cycle
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

_UNIONS, _SEQUENCES = (Union, UnionType), (tuple, Sequence)


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
