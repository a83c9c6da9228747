"""`Expression`: a small expression over columns, such as `action in (1, 4) and dwell >= 30`, parsed and checked once.

    names               columns
    12, 0.5, 'listen'   numbers and texts
    + - * // % & |      arithmetic and bits; what divides is a number
    == != < <= > >=     comparisons, also in chains; `in` and `not in` a tuple of numbers or texts
    and or not          of conditions
    a if c else b       a choice
    fraction(user_id, 7)  a hash of integers and a salt, uniform in [0, 1)

Comparisons with a missing value are false, except `!=` and `not in`.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.core.hashing import mix64

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FRACTION = "fraction"
_GOLDEN, _WORD_MASK = 0x9E3779B97F4A7C15, 0xFFFFFFFFFFFFFFFF
_DIVISORS = (ast.FloorDiv, ast.Mod)


class Arrays:
    """How an expression is evaluated on NumPy arrays; the base of other ways."""

    def known(self, condition: Any) -> Any:
        """Return a comparison, which is false where a value is missing."""
        return np.asarray(condition)

    def is_in(self, value: Any, members: tuple[Any, ...]) -> Any:
        """Return whether values are among the members."""
        return np.isin(value, members)

    def choose(self, condition: Any, then: Any, otherwise: Any) -> Any:
        """Return the values of `then` where the condition holds, else those of `otherwise`."""
        return np.where(condition, then, otherwise)

    def fraction(self, values: Any, salt: int) -> Any:
        """Return `fraction` of integers."""
        return fraction(values, salt)


def fraction(values: NDArray[Any], salt: int) -> NDArray[np.float64]:
    """Hash integers uniformly to [0, 1): float64 of the same shape, by the finalizer of SplitMix64 (Steele, 2014)."""
    words = values.astype(np.int64).view(np.uint64) + np.uint64((_GOLDEN + salt) & _WORD_MASK)
    hashed: NDArray[np.float64] = (mix64(words) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return hashed


class Expression:
    """A checked expression; `names` are the columns that it needs, `text` is how it was written."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ConfigError(f"{text!r} is no expression; write one such as \"event_type == 'listen'\"") from None
        self.names = tuple(dict.fromkeys(self._check(self._tree)))

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    def __call__(self, columns: Mapping[str, Any], way: Arrays | None = None) -> Any:
        """Evaluate on the columns, by name: arrays of equal shapes, or what another way takes."""
        return self._evaluate(self._tree, columns, way or Arrays())

    def kind(self, columns: Mapping[str, str]) -> str:
        """Return what the values are, `number`, `text` or `condition`, given that of each column.

        Raises:
            ConfigError: a column is not there, or numbers, texts and conditions are mixed up.
        """
        if unknown := [name for name in self.names if name not in columns]:
            raise ConfigError(f"{self.text!r} needs the column {unknown[0]!r}; there are {', '.join(columns)}")
        return self._kind(self._tree, columns)

    def _kind(self, node: ast.AST, columns: Mapping[str, str]) -> str:
        match node:
            case ast.Name():
                return columns[node.id]
            case ast.Constant():
                return "text" if isinstance(node.value, str) else "number"
            case ast.BinOp():
                self._expect("number", columns, node.left, node.right)
                return "number"
            case ast.UnaryOp():
                kind = "condition" if isinstance(node.op, ast.Not) else "number"
                self._expect(kind, columns, node.operand)
                return kind
            case ast.BoolOp():
                self._expect("condition", columns, *node.values)
            case ast.IfExp():
                self._expect("condition", columns, node.test)
                kind = self._kind(node.body, columns)
                self._expect(kind, columns, node.orelse)
                return kind
            case ast.Compare():
                kind = self._kind(node.left, columns)
                for op, right in zip(node.ops, node.comparators, strict=True):
                    if not isinstance(op, ast.In | ast.NotIn):
                        self._expect(kind, columns, right)
                    elif isinstance(self._members(right)[0], str) != (kind == "text"):
                        raise ConfigError(f"{self._part(right)} must have {kind}s, as {self._part(node.left)} is one")
            case ast.Call():
                self._expect("number", columns, node.args[0])
                return "number"
        return "condition"

    def _expect(self, kind: str, columns: Mapping[str, str], *nodes: ast.AST) -> None:
        for node in nodes:
            if (found := self._kind(node, columns)) != kind:
                raise ConfigError(f"{self._part(node)} is a {found}, where a {kind} is needed")

    def _check(self, node: ast.AST) -> list[str]:
        """Return the names below a node; a ConfigError if it is none that the module lists."""
        match node:
            case ast.Name():
                return [node.id]
            case ast.Constant(value=value) if type(value) in (int, float, str):
                return []
            case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
                is_number = isinstance(node.right, ast.Constant) and type(node.right.value) in (int, float)
                if isinstance(op, _DIVISORS) and not (is_number and node.right.value):  # type: ignore[attr-defined]
                    raise ConfigError(f"{self._part(node)} must be divided by a number other than 0")
                return self._check(node.left) + self._check(node.right)
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                return self._check(node.operand)
            case ast.BoolOp():
                return [name for value in node.values for name in self._check(value)]
            case ast.IfExp():
                return self._check(node.test) + self._check(node.body) + self._check(node.orelse)
            case ast.Compare():
                found = self._check(node.left)
                for compared, right in zip(node.ops, node.comparators, strict=True):
                    if isinstance(compared, ast.In | ast.NotIn):
                        self._members(right)
                    elif type(compared) in _COMPARISONS:
                        found += self._check(right)
                    else:
                        raise ConfigError(f"{self._part(node)} has another comparison than == != < <= > >= in, not in")
                return found
            case ast.Call(func=ast.Name(id=name), args=[column, salt], keywords=[]) if name == _FRACTION:
                if not (isinstance(salt, ast.Constant) and type(salt.value) is int and isinstance(column, ast.Name)):
                    raise ConfigError(f"{self._part(node)} must be fraction(COLUMN, SALT) with an integer")
                return [column.id]
        raise ConfigError(
            f"{self._part(node)} is not known; use columns, numbers, texts, + - * // % & |, comparisons, in, and, or, "
            "not, if else and fraction(COLUMN, SALT)"
        )

    def _members(self, node: ast.AST) -> tuple[Any, ...]:
        try:
            members = ast.literal_eval(node)
        except ValueError:
            members = None
        kinds = {type(member) for member in members} if isinstance(members, tuple | list) else {None}
        if not (kinds and (kinds == {str} or kinds <= {int, float})):
            raise ConfigError(f"{self._part(node)} must be a tuple of numbers or of texts, such as (1, 4)")
        return tuple(members)

    def _part(self, node: ast.AST) -> str:
        return f"{ast.unparse(node)!r} in {self.text!r}"

    def _evaluate(self, node: ast.AST, columns: Mapping[str, Any], way: Arrays) -> Any:
        match node:
            case ast.Name():
                return columns[node.id]
            case ast.Constant():
                return node.value
            case ast.BinOp():
                left, right = (self._evaluate(side, columns, way) for side in (node.left, node.right))
                return _ARITHMETIC[type(node.op)](left, right)
            case ast.UnaryOp():
                value = self._evaluate(node.operand, columns, way)
                return ~value if isinstance(node.op, ast.Not) else -value
            case ast.BoolOp():
                values = [self._evaluate(value, columns, way) for value in node.values]
                join = operator.and_ if isinstance(node.op, ast.And) else operator.or_
                found = values[0]
                for value in values[1:]:
                    found = join(found, value)
                return found
            case ast.IfExp():
                parts = (self._evaluate(each, columns, way) for each in (node.test, node.body, node.orelse))
                return way.choose(*parts)
            case ast.Compare():
                return self._compare(node, columns, way)
            case ast.Call():
                column, salt = node.args
                return way.fraction(self._evaluate(column, columns, way), salt.value)  # type: ignore[attr-defined]
        raise AssertionError(node)

    def _compare(self, node: ast.Compare, columns: Mapping[str, Any], way: Arrays) -> Any:
        found, left = None, self._evaluate(node.left, columns, way)
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, ast.In | ast.NotIn):
                one = way.known(way.is_in(left, self._members(comparator)))
                one = ~one if isinstance(op, ast.NotIn) else one
            else:
                right = self._evaluate(comparator, columns, way)
                is_not = isinstance(op, ast.NotEq)
                one = way.known((operator.eq if is_not else _COMPARISONS[type(op)])(left, right))
                one, left = ~one if is_not else one, right
            found = one if found is None else found & one
        return found
