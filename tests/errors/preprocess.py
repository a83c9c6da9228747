from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from evenrank.core.errors import ConfigError, DataError
from tests.errors.scene import Row, Scene

_TEXT, _LATER = "user,item,time\n1,2,1600000000\n", "user,item,time\n3,4,1700000000\n"
_FILE = Path("f.csv")
_COLUMNS = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
_GIVEN: dict[str, dict[str, Any]] = {
    "TabularConfig": {"events": (_FILE,), **_COLUMNS},
    "PreprocessConfig": {"dataset": "synthetic", "out": "out"},
    "SyntheticConfig": {"num_users": 5},
}


def _made(name: str, **options: Any) -> Any:
    """Return a record of options of `evenrank.preprocess`."""
    import evenrank.preprocess

    return getattr(evenrank.preprocess, name)(**_GIVEN.get(name, {}) | options)


def _refused(name: str, options: dict[str, Any], scene: Scene) -> Any:
    return _made(name, **options)


def _drawn(distribution: str, *, items: int = 0, **options: Any) -> Any:
    """Return options of synthetic data with a distribution of the lengths, or of the items if there are so many."""
    from evenrank.datasets import distributions

    limits = {"high": items} if items else {"low": 2**62, "high": 2**62}
    made = getattr(distributions, distribution)(**limits)
    return _made("SyntheticConfig", **{"items" if items else "lengths": made}, **options)


def _run(scene: Scene, **options: Any) -> Any:
    """Preprocess synthetic data, or a log that is given as text."""
    from evenrank.preprocess import preprocess

    given: dict[str, Any] = {"out": scene.folder / "out", **options}
    if text := given.pop("log", None):
        log = _made("TabularConfig", events=(scene.file("log.csv", text),))
        given = {"dataset": "custom", "custom": log, "split": "none", **given}
    else:
        given = {"synthetic": _made("SyntheticConfig"), **given}
    return preprocess(_made("PreprocessConfig", **given))


def _append(scene: Scene, options: dict[str, Any], **first: Any) -> Any:
    first = {"ids": "dense", **first}
    _run(scene, log=_TEXT, **first)
    return _run(scene, **{"log": _LATER, "append": True, **first, **options})


def _with_vocabulary(scene: Scene, change: Callable[[Path], object], *, user: str = "1", log: str = "") -> Any:
    """Preprocess synthetic data, or a log, with the vocabulary of a log of one user, which is changed before."""
    _run(scene, log=f"user,item,time\n{user},2,1600000000\n", ids="dense", out=scene.folder / "old")
    change(scene.folder / "old" / "vocabulary_item_id.parquet")
    return _run(scene, vocabulary=scene.folder / "old", **({"log": log} if log else {}))


def _add_one(path: Path) -> None:
    import polars as pl

    pl.read_parquet(path).with_columns(pl.col("value") + 1).write_parquet(path)


def _texts(name: str, option: str, texts: str, line: str, **others: Any) -> list[tuple[str, dict[str, Any], str]]:
    """Return rows of texts, divided by blanks, that an option cannot have; their line has the text."""
    return [(name, {option: text, **others}, line.replace("TEXT", repr(text))) for text in texts.split()]


_SPLITS = "user user:-0.1 user:nan leave-last:0 leave-last:x time: nobody file: time:tomorrow time:1969 time:0000 "
_SPLITS += (
    "time:2015-13 time:20151301 time:-1 time:1e9 time:253402300800000000000 time:last: time:last:0d time:last:7y "
)
_SPLITS += "time:2015,eval:1d,gap:1d time:2015,gap:1 time:first:0d time:first:1d,eval:1d,eval:1d time:2015,first:1d"
_IDS = "sparse item= dense,keep item=dense,item=keep dense,item=keep action=keep hash:0 hash:-1 hash:1e3 hash:² "
_IDS += "item=dense, user:keep hash:4611686018427387905"
_EXPANSIONS = "ml-20m ml-20m:1x2 ml-20m:2x2:0.0 ml-20m:2x2:2 kuairand-1k:2x2 :2x2"
_LOG, _ALL, _USERS = "TabularConfig", "PreprocessConfig", {"context": _FILE}

