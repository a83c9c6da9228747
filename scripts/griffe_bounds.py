"""An extension of griffe, named in mkdocs.yml: the reference shows plain types, and the rules of options in words."""

import ast
import dataclasses
import math
from typing import Any

import griffe

from evenrank.core.rules import Bounds, OneOf

_RULES = {"Bounds": Bounds, "OneOf": OneOf}


class PlainTypes(griffe.Extension):
    """Replaces `Annotated[int, Bounds(at_least=1)]`, and names of it, by `int`, and adds "At least 1." to the help."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Rewrite the annotations of attributes and parameters, once all modules are known."""
        del loader, kwargs
        _rewrite(pkg)


def _rewrite(module: griffe.Module | griffe.Class) -> None:
    for member in module.members.values():
        if isinstance(member, griffe.Module | griffe.Class):
            _rewrite(member)
        elif isinstance(member, griffe.Function):
            for parameter in member.parameters:
                parameter.annotation = _plain(parameter.annotation, [])
        elif isinstance(member, griffe.Attribute) and isinstance(module, griffe.Class):
            rules: list[str] = []
            member.annotation = _plain(member.annotation, rules)
            if member.docstring and rules:
                member.docstring.value += f" {rules[0][:1].upper()}{rules[0][1:]}."


def _plain(kind: Any, rules: list[str]) -> Any:
    """Return a type without `Annotated`, and add its bounds to `rules`, in words."""
    if isinstance(kind, griffe.ExprName) and (declared := _declared(kind)) is not None:
        kind = declared
    if isinstance(kind, griffe.ExprSubscript) and str(kind.left).rpartition(".")[2] == "Annotated":
        assert isinstance(kind.slice, griffe.ExprTuple)
        plain, *marks = kind.slice.elements
        plain = _plain(plain, rules)
        rules += [text for mark in marks if (text := _in_words(mark))]
        return plain
    if isinstance(kind, griffe.Expr) and not isinstance(kind, griffe.ExprName):
        for field in dataclasses.fields(kind):
            part = getattr(kind, field.name)
            setattr(
                kind,
                field.name,
                [_plain(each, rules) for each in part] if isinstance(part, list) else _plain(part, rules),
            )
    return kind


def _declared(name: griffe.ExprName) -> Any:
    """Return the `Annotated` that a name stands for, if it does."""
    if not isinstance(name.parent, griffe.Module | griffe.Class):
        return None
    try:
        declared = name.parent.modules_collection[name.parent.resolve(name.name)].value
    except (KeyError, AttributeError, griffe.GriffeError):
        return None
    return declared if str(declared).startswith("Annotated[") else None


def _in_words(mark: Any) -> str:
    """Return a rule such as `Bounds(at_least=1)` as text; empty if it needs names that only the module knows."""
    call = ast.parse(str(mark), mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in _RULES:
        return ""
    try:
        known = {"math": math, **_RULES}
        return str(eval(compile(ast.Expression(call), "rule", "eval"), {"__builtins__": {}}, known))
    except (NameError, AttributeError):
        return ""
