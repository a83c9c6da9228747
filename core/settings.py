"""Options, declared once: their types are the annotations of a record or a function.

`check_record` and `check_types` check what a program passes, `construct` makes objects from settings by name, such as
those of a file.
"""

import dataclasses
import difflib
import inspect
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from evenrank.core.errors import ConfigError

Made = TypeVar("Made")


def construct(make: Callable[..., Made], settings: Mapping[str, Any], name: str) -> Made:
    """Return `make(**settings)`, with the settings checked against its signature; messages begin with `name`.

    Files have neither tuples nor times, so lists and seconds are accepted for these.

    Raises:
        ConfigError: a setting is unknown, missing, or not of the annotated type.
    """
    signature = inspect.signature(make)
    try:
        signature.bind(**settings)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}; its settings are {', '.join(signature.parameters)}") from error
    kinds = {key: parameter.annotation for key, parameter in signature.parameters.items()}
    converted = {key: _converted(value, kinds.get(key)) for key, value in settings.items()}
    check_types(make, converted, name)
    return make(**converted)


def check_types(make: Callable[..., object], arguments: Mapping[str, Any], name: str | None = None) -> None:
    """Check arguments of a function or a class against its annotations; messages begin with `name`, or its own.

    Arguments that it does not have are ignored, so `locals()` will do. A ConfigError names the first of another type.
    """
    for key, parameter in inspect.signature(make).parameters.items():
        if key in arguments and not _is_a(arguments[key], kind := parameter.annotation):
            # Without the modules of types.
            wanted = "of type " + re.sub(r"[\w.]+\.(?=\w)", "", inspect.formatannotation(kind))
            if get_origin(kind) is Literal:
                wanted = f"one of {', '.join(map(str, get_args(kind)))}"
            raise ConfigError(f"{name or make.__name__}: {key} must be {wanted}, got {reprlib.repr(arguments[key])}")


def check_record(record: Any) -> None:
    """Check the fields of a dataclass as `check_types` does, and make tuples of lists in the place of tuples."""
    for field in dataclasses.fields(record):
        if isinstance(value := getattr(record, field.name), list):
            object.__setattr__(record, field.name, _converted(value, field.type))
    check_types(type(record), {field.name: getattr(record, field.name) for field in dataclasses.fields(record)})


def check_keys(place: object, keys: Iterable[str], known: Collection[str]) -> None:
    """Raise a ConfigError about the first key of a file that is not known, with the known ones that may be meant."""
    for key in keys:
        if key not in known:
            meant = " or ".join(difflib.get_close_matches(key, known))
            remedy = f"did you mean {meant}?" if meant else f"known keys are {', '.join(known)}"
            raise ConfigError(f"{place} has the unknown key {key!r}; {remedy}")


def check_at_least(minimum: int, **values: object) -> dict[str, object]:
    """Return values, by the names of their options; a ConfigError unless all are integers of at least `minimum`."""
    for name, value in values.items():
        if type(value) is not int or value < minimum:
            kind = "" if type(value) is int else "an integer of "
            raise ConfigError(f"{name} must be {kind}at least {minimum}, got {reprlib.repr(value)}")
    return values


def _converted(value: object, kind: Any) -> object:
    """Return a list as a tuple, and a number as a time, where that is of the type, and the value itself is not."""
    if _is_a(value, kind):
        return value
    try:
        made: Any = tuple(value) if isinstance(value, list) else timedelta(seconds=value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return value
    return made if _is_a(made, kind) else value


def _is_a(value: object, kind: Any) -> bool:
    """Return whether a value is of a type; true for types that cannot be checked, such as protocols without a call."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_a(value, one) for one in arguments)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in arguments)
    if origin is tuple and arguments and isinstance(value, tuple):
        is_long = arguments[-1] is ... or len(value) == len(arguments)
        return is_long and all(_is_a(one, arguments[0]) for one in value)
    if origin is Mapping and arguments and isinstance(value, Mapping):
        return all(_is_a(one, of) for entry in value.items() for one, of in zip(entry, arguments, strict=True))
    if origin in (int, float):  # `True` is no number, but a whole number is a float
        return isinstance(value, int | origin) and not isinstance(value, bool)
    if origin is Path:
        return isinstance(value, str | Path)
    if getattr(origin, "_is_protocol", False):
        return callable(value) or "__call__" not in vars(origin)
    return not isinstance(origin, type) or origin in (Any, inspect.Parameter.empty) or isinstance(value, origin)