# Options that records refuse when they are made.
_OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    (_LOG, {"events": ()}, "TabularConfig: events must be at least one file, got ()"),
    (_LOG, {"timestamp_unit": "h"}, "TabularConfig: timestamp_unit must be one of auto, s, ms, us, ..., got 'h'"),
    (_LOG, {"timestamp_unit": "row"}, "give either timestamp_column or timestamp_unit 'row', ..."),
    (_LOG, {"timestamp_column": ""}, "give either timestamp_column or timestamp_unit 'row', ..."),
    (_LOG, {"action_columns": (*map(str, range(32)),)}, "...action_columns must be at most 31 columns, got ..."),
    (_LOG, {"item_column": "user"}, "column 'user' is given twice; use each column for one purpose"),
    (_LOG, {"action_map": "stars"}, "...action_map='stars' applies to action_columns=COLUMN, not to ..."),
    (_LOG, {"event_columns": ("n:text",)}, "column 'n:text' must be NAME or NAME:TYPE, ... int, float, float?"),
    (_LOG, {"event_columns": ("n=16777216",)}, "column ... has the fill '16777216', no float below 2^24; ..."),
    (_LOG, {"event_columns": ("n:int=x",)}, "column ... has the fill 'x', no int below 2^63; give another, ..."),
    (_LOG, {"event_columns": ("n:int?",)}, "column 'n:int?' has no integer ...; declare n:float?, or ..."),
    (_LOG, {"event_columns": ("action",)}, "...'action'..."),
    (_LOG, {"label": "n:float?=drop"}, "column 'n:float?=drop' has missing values and something in their place; ..."),
    (_LOG, {"weight": "w:float?"}, "...weight must be ... without missing values: ..., got 'w:float?'"),
    *[
        (_LOG, {"compute": (text,)}, f"{text!r} must be NAME[:int|float]=EXPRESSION, such as ...")
        for text in ("a", "a:int", "=b", "a:text=b", ":int=b")
    ],
    (_LOG, {"compute": ("a=b ==",)}, "'b ==' is no expression; ..."),
    (_LOG, {"compute": ("item=b",)}, "column 'item' is given twice; use each column for one purpose"),
    (_LOG, {"compute": ("a=b", "a=c")}, "column 'a' is given twice; ..."),
    (_LOG, {"compute": ("label=b",)}, "no feature can be called 'label'..."),
    (_LOG, {"compute": ("action=b",), "action_columns": ("c",)}, "compute and action_columns both define the ..."),
    *_texts(_LOG, "action_map", "halves bins:2,1 bins: values:a,a", "...action_map TEXT; ...", action_columns=("a",)),
    (_LOG, _USERS, "...context=... has no effect without context_columns; give both, or leave it out"),
    (_LOG, {**_USERS, "context_columns": ("length:float",)}, "no feature can be called 'length'..."),
    (_LOG, {**_USERS, "context_columns": ("a:float=3",)}, "column 'a:float=3' must be ... of id, int, list, float"),
    (_LOG, {**_USERS, "context_columns": ("a", "a:float")}, "column 'a' is given twice; ..."),
    (_LOG, {**_USERS, "context_columns": ("p",), "label": "P"}, "the names ... differ at most by case..."),
    (_LOG, {"item_columns": ("a",)}, "...item_columns=('a',) has no effect without item_features; ..."),
    (
        _LOG,
        {"item_features": (_FILE,), "item_columns": ("c:list",)},
        "item_columns has 'c:list', no column of events; ...",
    ),
    (_ALL, {"seed": -1}, "PreprocessConfig: seed must be at least 0 and below 2^62, got -1"),
    (_ALL, {"on_error": "warn"}, "PreprocessConfig: on_error must be one of fail, skip, got 'warn'"),
    (_ALL, {"out": "out\udcff"}, "the name of the folder out... is not UTF-8; choose another name"),
    (_ALL, {"dataset": "ml-1m", "raw_dir": Path("s3://b")}, "raw_dir s3://b is a URL; choose a folder of this host"),
    (
        _ALL,
        {"dataset": "custom", "rejects": True},
        "...rejects=True applies to on_error='skip', not to on_error='fail'...",
    ),
    (
        _ALL,
        {"dataset": "custom", "append": True, "vocabulary": _FILE},
        "...append=True applies to vocabulary=None, ...",
    ),
    (
        _ALL,
        {"vocabulary": _FILE, "unknown": "keep"},
        "...invalid unknown 'keep'; expected append, oov, drop, fail, ...",
    ),
    (_ALL, {"split": ""}, "...invalid split ''; expected ..."),
    *_texts(_ALL, "split", _SPLITS, "...invalid split TEXT; expected user:FRACTION ... or none"),
    *_texts(_ALL, "ids", _IDS, "...invalid ids TEXT; expected auto, dense, keep or hash:N ..."),
    *_texts(_ALL, "expand", _EXPANSIONS, "...TEXT is no expansion of MovieLens; write it like ml-20m:16x32, ..."),
    ("Filters", {"min_length": 0}, "Filters: min_length must be at least 1 and at most 2147483647, got 0"),
    ("Filters", {"min_length": 5, "max_length": 4}, "max_length must be at least min_length, got max_length=4 ..."),
    ("Filters", {"stride": 4}, "Filters: stride=4 has no effect without window; give both, or leave it out"),
    ("Filters", {"window": 4, "stride": 5}, "stride must be at most window (4), or events are lost; got 5"),
    ("Drift", {"categories": 0}, "Drift: categories must be at least 1 and at most 100000000, got 0"),
    ("Drift", {"days": 0}, "Drift: days must be at least 0.01 and at most 1000000.0, got 0"),
    ("Drift", {"share": 1.5}, "Drift: share must be at least 0 and at most 1, got 1.5"),
    ("Drift", {"new_items": float("nan")}, "Drift: new_items must be at least 0 and at most 0.9, got nan"),
    ("SyntheticConfig", {"num_users": 0}, "SyntheticConfig: num_users must be at least 1 and at most ..., got 0"),
    ("SyntheticConfig", {"contextual": {"length": None}}, "no feature can be called 'length'..."),
]
_AGAIN, _AT_ONCE = "; append with the same options", "; preprocess all of the log at once"

