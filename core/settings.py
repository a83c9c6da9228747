"""Options, declared once: a type, which may carry bounds, choices and what the option needs, and a docstring, its help.

    class ExampleConfig(Settings):
        batch_size: Count
        \"""Rows of every batch.\"""
        tolerance: Annotated[float, Bounds(at_least=0, below=1)] = 0.001
        \"""Relative tolerance.\"""
        stride: Annotated[Count | None, Needs("window")] = None
        \"""Distance of two windows.\"""

From it come the check of a record (`Settings`) and of the arguments of a function (`check_types`), the objects that
files describe (`construct`), help (`help_texts`), and the options of commands (`evenrank.cli.options`).
"""

import ast
import dataclasses
import difflib
import inspect
import re
import reprlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from evenrank.core.errors import ConfigError
from evenrank.core.rules import (
    PER_RANK,
    AllBut,
    AppliesTo,
    Needs,
    OneOf,
    Only,
    Where,
    converted,
    declared_rules,
    fault_finder,
    without_rules,
)

Made = TypeVar("Made")


class Settings:
    """Base of records of options: frozen dataclasses, which check themselves when they are made.

    Each option is checked against its annotation, which may carry rules; lists become tuples where the type is one.
    What depends on several options, and no rule says, is checked by `_check`.

    Raises:
        ConfigError: an option is of another type, out of range, needs another one, or would be ignored.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        check_settings(self)
        self._check()

    def _check(self) -> None:
        """Check what no rule of a single option says."""


def check_settings(record: Any) -> None:
    """Check the options of a dataclass by their annotations, and make tuples of lists in the place of tuples."""
    fields = dataclasses.fields(record)
    for field in fields:
        if isinstance(value := getattr(record, field.name), list):
            object.__setattr__(record, field.name, converted(value, field.type))
    values = {field.name: getattr(record, field.name) for field in fields}
    check_types(type(record), values)
    given = [field.name for field in fields if not _is_default(field, values[field.name])]
    check_use(rules_of(type(record)), values, given, place=f"{type(record).__name__}: ")


def check_types(make: Callable[..., object], arguments: Mapping[str, Any], name: str | None = None) -> dict[str, Any]:
    """Check arguments of a function or a class against its annotations; messages begin with `name`, or its own.

    Arguments that it does not have are ignored, so `locals()` will do. A ConfigError names the first that is of another
    type, or breaks a rule of its annotation. Returns those that it has, by name.
    """
    checked = {}
    for key, parameter in _signature(make).parameters.items():
        if key in arguments:
            checked[key] = arguments[key]
            check_value(f"{name or make.__name__}: {key}", arguments[key], parameter.annotation)
    return checked


def check_value(name: str, value: Any, kind: Any) -> None:
    """Raise a ConfigError, which begins with `name`, unless a value is of a type and keeps the rules of it."""
    if (fault := fault_finder(kind)(value)) is None:
        return
    plain, rule, hint = without_rules(kind), fault.rule, ""
    if rule is not None:
        name, expected, value = name + fault.place, str(rule), fault.value
        hint = _hint(value, rule.names, 1) if isinstance(rule, OneOf) else ""
    elif get_origin(plain) is Literal:
        expected = str(OneOf([*map(str, get_args(plain))]))
    else:  # without the modules of types
        expected = "of type " + re.sub(r"[\w.]+\.(?=\w)", "", inspect.formatannotation(plain))
    raise ConfigError(f"{name} must be {expected}, got {show(value)}{hint}")


def show(value: object) -> str:
    """Return a value, whatever it is, as short text on one line."""
    return str(value) if isinstance(value, timedelta) else " ".join(_Short().repr(value).split("\n"))


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Also in lists: Python refuses to write integers of more than 4300 digits.
        return f"an integer of {x.bit_length()} bits" if abs(x) >> 128 else super().repr_int(x, level)


def _hint(given: object, known: Iterable[str], most: int = 3) -> str:
    """Return which of the known names may be meant, as the end of a message; empty if none is close."""
    meant = difflib.get_close_matches(str(given), known, n=most)
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


class Wording:
    """How messages show options: as arguments in Python."""

    def option(self, name: str) -> str:
        """Return an option without a value."""
        return name

    def given(self, name: str, value: Any) -> str:
        """Return an option as it was given."""
        return f"{name}={show(value)}"

    def values(self, name: str, allowed: Any) -> str:
        """Return an option with the values that a rule allows."""
        if isinstance(allowed, Where):
            return f"{name}={allowed.text}"
        listed = " or ".join(f"{name}={one!r}" for one in allowed)
        if isinstance(allowed, AllBut):
            return name if allowed == (None,) else f"options other than {listed}"
        return listed


def check_use(
    rules: Mapping[str, list[Any]],
    values: Mapping[str, Any],
    given: Iterable[str],
    wording: Wording | None = None,
    place: str = "",
) -> None:
    """Check that options that were given have an effect together with the others.

    Args:
        rules: of all options by name, of which `Needs` and `AppliesTo` count.
        values: of all options.
        given: names of those that were given, maybe with their defaults.
        wording: of messages; None: as in Python.
        place: what messages begin with.
    """
    say = wording or Wording()
    for name in given:
        for rule in rules[name]:
            shown = f"{place}{say.given(name, values[name])}"
            # Zero of a number of events is none of it, but zero seconds are a time.
            if isinstance(rule, Needs) and not (needed := values[rule.other]) and not isinstance(needed, float):
                raise ConfigError(f"{shown} has no effect without {say.option(rule.other)}; give both, or leave it out")
            if isinstance(rule, AppliesTo) and (other := _excluded_by(rules, rule, values)) is not None:
                wanted = " or ".join(say.values(*one) for one in rule.values.items())
                raise ConfigError(
                    f"{shown} applies to {wanted}, not to {say.given(other, values[other])}; leave it out"
                )


def _excluded_by(rules: Mapping[str, list[Any]], rule: AppliesTo, values: Mapping[str, Any]) -> str | None:
    """Return the option with whose value a rule does not hold; None if it holds."""
    excluding = None
    for other, allowed in rule.values.items():
        found = next(
            (
                reason
                for one in rules[other]
                if isinstance(one, AppliesTo) and (reason := _excluded_by(rules, one, values)) is not None
            ),
            None if values[other] in allowed else other,
        )
        if found is None:
            return None
        excluding = excluding or found
    return excluding


def check_user(record: Any, user: str) -> None:
    """Check that all options of a dataclass that differ from their defaults have an effect for its user."""
    rules = rules_of(type(record))
    for field in dataclasses.fields(record):
        for rule in rules[field.name]:
            value = getattr(record, field.name)
            if isinstance(rule, Only) and rule.user != user and not _is_default(field, value):
                given = f"{type(record).__name__}: {field.name}={show(value)}"
                raise ConfigError(
                    f"{given} is an option of {rule.user}, not of {user}; leave it out, or use {rule.user}"
                )


def shared_options(record: Any, user: str) -> dict[str, Any]:
    """Return the options of a record, by name, that must be the same on all ranks and have an effect for its user."""
    return {
        name: getattr(record, name)
        for name, rules in rules_of(type(record)).items()
        if PER_RANK not in rules and all(rule.user == user for rule in rules if isinstance(rule, Only))
    }


def construct(make: Callable[..., Made], settings: Mapping[str, Any], name: str) -> Made:
    """Return `make(**settings)`, with the settings checked against its signature; messages begin with `name`.

    Files have neither tuples nor times nor records, so lists, seconds and mappings are accepted for these.

    Raises:
        ConfigError: a setting is unknown, missing, or not of the annotated type.
    """
    signature = _signature(make)
    if all(parameter.kind != parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        check_keys(name, settings, signature.parameters)
    try:
        signature.bind(**settings)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}; its settings are {', '.join(signature.parameters)}") from error
    kinds = {key: parameter.annotation for key, parameter in signature.parameters.items()}
    made = {key: _made(value, kinds.get(key), f"{name}: {key}") for key, value in settings.items()}
    check_types(make, made, name)
    return make(**made)


def _made(value: Any, kind: Any, name: str) -> Any:
    """Return what a value of a file stands for, where its type, or a part of it, is a tuple, a time or a dataclass."""
    origin, parts = get_origin(kind) or kind, [part for part in get_args(kind) if part is not NoneType]
    if isinstance(value, Mapping) and dataclasses.is_dataclass(origin):
        return construct(cast("type", origin), value, name)
    if isinstance(value, Mapping) and origin is Mapping:
        return {key: _made(one, parts[1], f"{name}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list) and origin is tuple and dataclasses.is_dataclass(parts[0]):
        return tuple(_made(one, parts[0], f"{name}[{index}]") for index, one in enumerate(value))
    return _made(value, parts[0], name) if origin is UnionType and len(parts) == 1 else converted(value, kind)


def check_keys(place: object, keys: Iterable[str], known: Collection[str]) -> None:
    """Raise a ConfigError about the first key of a file that is not known, with the known ones that may be meant."""
    for key in keys:
        if key not in known:
            remedy = _hint(key, known) or f"; known keys are {', '.join(known)}"
            raise ConfigError(f"{place} has the unknown key {key!r}{remedy}")


def rules_of(record: Any) -> dict[str, list[Any]]:
    """Return the rules of each option of a dataclass, by name."""
    return {field.name: list(declared_rules(field.type)) for field in dataclasses.fields(record)}


@cache
def help_texts(record: Any) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, those of its bases included, by name, on one line."""
    texts: dict[str, str] = {}
    for base in reversed(record.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        for field, text in pairwise(_classes_in(base.__module__)[cast("type", base).__name__].body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(found))):
                    texts[name] = " ".join(found.split())
    return texts


@cache
def _classes_in(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes at the top of a module, parsed once: the source of a class alone takes 3 times as long."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


_signature = cache(inspect.signature)


def _is_default(field: "dataclasses.Field[Any]", value: object) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return default is not dataclasses.MISSING and (value is default or bool(value == default))
