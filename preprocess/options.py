"""The records in `PreprocessConfig` but that of a log: filters, requests, synthetic data. Imports nothing heavy."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from evenrank.core.errors import ConfigError
from evenrank.core.rules import Bounds, Needs, Option
from evenrank.core.settings import Settings
from evenrank.datasets.schema import ITEM_ID, USER_ID, check_new_names

if TYPE_CHECKING:
    from evenrank.datasets.distributions import Distribution

OnError = Literal["fail", "skip"]
EngineName = Literal["local", "ray"]
Unknown = Literal["append", "oov", "drop", "fail"]  # what to do about values that an earlier vocabulary lacks
AUTO, DENSE, KEEP, HASH = "auto", "dense", "keep", "hash"  # rules of ids
_ID_COLUMNS: Mapping[str, str] = {"user": USER_ID, "item": ITEM_ID}
_HASHED, _MAX_HASHES = re.compile(f"{HASH}:([0-9]{{1,19}})"), 2**62
_MAX_EVENTS = (1 << 31) - 1  # of a row
CATEGORY = "category"  # column of events of data that drifts
_MAX_USERS = 1_000_000_000  # their features are drawn at once
_MAX_ITEMS = 100_000_000  # whose categories are in memory

Events = Annotated[int, Bounds(at_least=1, at_most=_MAX_EVENTS), Option("EVENTS")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters(Settings):
    """Which events and users to keep, and how to cut long histories. All values are numbers of events."""

    min_user_events: Annotated[Events, Option("EVENTS", name="k_core")] = 1
    """k-core: users with fewer events are removed, repeatedly, until no user and no item has too few."""
    min_item_events: Annotated[Events, Option("EVENTS", name="k_core")] = 1
    """k-core: items with fewer events are removed, repeatedly, until no user and no item has too few."""
    min_length: Events = 1
    """Leave out users with fewer events, counting after the k-core."""
    max_length: Events | None = None
    """Leave out users with more events, counting after the k-core."""
    window: Events | None = None
    """Cut longer histories into rows of at most this many events."""
    stride: Annotated[Events | None, Needs("window")] = None
    """Distance between the starts of consecutive windows, in events. None: `window`."""

    def _check(self) -> None:
        if self.max_length is not None and self.max_length < self.min_length:
            raise ConfigError(
                f"max_length must be at least min_length, got max_length={self.max_length} and "
                f"min_length={self.min_length}"
            )
        if self.window is not None and self.stride is not None and self.stride > self.window:
            raise ConfigError(f"stride must be at most window ({self.window}), or events are lost; got {self.stride}")

    @property
    def overlap(self) -> int:
        """Number of events that a window shares with the one before."""
        return 0 if self.window is None or self.stride is None else self.window - self.stride


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRule(Settings):
    """When a user makes a request: at the first event, then at each event late enough after the last request."""

    seconds: Annotated[float, Bounds(above=0, below=1e9), Option("SECONDS", name="requests")]
    """Also write requests.parquet, for replaying inference traffic: a user makes a request at the first event, and then
    at each event that is at least this many seconds after the last request."""
    by_date: Annotated[bool, Needs("seconds")] = False
    """Restart requests and histories at midnight (UTC)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift(Settings):
    """How users and items evolve, so that what was learned from older days fits the next day less.

    A user has events of one category mostly, and of another one after some time. Which category many users change to is
    a fashion, which changes too. New items appear during the first 30 days.
    """

    categories: Annotated[int, Bounds(at_least=1, at_most=_MAX_ITEMS)] = 20
    """Of items, in turn: item i has the category 1 + (i - low) mod `categories`, `low` being the lowest item."""
    days: Annotated[float, Bounds(at_least=0.01, at_most=1e6)] = 7.0
    """Mean time until a user's interest changes, which is distributed exponentially; also how long a fashion lasts."""
    share: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.8
    """Of events with an item of the category that interests the user; others have any."""
    new_items: Annotated[float, Bounds(at_least=0, at_most=0.9)] = 0.3
    """Share of items that appear after the start; the first one of each category is always there."""


