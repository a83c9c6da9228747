"""What a log of one's own looks like: its files, the columns to read and their types; what a drawn one looks like.

Imports nothing heavy.
"""

import contextlib
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from evenrank.core.errors import ConfigError
from evenrank.core.rules import AppliesTo, Bounds, Needs, Option, Parsed, Valid, Where
from evenrank.core.settings import Settings
from evenrank.datasets.schema import ACTION, FLOAT, FLOAT_OR_MISSING, ITEM_ID, TIMESTAMP_MS, USER_ID, check_new_names

if TYPE_CHECKING:
    from evenrank.core.expressions import Expression
    from evenrank.datasets.distributions import Distribution

AUTO, DENSE, KEEP, HASH = "auto", "dense", "keep", "hash"  # rules of ids
TimestampUnit = Literal["auto", "s", "ms", "us", "ns", "iso", "date", "row"]
ItemFeaturesAs = Literal["events", "table"]
_DELIMITER = re.compile(r'([^\x80-\U0010ffff0-9A-Za-z".+\-\r\n\0])\1*')
_MAX_FLAGS = 31  # the bits of a non-negative int32
CATEGORY = "category"  # column of events of data that drifts
_MAX_USERS = 1_000_000_000  # their features are drawn at once
_MAX_ITEMS = 100_000_000  # whose categories are in memory
_LIST = "list"
_EVENT_TYPES = {"int": "int64", "float": FLOAT, "float?": FLOAT_OR_MISSING}
_FEATURE_TYPES = {"id": "id", "int": "int64", _LIST: _LIST, "float": FLOAT}


class LogColumn(NamedTuple):
    """A column as `NAME[:TYPE][=FILL]` or `NAME[:TYPE]=drop` describes it."""

    name: str
    dtype: str
    """`int64`, `float32` or `float32?`, or `id`: any values, which are numbered from 1; `list`: any number of them."""
    fill: float | None
    """Number in place of missing values, NaN of `float32?`, 0 of features; None: there must be none."""
    drops_missing: bool = False
    """Whether events without a value are left out."""


class Computed(NamedTuple):
    """A column of events that is computed from columns of the log."""

    name: str
    dtype: str  # `int64` or `float32`
    expression: "Expression"


class FeatureFiles(NamedTuple):
    """Files of features, their column of ids and those of features, and the names of all columns without a header."""

    paths: tuple[Path, ...]
    key: str
    columns: tuple[LogColumn, ...]
    header: tuple[str, ...]


def parse_column(text: str, *, is_feature: bool) -> LogColumn:
    """Parse the description of a column; without a type, features of users and items are ids, others floats.

    Raises a ConfigError if the type is unknown, or the fill not of that type. Features have no fill.
    """
    types = _FEATURE_TYPES if is_feature else _EVENT_TYPES
    head, has_fill, fill = text.partition("=")
    name, has_type, kind = head.rpartition(":")
    if not has_type:
        name, kind = head, "id" if is_feature else "float"
    if kind == "int?" and not is_feature:
        given = f"declare {name}:float?, or {name}:int=FILL or {name}:int=drop"
        raise ConfigError(f"column {text!r} has no integer that stands for a missing value; {given}")
    if kind not in types or not name or (is_feature and has_fill):
        raise ConfigError(f"column {text!r} must be NAME or NAME:TYPE, with a type of {', '.join(types)}")
    if kind == "float?" and has_fill:
        raise ConfigError(f"column {text!r} has missing values and something in their place; give one of ? and =")
    number = math.nan if kind == "float?" else 0.0 if is_feature else None
    if has_fill and fill != "drop":
        with contextlib.suppress(ValueError):
            number = float(fill) if kind == "float" else int(fill)
        bits = 24 if kind == "float" else 63
        if number is None or not -(2.0**bits) <= number < 2.0**bits:
            raise ConfigError(f"column {text!r} has the fill {fill!r}, no {kind} below 2^{bits}; give another, or none")
    return LogColumn(name, types[kind], number, fill == "drop")


