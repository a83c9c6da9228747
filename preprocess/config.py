"""`PreprocessConfig`: what to preprocess, how, and where to write it. Imports nothing heavy."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from evenrank.core.errors import ConfigError
from evenrank.core.rules import AllBut, AppliesTo, Bounds, Needs, OneOf, Option, Parsed, Where
from evenrank.core.settings import Settings
from evenrank.core.storage import is_url
from evenrank.datasets.schema import ITEM_ID, USER_ID
from evenrank.preprocess.log_config import AUTO, DENSE, HASH, KEEP, SyntheticConfig, TabularConfig
from evenrank.preprocess.read.public import CUSTOM, DATASETS, SYNTHETIC

OnError = Literal["fail", "skip"]
EngineName = Literal["local", "ray"]
Unknown = Literal["append", "oov", "drop", "fail"]  # what to do about values that an earlier vocabulary lacks
_ID_COLUMNS: Mapping[str, str] = {"user": USER_ID, "item": ITEM_ID}
_HASHED, _MAX_HASHES = re.compile(f"{HASH}:([0-9]{{1,19}})"), 2**62
_MAX_EVENTS = (1 << 31) - 1  # of a row
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


def parse_ids(text: str) -> dict[str, str]:
    """Parse `dense`, or `item=dense,user=keep`: the rule of each column that has one."""
    return _parse_per_column("ids", text, "auto, dense, keep or hash:N (N from 1 to 2^62)", _is_rule)


def parse_unknown(text: str) -> dict[str, str]:
    """Parse `drop`, or `item=oov,user=append`: what to do about unknown values, for each column that has a rule."""
    return _parse_per_column("unknown", text, ", ".join(get_args(Unknown)), lambda rule: rule in get_args(Unknown))


def parse_min_count(text: str) -> dict[str, int]:
    """Parse `5`, or `item=5,user=2`: how many events a value needs for an id, for each column that has a rule."""
    is_count = re.compile("[1-9][0-9]{0,8}").fullmatch
    counts = _parse_per_column("min_count", text, "events (1 to 999999999)", is_count)
    return {name: int(count) for name, count in counts.items()}


def _parse_per_column(option: str, text: str, expected: str, is_valid: Callable[[str], object]) -> dict[str, str]:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessConfig(Settings):
    """What to preprocess, how, and where to write it."""

    dataset: Annotated[str, OneOf(DATASETS), Option("NAME", panel="Dataset")]
    """One of `DATASETS`."""
    out: Annotated[Path | str, Option("FOLDER")]
    """Folder or URL of the new dataset, which replaces an existing one."""
    overwrite: bool = False
    """Replace a folder that contains something else than a dataset."""
    append: Annotated[bool, AppliesTo(dataset=(CUSTOM,)), AppliesTo(vocabulary=(None,))] = False
    """Add later events to the dataset at `out`, as if all events were preprocessed at once. The dataset keeps its rules
    of ids and its ids of features, and its log is not read again. Repeat the other options that made the dataset. Files
    that are in the dataset already change nothing."""
    raw_dir: Annotated[
        Path, Option("FOLDER"), AppliesTo(dataset=AllBut((SYNTHETIC, CUSTOM)), expand=AllBut((None,)))
    ] = Path("raw")
    """Folder of the raw files of public datasets, laid out as their archives unpack (FOLDER/ml-20m/ratings.csv), or of
    the official archives. Missing files are downloaded into it, except those of Yambda."""
    on_error: Annotated[OnError, AppliesTo(dataset=AllBut((SYNTHETIC,)), expand=AllBut((None,)))] = "fail"
    """What to do about rows that cannot be read: `fail`, or `skip` and count them."""
    rejects: Annotated[bool, AppliesTo(on_error=("skip",))] = False
    """Also write skipped rows to rejects.csv, with file, line, reason and text."""
    engine: EngineName = "local"
    """Where to work: `local`, on threads of this process; `ray`, on the nodes of a Ray cluster. The output is the same.
    A killed run continues when the same command is started again."""
    ray_address: Annotated[str | None, Option("ADDRESS"), AppliesTo(engine=("ray",))] = None
    """Address of a running Ray cluster, such as `auto`. None: start a cluster on this machine, and end it."""
    memory_limit: Annotated[
        float | None, Bounds(above=0, below=1_000_000), Option("GB"), AppliesTo(ray_address=(None,), engine=("local",))
    ] = None
    """Memory limit of all processes together, in GB. Fewer threads or processes run to keep the limit; an error states
    the least that is needed. None: half of the free memory, if that is possible."""
    split: Annotated[
        str,
        Parsed("evenrank.preprocess.build.splits:parse_split"),
        Option("RULE", panel="Splits and filters", paths="(?<=^file:).+"),
    ] = "user:0.3"
    """What goes to eval: `user:FRACTION`, that fraction of the users; `leave-last:N`, the last N events of each user;
    `time:2015`, `time:2015-01-06`, `time:1420070400` or ISO 8601, the events from that time on; `time:last:7d` (or w,
    h, m), those of the last 7 days; `time:first:300d`, those later than the first 300 days; `time:...,gap:30m,eval:1d`,
    those of one day, 30 minutes after such a time, without the others; `file:PATH`, the users in a text file (.txt) or
    in a table with the log's column of users, or the events of a second log; or `none`."""
    seed: Annotated[
        int,
        Bounds(at_least=0, below=1 << 62),
        Option("NUMBER"),
        AppliesTo(split=Where("user:FRACTION", lambda split: split.startswith("user:")), dataset=(SYNTHETIC,)),
    ] = 0
    """Seed of the split by user and of synthetic data."""
    allow_empty: bool = False
    """Accept a log that begins or ends in 1970, and an empty train or eval with `time:` and `file:`."""
    filters: Filters = field(default_factory=Filters)
    requests: RequestRule | None = None
    """Rule for requests.parquet. None: do not write it."""
    ids: Annotated[
        str,
        Parsed(parse_ids),
        AppliesTo(vocabulary=(None,)),
        Option("RULE", panel="Ids", completions=lambda: ("auto", "dense", "keep")),
    ] = ""
    """Ids of users and items: `dense`, numbered by first appearance, with a vocabulary; `keep`, the integers of the
    log; `hash:N`, a hash below N; `auto`, `dense` or `keep` by their range. For both, or `item=RULE,user=RULE`.
    Default: `dense` for public datasets but Yambda, `auto` for custom ones, else `keep`."""
    min_count: Annotated[str, Parsed(parse_min_count), Option("item=EVENTS")] = ""
    """`item=5`: items with fewer events, after filters and in all splits, share the id 0 of unknown ones, and their
    events stay; also for users, or one number for both. Ids are `dense` then. Of a later log, only values that
    `vocabulary` lacks are counted."""
    vocabulary: Annotated[Path | None, Option("FOLDER")] = None
    """Earlier dataset, also at a URL, whose ids are kept, for a later log. None: ids begin anew."""
    unknown: Annotated[
        str,
        Parsed(parse_unknown),
        Needs("vocabulary"),
        Option("RULE", completions=lambda: ("append", "oov", "drop", "fail")),
    ] = ""
    """What to do about values that `vocabulary` lacks: `append` them to it (the default); `oov`, give them the id 0;
    `drop` their events; or `fail`. For both, or `item=RULE,user=RULE`."""
    custom: Annotated[TabularConfig | None, AppliesTo(dataset=(CUSTOM,))] = None
    """Files and columns of dataset `custom`."""
    synthetic: Annotated[SyntheticConfig | None, AppliesTo(dataset=(SYNTHETIC,)), AppliesTo(expand=(None,))] = None
    """Size and distributions of dataset `synthetic`. None: the defaults."""
    expand: Annotated[
        str | None,
        Parsed("evenrank.preprocess.read.synthetic:parse_expansion"),
        Option("NAME:UxI[:RATE]"),
        AppliesTo(dataset=(SYNTHETIC,)),
    ] = None
    """In place of synthetic data, MovieLens with U times the users and I times the items, by fractal expansion."""

    def _check(self) -> None:
        if any("\ud800" <= character <= "\udfff" for character in str(self.out)):  # how Python keeps other bytes
            raise ConfigError(f"the name of the folder {self.out} is not UTF-8; choose another name")
        if is_url(self.raw_dir):
            raise ConfigError(f"raw_dir {self.raw_dir} is a URL; choose a folder of this host")
