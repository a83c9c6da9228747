from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from evenrank.core.errors import ConfigError, DataError
from tests.errors.scene import Row, Scene

_FILE = Path("f.csv")
_TEXT = "user,item,time\n1,2,1600000000\n"
_LATER = "user,item,time\n3,4,1700000000\n"


def _made(name: str, options: dict[str, Any]) -> Any:
    """Return a record of options of `evenrank.preprocess`."""
    import evenrank.preprocess

    return getattr(evenrank.preprocess, name)(**options)


def _log(**options: Any) -> Any:
    columns = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    return _made("TabularConfig", {"events": (_FILE,), **columns, **options})


def _config(**options: Any) -> Any:
    return _made("PreprocessConfig", {"dataset": "synthetic", "out": "out", **options})


def _custom(**options: Any) -> Any:
    return _config(dataset="custom", **options)


def _filters(**options: Any) -> Any:
    return _made("Filters", options)


def _synthetic(**options: Any) -> Any:
    return _made("SyntheticConfig", {"num_users": 5, **options})


def _drift(**options: Any) -> Any:
    return _made("Drift", options)


def _drawn(name: str, **options: int) -> Any:
    from evenrank.datasets import distributions

    return getattr(distributions, name)(**options)


def _run(scene: Scene, **options: Any) -> Any:
    """Preprocess synthetic data of 5 users, or a log that is given as text."""
    from evenrank.preprocess import preprocess

    given: dict[str, Any] = {"out": scene.folder / "out", **options}
    if text := given.pop("log", None):
        log = _log(events=(scene.file("log.csv", text),))
        return preprocess(_custom(**{"custom": log, "split": "none", **given}))
    return preprocess(_config(**{"synthetic": _synthetic(), **given}))


def _append(scene: Scene, first: dict[str, Any], options: dict[str, Any]) -> Any:
    first = {"ids": "dense", **first}
    _run(scene, log=_TEXT, **first)
    return _run(scene, **{"log": _LATER, "append": True, **first, **options})


def _damaged(scene: Scene, change: Callable[[Path], object]) -> Any:
    """Preprocess with a vocabulary that is not as it was."""
    _run(scene, log=_TEXT, ids="dense", out=scene.folder / "old")
    change(scene.folder / "old" / "vocabulary_item_id.parquet")
    return _run(scene, log=_TEXT, vocabulary=scene.folder / "old")


def _add_one(path: Path) -> None:
    import polars as pl

    pl.read_parquet(path).with_columns(pl.col("value") + 1).write_parquet(path)


def _other_kind(scene: Scene, user: str) -> Any:
    _run(scene, log=f"user,item,time\n{user},1,1600000000\n", ids="dense", out=scene.folder / "old")
    return _run(scene, vocabulary=scene.folder / "old")


def _rows(make: Callable[..., Any], table: list[tuple[dict[str, Any], str]]) -> list[Row]:
    """Return rows of options that are refused."""
    return [Row(lambda scene, given=given: make(**given), ConfigError, line) for given, line in table]  # type: ignore[misc]


def _texts(make: Callable[..., Any], option: str, texts: str, line: str) -> list[Row]:
    """Return rows of texts, divided by blanks, that an option cannot have; their line has the text."""
    return _rows(make, [({option: text}, line.replace("TEXT", repr(text))) for text in texts.split()])


_ONE_ACTION = partial(_log, action_columns=("a",))
_OF_USERS = partial(_log, context=_FILE)
_OF_ITEMS = partial(_log, item_features=_FILE)
_AGAIN = "; append with the same options"
_AT_ONCE = "; preprocess all of the log at once"
_SPLITS = "user user:-0.1 user:nan leave-last:0 leave-last:x time: nobody file: time:tomorrow time:1969 time:0000 "
_SPLITS += "time:2015-13 time:20151301 time:-1 time:1e9 time:253402300800000000000 time:last: time:last:0d time:last:7m"
_IDS = "sparse item= dense,keep item=dense,item=keep dense,item=keep action=keep hash:0 hash:-1 hash:1e3 hash:² "
_IDS += "item=dense, user:keep hash:4611686018427387905"
_EXPANSIONS = "ml-20m ml-20m:1x2 ml-20m:2x2:0.0 ml-20m:2x2:2 kuairand-1k:2x2 :2x2"