def parse_computed(text: str) -> Computed:
    """Parse `NAME=EXPRESSION`, of integers, or `NAME:float=EXPRESSION`; raises a ConfigError if it has another form."""
    from evenrank.core.expressions import Expression  # which loads NumPy

    head, has_expression, expression = text.partition("=")
    name, _, kind = head.strip().partition(":")
    if not (has_expression and name) or kind not in ("", "int", "float"):
        raise ConfigError(f"{text!r} must be NAME[:int|float]=EXPRESSION, such as 'liked=1 if stars >= 4 else 0'")
    return Computed(name, _EVENT_TYPES[kind or "int"], Expression(expression))


def parse_action_map(text: str) -> tuple[str, tuple[Any, ...]]:
    """Parse an action map: its name, the `bins:` as ascending floats or the `values:` as distinct texts.

    Raises a ConfigError if it has another form.
    """
    name, has_list, given = text.partition(":")
    texts = tuple(given.split(","))
    if name in ("", "stars", "half-stars", "float") and not has_list:
        return name, ()
    if name == "values" and has_list and len(set(texts)) == len(texts):
        return name, texts
    if name == "bins" and has_list:
        with contextlib.suppress(ValueError):
            limits = tuple(map(float, texts))
            if all(map(math.isfinite, limits)) and all(map(operator.lt, limits, limits[1:])):
                return name, limits
    raise ConfigError(
        f"invalid action_map {text!r}; expected stars, half-stars, float, bins:LIMIT,... with ascending numbers, or "
        "values:TEXT,... with different texts"
    )


_Name = Annotated[str, Option("COLUMN")]
_Names = Annotated[tuple[str, ...], Option("COLUMN,...")]


