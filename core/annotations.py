"""Questions about annotations: whether a value is of a type, and keeps the rules that `Annotated` adds to it."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache, reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

Test = Callable[[Any], bool]
_UNIONS = (Union, UnionType)
_SEQUENCES = (tuple, Sequence)


@lru_cache(maxsize=1024)
def test_of(kind: Any) -> Test:
    """Return a function that tells whether a value is of a type, and is allowed by the rules of it.

    It is true for types that cannot be checked, such as protocols without a call. No rule is about None.
    """
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        tests = [test_of(arguments[0]), *(rule.allows for rule in arguments[1:] if hasattr(rule, "allows"))]
        return lambda value: all(test(value) for test in (tests if value is not None else tests[:1]))
    if origin in _UNIONS:
        options = [test_of(one) for one in arguments]
        return lambda value: any(is_option(value) for is_option in options)
    if origin is Literal:
        return lambda value: any(type(value) is type(one) and value == one for one in arguments)
    if origin in _SEQUENCES and arguments:
        is_part, length = (
            test_of(arguments[0]),
            len(arguments) if origin is tuple and arguments[-1] is not ... else None,
        )
        return lambda value: (
            isinstance(value, origin) and length in (None, len(value)) and all(is_part(part) for part in value)
        )
    if origin is Mapping and arguments:
        is_key, is_value = map(test_of, arguments)
        return lambda value: (
            isinstance(value, Mapping) and all(is_key(key) and is_value(one) for key, one in value.items())
        )
    if origin in (int, float):  # `True` is no number, but a whole number is a float
        numbers = (int, origin)
        return lambda value: isinstance(value, numbers) and not isinstance(value, bool)
    if origin is Path:
        return lambda value: isinstance(value, str | Path)
    if getattr(origin, "_is_protocol", False):
        return callable if "__call__" in vars(origin) else _is_anything
    if not isinstance(origin, type) or origin in (Any, inspect.Parameter.empty):
        return _is_anything
    return lambda value: isinstance(value, origin)


def _is_anything(value: object) -> bool:
    return True


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


def rules_of_value(value: Any, kind: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the rules that a value of a type must keep, each with the value, or the part of it, that it is about."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from rules_of_value(value, arguments[0])
        if value is not None:
            yield from ((rule, value) for rule in arguments[1:])
    elif origin in _UNIONS:
        yield from rules_of_value(value, next(one for one in arguments if test_of(without_rules(one))(value)))
    elif origin in _SEQUENCES and arguments:
        for part in value:
            yield from rules_of_value(part, arguments[0])
    elif origin is Mapping and arguments:
        for entry in value.items():
            for part, of in zip(entry, arguments, strict=True):
                yield from rules_of_value(part, of)


def converted(value: object, kind: Any) -> object:
    """Return a list as a tuple, and a number as a time, where that is of the type, and the value itself is not."""
    is_a = test_of(without_rules(kind))
    if is_a(value):
        return value
    try:
        made: Any = tuple(value) if isinstance(value, list) else timedelta(seconds=value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return value
    return made if is_a(made) else value