# What runs refuse.
_CALLS: list[tuple[Callable[[Scene], Any], str]] = [
    (lambda s: _run(s, dataset="custom", synthetic=None), "dataset 'custom' has no description; set `custom` to ..."),
    (
        lambda s: _run(s, synthetic=_drawn("Uniform")),
        "users 1 to 5 have 23,058,... events, more than 1,073,741,824; ...",
    ),
    (
        lambda s: _drawn("Uniform", items=99, drift=_made("Drift")),
        "drift needs Zipf-distributed items, 20 ..., got ...",
    ),
    (lambda s: _drawn("Zipf", items=19, drift=_made("Drift")), "drift needs Zipf-distributed items, 20 ..., got ..."),
    (
        lambda s: _made("SyntheticConfig", contextual={"category": None}, drift=_made("Drift")),
        "the names 'category' and 'category' differ at most by case...",
    ),
    (
        lambda s: _run(s, log=_TEXT, out=s.folder, overwrite=True),
        "<folder>/log.csv is read, and would be replaced with <folder>; choose another output folder",
    ),
    (
        lambda s: _run(s, log=_TEXT, split=f"file:{s.file('out/u.txt', '1')}", overwrite=True),
        "<folder>/out/u.txt is read, and would be replaced with <folder>/out; choose another output folder",
    ),
    (lambda s: _with_vocabulary(s, str, user="u"), "user_id is int64 in synthetic and text in <folder>/old; ..."),
    (lambda s: _with_vocabulary(s, str, user=str(2**63)), "user_id is int64 in synthetic and uint64 in ...; ..."),
    (lambda s: _append(s, {"split": "user:0.5"}), f"split is 'user:0.5', and was 'none' when ...out was made{_AGAIN}"),
    (lambda s: _append(s, {"ids": "keep"}), "the rule of user_id is keep, and the ids of <folder>/out are dense; ..."),
    (lambda s: _append(s, {"ids": ""}, ids="keep"), "the rule of user_id is auto, and the ids of ... are keep; ..."),
    (
        lambda s: _append(s, {}, ids="item=hash:9"),
        f"events cannot be appended: ...item_id has ids that are hashes{_AT_ONCE}",
    ),
    (
        lambda s: _append(s, {"filters": _made("Filters", min_length=2)}),
        f"events cannot be appended: min_length left out events that may count by now{_AT_ONCE}",
    ),
]
_DATA: list[tuple[Callable[[Scene], Any], str]] = [
    (lambda s: _run(s, out="/", overwrite=True), "/ is no folder; choose another output folder"),
    (lambda s: _run(s, out=s.file("x", ""), overwrite=True), "<folder>/x is a file or a mount point; choose ..."),
    (lambda s: _append(s, {"out": s.folder / "none"}), "<folder>/none is not a dataset: no such folder..."),
    (
        lambda s: _with_vocabulary(s, Path.unlink, log=_TEXT),
        "<folder>/old/... cannot be read (...); preprocess that ...",
    ),
    (
        lambda s: _with_vocabulary(s, _add_one, log=_TEXT),
        "<folder>/old/vocabulary_item_id.parquet does not match its ...",
    ),
]

ROWS = [
    *(Row(partial(_refused, name, given), ConfigError, line) for name, given, line in _OPTIONS),
    *(Row(call, ConfigError, line) for call, line in _CALLS),
    *(Row(call, DataError, line) for call, line in _DATA),
]