@dataclass(frozen=True, kw_only=True, slots=True)
class TabularConfig(Settings):
    """The files of a custom dataset and the names of their columns. The suffix of a file determines its format."""

    events: Annotated[
        tuple[Path, ...], Valid(len, "at least one file"), Option("PATH", panel="Logs (--dataset custom)")
    ]
    """Files, quoted patterns such as 'logs/*.csv.gz', or folders, whose files are read in sorted order, also at a URL
    (s3://, gs://): delimited text (.csv, .tsv, .txt, .dat), JSON lines (.json, .jsonl, .ndjson), each also with .gz,
    .zst or .bz2, or .parquet. A folder `day=1` adds a column `day`."""
    user_column: _Name = "user_id"
    """Column of user ids: integers or strings; blanks around them do not count, and `7.0` is 7."""
    item_column: _Name = "item_id"
    """Column of item ids: integers or strings."""
    timestamp_column: _Name = ""
    """Column of times. Default: none, which only the unit `row` allows."""
    timestamp_unit: Annotated[TimestampUnit, Option("UNIT")] = "auto"
    """Unit of numeric times, counted from 1970: `s`, `ms`, `us` or `ns`; `iso` for ISO 8601 text, in UTC unless it has
    an offset; `date` for 2015-01-06 or 20150106; `auto`: as the first values look. Parquet's date and time types need
    no unit. `row`: there are no times, and rows count as seconds."""
    action_columns: Annotated[
        _Names, Valid(lambda names: len(names) <= _MAX_FLAGS, f"at most {_MAX_FLAGS} columns")
    ] = ()
    """One column of actions, or several of 0 and 1, bits of the action, lowest bit first. Default: every action is
    0."""
    action_map: Annotated[
        str,
        Parsed(parse_action_map),
        Option("RULE", completions=lambda: ("stars", "half-stars", "float")),
        AppliesTo(action_columns=Where("COLUMN", lambda columns: len(columns) == 1)),
    ] = ""
    """How one action column becomes an action. `stars`: 1 to 5 become 0 to 4; `half-stars`: 0.5 to 5 become 0 to 9;
    `bins:2.5,4`: the number of these limits that a number reaches; `values:pv,cart,buy`: the position of the text in
    this list; `float`: a float32 column of events with its name, and every action is 0. Default: it is an integer from
    0 on."""
    event_columns: _Names = ()
    """More columns of events: `COLUMN[:int|float][=FILL]`, such as `dwell:int=0`; floats (float32, integers only below
    2^24) unless `int`, which is int64, as labels of classes are. `=drop` leaves out events without a value; with
    `:float?`, they are NaN."""
    compute: Annotated[tuple[str, ...], Option("NAME=EXPRESSION", parse=tuple)] = ()
    """Further columns of events, repeatable: `NAME[:int|float]=EXPRESSION` over columns of the log and timestamp_ms,
    such as "liked=1 if stars >= 4 else 0"; conditions are 1 and 0, comparisons with a missing value false. `action` is
    that of the event, in place of `action_columns`."""
    label: _Name = ""
    """One more column of events, of floats unless `:int`, or a computed one, which the manifest names as the label.
    `LoaderConfig.label` takes this or any other column of events."""
    weight: Annotated[
        _Name, Valid(lambda text: not text.endswith("?"), "a column without missing values: give =FILL or =drop")
    ] = ""
    """One more column of events, or a computed one, which the manifest names as the weight, for
    `LoaderConfig.weight`."""
    delimiter: Annotated[
        str | None,
        Valid(_DELIMITER.fullmatch, "a punctuation mark or a tab, or one repeated"),
        Option("CHARACTER"),
    ] = None
    """Separator of the fields of delimited events, one character or one character repeated. None: found by the first
    line among comma, tab, semicolon, `|` and `::`."""
    columns: _Names = ()
    """All columns of delimited events without a header. Default: the first line has them."""
    context: Annotated[Path | None, Needs("context_columns"), Option("FILE", panel="Features (--dataset custom)")] = (
        None
    )
    """File with features of users, one row per user: `user_column` and `context_columns`."""
    context_columns: Annotated[_Names, Needs("context")] = ()
    """Columns of `context` that are features: `COLUMN[:id|int|float|list]`, such as country,age:float; `int` keeps
    integers, of which 0 is missing; lists are divided by `|`, or JSON."""
    context_header: Annotated[_Names, Needs("context")] = ()
    """All columns of `context` without a header, divided like the events. Default: the first line has them."""
    item_features: Annotated[tuple[Path, ...], Needs("item_columns"), Option("FILE")] = ()
    """File with features of items, one row per item, or several: `item_column` and some of `item_columns` each. Of
    several rows of an item, the first counts."""
    item_columns: Annotated[_Names, Needs("item_features")] = ()
    """Columns of `item_features` that are features: `COLUMN[:id|int|float|list]`."""
    item_features_as: Annotated[ItemFeaturesAs, Needs("item_features")] = "events"
    """Where to write features of items. `events`: columns of events; `table`: item_features.parquet, one row per item,
    also with lists."""
    item_vectors: Annotated[Path | None, Option("FILE")] = None
    """File with a dense vector per item, of float16 or float32, for dense ids: .parquet with `item_column`, or one
    other column of ids, and a column of lists; or NAME.npy [n, d], with the n raw ids in NAME.ids.npy, or in
    NAME.ids.txt, one per line. Written as item_vectors.npy, by id, for VectorLookup."""
    user_vectors: Annotated[Path | None, Option("FILE")] = None
    """The same for users: `user_column`, user_vectors.npy."""

    def _check(self) -> None:
        if bool(self.timestamp_column) == (self.timestamp_unit == "row"):
            raise ConfigError("give either timestamp_column or timestamp_unit 'row', for logs in order without times")
        features = [(file.key, *(column.name for column in file.columns)) for file in self.feature_files.values()]
        computed = [column.name for column in self.computed]
        if ACTION in computed and self.action_columns:
            raise ConfigError("compute and action_columns both define the action; give one of them")
        for names in ((*self.needed_columns, *computed), *features):
            if twice := [name for name in names if names.count(name) > 1]:
                raise ConfigError(f"column {twice[0]!r} is given twice; use each column for one purpose")
        check_new_names([*chain(*(names for _, *names in features)), *(column.name for column in self.extra_columns)])
        lists = [text for text in self.item_columns if parse_column(text, is_feature=True).dtype == _LIST]
        if lists and self.item_features_as == "events":
            raise ConfigError(f"item_columns has {lists[0]!r}, no column of events; set item_features_as 'table'")

    @property
    def computed(self) -> tuple[Computed, ...]:
        """The computed columns."""
        return tuple(map(parse_computed, self.compute))

    @property
    def given_columns(self) -> tuple[LogColumn, ...]:
        """The further columns of events that the log has, with label, weight and an action that is a float."""
        actions, computed = self.action_columns if self.action_map == "float" else (), [c.name for c in self.computed]
        marks = (text for text in (self.label, self.weight) if text and text not in computed)
        return tuple(
            parse_column(text, is_feature=False) for text in dict.fromkeys((*actions, *self.event_columns, *marks))
        )

    @property
    def extra_columns(self) -> tuple[LogColumn, ...]:
        """The further columns of events, also the computed ones."""
        return (*self.given_columns, *(LogColumn(*c[:2], None) for c in self.computed if c.name != ACTION))

    @property
    def feature_files(self) -> dict[str, FeatureFiles]:
        """The files with features of users and items, where they are given, by `user_id` and `item_id`."""
        files = {
            USER_ID: (() if self.context is None else (self.context,), self.user_column, self.context_columns),
            ITEM_ID: (self.item_features, self.item_column, self.item_columns),
        }
        headers = {USER_ID: self.context_header, ITEM_ID: ()}
        return {
            name: FeatureFiles(paths, key, tuple(parse_column(t, is_feature=True) for t in columns), headers[name])
            for name, (paths, key, columns) in files.items()
            if paths
        }

    @property
    def vector_files(self) -> dict[str, tuple[Path, str]]:
        """The files with vectors of users and items, where they are given, and the columns of ids, by `user_id`, ..."""
        given = {USER_ID: (self.user_vectors, self.user_column), ITEM_ID: (self.item_vectors, self.item_column)}
        return {name: (path, key) for name, (path, key) in given.items() if path is not None}

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """The columns of the event files that have one purpose each."""
        names = (self.user_column, self.item_column, *filter(None, [self.timestamp_column]))
        actions = () if self.action_map == "float" else self.action_columns
        return (*names, *actions, *(column.name for column in self.given_columns))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns of the event files that expressions need."""
        names = dict.fromkeys(chain(*(column.expression.names for column in self.computed)))
        return tuple(name for name in names if name != TIMESTAMP_MS)

    @property
    def options_of_columns(self) -> dict[str, str]:
        """The options that name them, for messages."""
        marks = {self.label: "--label", self.weight: "--weight"}
        return {
            **dict.fromkeys(self.inputs, "--compute"),
            **{parse_column(text, is_feature=False).name: "--event-columns" for text in self.event_columns},
            **{parse_column(text, is_feature=False).name: option for text, option in marks.items() if text},
            **dict.fromkeys(self.action_columns, "--action-columns"),
            self.timestamp_column: "--timestamp-column",
            self.item_column: "--item-column",
            self.user_column: "--user-column",
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift(Settings):
    """How users and items evolve, so that what was learned from older days fits the next day less.

    A user has events of one category mostly, and of another one after some time. Which category many users change to is
    a fashion, which changes too. New items appear during the first 30 days.
    """

    categories: Annotated[int, Bounds(at_least=1, at_most=_MAX_ITEMS)] = 20
    """Number of categories: item i has the category 1 + (i - low) mod `categories`; `low` is the lowest item."""
    days: Annotated[float, Bounds(at_least=0.01, at_most=1e6)] = 7.0
    """Mean time until a user's interest changes, exponentially distributed; also how long a fashion lasts."""
    share: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.8
    """Share of a user's events whose item is of the category that interests the user; other events have any item."""
    new_items: Annotated[float, Bounds(at_least=0, at_most=0.9)] = 0.3
    """Share of items that appear after the start; the first item of each category is always there."""


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
