"""Mistakes in Python alone; those in options and files are runs of tests/preprocess/golden/*.toml with an error."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evenrank.core.errors import ConfigError, DataError
from tests.errors.scene import Row, Scene


def _drawn(distribution: str = "Zipf", *, items: int = 0, **options: Any) -> Any:
    """Return options of synthetic data with a distribution of the lengths, or of the items if there are so many."""
    from evenrank.datasets import distributions
    from evenrank.preprocess import SyntheticConfig

    limits = {"high": items} if items else {"low": 2**62, "high": 2**62}
    made = getattr(distributions, distribution)(**limits)
    return SyntheticConfig(**{"num_users": 5, "items" if items else "lengths": made, **options})


def _drift(**options: Any) -> Any:
    from evenrank.preprocess import Drift

    return Drift(**options)


def _run(scene: Scene, **options: Any) -> Any:
    from evenrank.preprocess import PreprocessConfig, preprocess

    return preprocess(PreprocessConfig(**{"dataset": "synthetic", "out": scene.folder / "out", **options}))


def _log(path: Path) -> dict[str, Any]:
    from evenrank.preprocess import TabularConfig
    from tests.preprocess.decoded import NAMES

    return {"dataset": "custom", "split": "none", "custom": TabularConfig(events=(path,), **NAMES)}


def _with_vocabulary(scene: Scene, change: Callable[[Path], object]) -> Any:
    """Preprocess a log with its vocabulary, which is changed before."""
    log = _log(scene.file("log.csv", "user,item,time\n1,2,1600000000\n"))
    _run(scene, ids="dense", **{**log, "out": scene.folder / "old"})
    change(scene.folder / "old" / "vocabulary_item_id.parquet")
    return _run(scene, vocabulary=scene.folder / "old", **log)


def _add_one(path: Path) -> None:
    import polars as pl

    pl.read_parquet(path).with_columns(pl.col("value") + 1).write_parquet(path)


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _loop(path: Path) -> Path:
    path.symlink_to(path)
    return path


_CONFIG: list[tuple[Callable[[Scene], Any], str]] = [
    (lambda s: _run(s, out="out\udcff"), "the name of the folder out... is not UTF-8; choose another name"),
    (lambda s: _drift(categories=0), "Drift: categories must be at least 1 and at most 100000000, got 0"),
    (lambda s: _drift(days=0), "Drift: days must be at least 0.01 and at most 1000000.0, got 0"),
    (lambda s: _drift(share=1.5), "Drift: share must be at least 0 and at most 1, got 1.5"),
    (lambda s: _drift(new_items=float("nan")), "Drift: new_items must be at least 0 and at most 0.9, got nan"),
    (lambda s: _drawn(items=9, num_users=0), "SyntheticConfig: num_users must be at least 1 and at most ..., got 0"),
    (lambda s: _drawn(items=9, contextual={"length": None}), "no feature can be called 'length'..."),
    (lambda s: _drawn("Uniform", items=99, drift=_drift()), "drift needs Zipf-distributed items, 20 ..., got ..."),
    (lambda s: _drawn(items=19, drift=_drift()), "drift needs Zipf-distributed items, 20 ..., got ..."),
    (
        lambda s: _drawn(items=99, contextual={"category": None}, drift=_drift()),
        "the names 'category' and 'category' differ at most by case...",
    ),
    (lambda s: _run(s, dataset="custom"), "dataset 'custom' has no description; set `custom` to ..."),
    (
        lambda s: _run(s, synthetic=_drawn("Uniform")),
        "users 1 to 5 have 23,058,... events, more than 1,073,741,824; ...",
    ),
]
_DATA: list[tuple[Callable[[Scene], Any], str]] = [
    (lambda s: _with_vocabulary(s, Path.unlink), "<folder>/old/... cannot be read (...); preprocess that ..."),
    (lambda s: _with_vocabulary(s, _add_one), "<folder>/old/vocabulary_item_id.parquet does not match its ..."),
    (lambda s: _run(s, out=_loop(s.folder / "l"), overwrite=True), "<folder>/l is a loop of links; choose another ..."),
    (
        lambda s: _run(s, out=_loop(s.folder / "l") / "out"),
        "<folder>/l/out could not be written: ...; it is un...",
    ),
    (lambda s: _run(s, split=f"file:{_loop(s.folder / 'l')}"), "<folder>/l cannot be read: Too many levels of ..."),
    # Not waited for until somebody writes into it.
    (lambda s: _run(s, **_log(_pipe(s.folder / "pipe"))), "<folder>/pipe is a named pipe, not a regular file..."),
]

ROWS = [
    *(Row(call, ConfigError, line) for call, line in _CONFIG),
    *(Row(call, DataError, line) for call, line in _DATA),
]
