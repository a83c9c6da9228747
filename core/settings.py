"""`construct`: objects from settings by name, such as those of a file."""

import inspect
from collections.abc import Callable, Mapping
from datetime import timedelta
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
    converted = dict(settings)
    for key, parameter in signature.parameters.items():
        if key in settings and not _is_a(settings[key], parameter.annotation):
            converted[key] = _converted(settings[key])
            if not _is_a(converted[key], parameter.annotation):
                wanted = inspect.formatannotation(parameter.annotation)
                raise ConfigError(f"{name}: {key} must be of type {wanted}, got {settings[key]!r}")
    return make(**converted)


def _converted(value: object) -> object:
    if isinstance(value, list):
        return tuple(value)
    try:
        return timedelta(seconds=value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return value


def _is_a(value: object, kind: Any) -> bool:
    """Return whether a value is of a type; true for types that cannot be checked, such as protocols."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_a(value, one) for one in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple and arguments and isinstance(value, tuple):
        is_long = arguments[-1] is ... or len(value) == len(arguments)
        return is_long and all(_is_a(one, arguments[0]) for one in value)
    if origin in (int, float):  # `True` is no number, but a whole number is a float
        return type(value) in (int, origin)
    is_checked = isinstance(origin, type) and origin not in (Any, inspect.Parameter.empty)
    return not is_checked or getattr(origin, "_is_protocol", False) or isinstance(value, origin)