# Distributions are slow to import, so options have texts of them, which become distributions in records.
def _distribution(text: str) -> Any:
    from evenrank.datasets.distributions import parse_distribution

    return parse_distribution(text)


def _by_name(pairs: Sequence[str]) -> dict[str, Any]:
    named = [pair.partition("=")[::2] for pair in pairs]
    for name, text in named:
        if not text or len([other for other, _ in named if other == name]) > 1:
            raise ConfigError(f"--contextual needs NAME=DISTRIBUTION, once for each name, got {name}={text}; change it")
    return {name: _distribution(text) for name, text in named}


def _drift(text: str) -> Drift:
    from evenrank.datasets.distributions import parse_parameters

    return parse_parameters("drift", Drift, text, text)


_Drawn = Annotated["Distribution", Option("DISTRIBUTION", parse=_distribution, paths=r"(?<=\bpath=)[^,]+")]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticConfig(Settings):
    """The size and the distributions of a synthetic dataset. Users are 1..num_users."""

    num_users: Annotated[
        int,
        Bounds(at_least=1, at_most=_MAX_USERS),
        Option("COUNT", name="users", panel="Synthetic data (--dataset synthetic)"),
    ] = 20_000
    """Number of users."""
    items: "Distribution" = field(default_factory=partial(_distribution, "zipf:exponent=1.05,high=50000"))
    """Item ids of events; under a Zipf distribution, ids are ranks of popularity."""
    lengths: _Drawn = field(default_factory=partial(_distribution, "lognormal:mean=128,std=256,high=4096"))
    """Events per user: uniform, normal, zipf or lognormal, with parameters."""
    actions: _Drawn = field(default_factory=partial(_distribution, "uniform:low=0,high=4"))
    """Actions of events, 0..2^31-1; the largest one follows from them."""
    contextual: Annotated[
        Mapping[str, "Distribution"],
        Option("NAME=DISTRIBUTION", parse=_by_name, paths=r"(?<=\bpath=)[^,]+"),
    ] = field(default_factory=partial(_by_name, ("segment=uniform:low=1,high=8",)))
    """Features of users, with the distributions of their ids, 0: missing; several by several names."""
    drift: Annotated[Drift | None, Option("KEY=VALUE,...", parse=_drift)] = None
    """Users change what interests them and items appear over time, such as
    categories=20,days=7,share=0.8,new_items=0.3 (the defaults): `share` of a user's events are of one of `categories`,
    for `days` on average; `new_items` is the share of items that appear after the start. Adds `category`, a column of
    events, and needs items that are Zipf. None: nothing evolves."""

    def _check(self) -> None:
        check_new_names([*self.contextual, *[CATEGORY] * (self.drift is not None)])
        if self.drift is not None and not self.drift.categories <= len(self.catalogue) <= _MAX_ITEMS:
            raise ConfigError(
                f"drift needs Zipf-distributed items, {self.drift.categories} (one per category) to {_MAX_ITEMS:,} of "
                f"them, got {self.items}; change one of them"
            )

    @property
    def catalogue(self) -> range:
        """The items of a Zipf distribution with a largest one, otherwise none."""
        from evenrank.datasets.distributions import Zipf

        if isinstance(self.items, Zipf) and self.items.high is not None:
            return range(self.items.low, self.items.high + 1)
        return range(0)


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
        names = [_ID_COLUMNS.get(column, "")] if has_column else [*_ID_COLUMNS.values()]
        rule = rule if has_column else column
        if "" in names or not is_valid(rule) or not rules.keys().isdisjoint(names):
            raise ConfigError(
                f"invalid {option} {text!r}; expected {expected}, for both columns or as item=RULE,user=RULE"
            )
        rules |= dict.fromkeys(names, rule)
    return rules


def _is_rule(rule: str) -> bool:
    hashed = _HASHED.fullmatch(rule)
    return rule in (AUTO, DENSE, KEEP) if hashed is None else 1 <= int(hashed[1]) <= _MAX_HASHES
