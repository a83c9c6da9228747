"""Rules that turn raw ids of users and items into the rows of embedding tables.

auto       `dense` or `keep`, whichever fits the values; see `choose`
dense      1, 2, ... by first appearance, listed in a vocabulary; 0 is left for unknown values
keep       the integers of the log
hash:1000  a hash of the value, 0..999, for which no vocabulary is needed
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.core.hashing import mix64
from evenrank.datasets.schema import ITEM_ID, USER_ID, IdKind, IdSummary
from evenrank.preprocess.build.key_table import KeyTable

AUTO, DENSE, KEEP, HASH = "auto", "dense", "keep", "hash"
Unknown = Literal["append", "oov", "drop", "fail"]  # what to do about values that an earlier vocabulary lacks
_COLUMNS: Mapping[str, str] = {"user": USER_ID, "item": ITEM_ID}
_MAX_HASHES = 2**62


def parse_ids(text: str) -> dict[str, str]:
    """Parse `dense`, or `item=dense,user=keep`: the rule of each column that has one."""
    return _parse_per_column("ids", text, "auto, dense, keep or hash:N (N from 1 to 2^62)", _is_rule)


def parse_unknown(text: str) -> dict[str, str]:
    """Parse `drop`, or `item=oov,user=append`: what to do about unknown values, for each column that has a rule."""
    return _parse_per_column("unknown", text, ", ".join(get_args(Unknown)), lambda rule: rule in get_args(Unknown))


def _parse_per_column(option: str, text: str, expected: str, is_valid: Callable[[str], bool]) -> dict[str, str]:
    rules: dict[str, str] = {}
    for part in text.split(",") if text else ():
        column, has_column, rule = part.strip().partition("=")
        names = [_COLUMNS.get(column, "")] if has_column else [*_COLUMNS.values()]
        rule = rule if has_column else column
        if "" in names or not is_valid(rule) or not rules.keys().isdisjoint(names):
            raise ConfigError(
                f"invalid {option} {text!r}; expected {expected}, for both columns or as item=RULE,user=RULE"
            )
        rules |= dict.fromkeys(names, rule)
    return rules


def _is_rule(rule: str) -> bool:
    name, _, count = rule.partition(":")
    if name == HASH:
        return count.isdecimal() and count.isascii() and 1 <= int(count) <= _MAX_HASHES
    return rule in (AUTO, DENSE, KEEP)


def choose(kind: IdKind, *, distinct: int, least: int, largest: int) -> str:
    """Return the rule for a column with rule `auto`: `keep` where at least half of the ids up to the largest occur."""
    return KEEP if kind == "int64" and least >= 0 and largest <= 2 * distinct else DENSE


@dataclass(frozen=True, kw_only=True, slots=True)
class Ids:
    """The ids of a column: how keys become ids, and what the manifest says about them."""

    size: int | None
    """Largest id + 1; None: the largest that occurs decides."""
    summary: IdSummary
    table: KeyTable | None = None
    """Of the keys, in the order of their ids, if the rule is `dense`."""

    def encode(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids of keys: int64 [n] both; of those that a vocabulary lacks, 0."""
        if self.table is not None:
            return self.table.find(keys) + 1
        if self.size is not None:
            return _hashed(keys, self.size)
        return keys


def _hashed(keys: NDArray[np.int64], num_ids: int) -> NDArray[np.int64]:
    return (mix64(keys.view(np.uint64)) % np.uint64(num_ids)).astype(np.int64)


def kept_ids(kind: IdKind, *, distinct: int | None = None, largest: int | None = None) -> Ids:
    """Return the rule by which integers are kept."""
    summary = IdSummary(rule=KEEP, kind=kind, distinct=distinct, largest=largest)
    return Ids(size=None, summary=summary)


def hashed_ids(rule: str, kind: IdKind, keys: NDArray[np.int64]) -> Ids:
    """Return the rule `hash:N`, and count those of the distinct `keys` [n] that share an id."""
    num_ids = int(rule.partition(":")[2])
    _, counts = np.unique(_hashed(keys, num_ids), return_counts=True)
    collisions = int(counts[counts > 1].sum())
    summary = IdSummary(rule=rule, kind=kind, distinct=len(keys), collisions=collisions)
    return Ids(size=num_ids, summary=summary)