ROWS = [
    *_rows(
        _log,
        [
            ({"events": ()}, "TabularConfig: events must be at least one file, got ()"),
            ({"timestamp_unit": "h"}, "TabularConfig: timestamp_unit must be one of auto, s, ms, us, ..., got 'h'"),
            ({"timestamp_unit": "row"}, "give either timestamp_column or timestamp_unit 'row', ..."),
            ({"timestamp_column": ""}, "give either timestamp_column or timestamp_unit 'row', ..."),
            ({"action_columns": (*map(str, range(32)),)}, "...action_columns must be at most 31 columns, got ..."),
            ({"item_column": "user"}, "column 'user' is given twice; use each column for one purpose"),
            ({"action_map": "stars"}, "...action_map='stars' applies to action_columns=COLUMN, not to ..."),
            ({"event_columns": ("n:text",)}, "column 'n:text' must be NAME or NAME:TYPE, ... int, float, float?"),
            ({"event_columns": ("n=16777216",)}, "column ... has the fill '16777216', no float below 2^24; ..."),
            ({"event_columns": ("n:int=x",)}, "column ... has the fill 'x', no int below 2^63; give another, ..."),
            ({"event_columns": ("n:int?",)}, "column 'n:int?' has no integer ...; declare n:float?, or ..."),
            ({"label": "n:float?=drop"}, "column 'n:float?=drop' has missing values and something in their place; ..."),
            (
                {"weight": "w:float?"},
                "...weight must be ... without missing values: give =FILL or =drop, got 'w:float?'",
            ),
            ({"event_columns": ("action",)}, "...'action'..."),
            ({"item_columns": ("a",)}, "...item_columns=('a',) has no effect without item_features; ..."),
        ],
    ),
    *_texts(_ONE_ACTION, "action_map", "halves bins:2,1 bins: values:a,a", "...invalid action_map TEXT; ..."),
    *_rows(
        _OF_USERS,
        [
            ({"context_columns": ("length:float",)}, "no feature can be called 'length'..."),
            ({"context_columns": ("a:float=3",)}, "column 'a:float=3' must be NAME ... a type of id, list, float"),
            ({"context_columns": ("a", "a:float")}, "column 'a' is given twice; ..."),
            ({}, "...context=... has no effect without context_columns; ..."),
        ],
    ),
    *_rows(
        _OF_ITEMS,
        [
            ({"item_columns": ("b", "c:list")}, "item_columns has 'c:list', no column of events; ..."),
            ({"item_columns": ("p",), "event_columns": ("P",)}, "the names ... differ at most by case..."),
        ],
    ),
    *_rows(
        _config,
        [
            ({"seed": -1}, "PreprocessConfig: seed must be at least 0 and below 2^62, got -1"),
            ({"on_error": "warn"}, "PreprocessConfig: on_error must be one of fail, skip, got 'warn'"),
            ({"out": "out\udcff"}, "the name of the folder out... is not UTF-8; choose another name"),
            ({"split": ""}, "...invalid split ''; expected ..."),
            ({"dataset": "ml-1m", "raw_dir": Path("s3://b")}, "raw_dir s3://b is a URL; choose a folder ..."),
        ],
    ),
    *_rows(
        _custom,
        [
            ({"rejects": True}, "...rejects=True applies to on_error='skip', not to on_error='fail'..."),
            ({"append": True, "vocabulary": _FILE}, "...append=True applies to vocabulary=None, ..."),
            ({"vocabulary": _FILE, "unknown": "keep"}, "...invalid unknown 'keep'; expected append, ..."),
        ],
    ),
    *_texts(
        _config,
        "split",
        _SPLITS,
        "...invalid split TEXT; expected user:FRACTION ... or none",
    ),
    *_texts(
        _config,
        "ids",
        _IDS,
        "...invalid ids TEXT; expected auto, dense, keep or hash:N ...",
    ),
    *_texts(_config, "expand", _EXPANSIONS, "...TEXT is no expansion of MovieLens; write it like ml-20m:16x32, ..."),
    *_rows(
        _filters,
        [
            ({"min_length": 0}, "Filters: min_length must be at least 1 and at most 2147483647, got 0"),
            ({"min_length": 5, "max_length": 4}, "max_length must be at least min_length, got max_length=4 ..."),
            ({"stride": 4}, "Filters: stride=4 has no effect without window; give both, or leave it out"),
            ({"window": 4, "stride": 5}, "stride must be at most window (4), or events are lost; got 5"),
        ],
    ),
    *_rows(
        _drift,
        [
            ({"categories": 0}, "Drift: categories must be at least 1 and at most 100000000, got 0"),
            ({"days": 0}, "Drift: days must be at least 0.01 and at most 1000000.0, got 0"),
            ({"share": 1.5}, "Drift: share must be at least 0 and at most 1, got 1.5"),
            ({"new_items": float("nan")}, "Drift: new_items must be at least 0 and at most 0.9, got nan"),
        ],
    ),
    *(
        Row(call, ConfigError, line)
        for call, line in (
            (lambda scene: _synthetic(num_users=0), "SyntheticConfig: num_users must be ..., got 0"),
            (
                lambda scene: _synthetic(contextual={"length": _drawn("Uniform")}),
                "no feature can be called 'length'...",
            ),
            (
                lambda scene: _run(scene, synthetic=_synthetic(lengths=_drawn("Uniform", low=2**62, high=2**62))),
                "users 1 to 5 have 23,058,430,092,136,939,520 events, more than 1,073,741,824; choose shorter lengths",
            ),
            (
                lambda scene: _synthetic(items=_drawn("Uniform"), drift=_drift()),
                "drift needs Zipf-distributed items, 20 (one per category) to 100,000,000 of them, got ...",
            ),
            (
                lambda scene: _synthetic(items=_drawn("Zipf", high=19), drift=_drift()),
                "drift needs Zipf-distributed ...",
            ),
            (
                lambda scene: _synthetic(contextual={"category": _drawn("Uniform")}, drift=_drift()),
                "the names 'category' and 'category' differ at most by case...",
            ),
            (
                lambda scene: _run(scene, log=_TEXT, out=scene.folder, overwrite=True),
                "<folder>/log.csv is read, and would be replaced with <folder>; choose another output folder",
            ),
            (
                lambda scene: _run(scene, log=_TEXT, split=f"file:{scene.file('out/u.txt', '1')}", overwrite=True),
                "<folder>/out/u.txt is read, and would be replaced with <folder>/out; choose another output folder",
            ),
            (lambda scene: _other_kind(scene, "u"), "user_id is int64 in synthetic and text in <folder>/old; ..."),
            (lambda scene: _other_kind(scene, str(2**63)), "user_id is int64 in synthetic and uint64 in ..."),
        )
    ),
    *(
        Row(lambda scene, first=first, given=given: _append(scene, first, given), ConfigError, line)  # type: ignore[misc]
        for first, given, line in (
            ({}, {"split": "user:0.5"}, f"split is 'user:0.5', and was 'none' when <folder>/out was made{_AGAIN}"),
            (
                {},
                {"ids": "keep"},
                "the rule of user_id is keep, and the ids of ... are dense; ...",
            ),
            (
                {"ids": "keep"},
                {"ids": ""},
                "the rule of user_id is auto, and the ids of ... are keep; ...",
            ),
            ({"ids": "item=hash:9"}, {}, f"events cannot be appended: item_id has ids that are hashes{_AT_ONCE}"),
        )
    ),
    *(
        Row(call, DataError, line)
        for call, line in (
            (lambda scene: _run(scene, out="/", overwrite=True), "/ is no folder; choose another output folder"),
            (
                lambda scene: _run(scene, out=scene.file("out", "precious"), overwrite=True),
                "<folder>/out is a file or a mount point; choose another output folder",
            ),
            (
                lambda scene: _append(scene, {}, {"out": scene.folder / "none"}),
                "<folder>/none is not a dataset: no such folder...",
            ),
            (
                lambda scene: _damaged(scene, lambda path: path.unlink()),
                "<folder>/old/vocabulary_item_id.parquet cannot be read (...); preprocess that dataset again",
            ),
            (
                lambda scene: _damaged(scene, _add_one),
                "<folder>/old/vocabulary_item_id.parquet does not match its manifest; preprocess it again",
            ),
        )
    ),
    Row(
        lambda scene: _append(scene, {}, {"filters": _filters(min_length=2)}),
        ConfigError,
        f"events cannot be appended: min_length left out events that may count by now{_AT_ONCE}",
    ),
]
