"""What `preprocess.py` runs, each in a process of its own, which imports only what it needs.

    python scripts/bench/preprocess_variants.py VARIANT SHAPE CORES FOLDER OUT

VARIANT is `draw`, which writes a log of OUT million rows to FOLDER, `evenrank`, `polars` or `duckdb`.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

FLAGS = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view", "is_profile_enter")
DAYS = ("4_08_to_4_21", "4_22_to_5_08")  # of the files of KuaiRand


class Query(NamedTuple):
    """What is asked of a log."""

    files: tuple[str, ...]
    user: str
    time: str
    columns: tuple[str, ...]  # of each event, besides its action and time
    action: str  # an expression of SQL


QUERIES = {
    "ml-20m": Query(("ml-20m/ratings.csv",), "userId", "timestamp", ("movieId",), "rating"),
    "kuairand-1k": Query(
        tuple(f"KuaiRand-1K/data/log_standard_{days}_1k.csv" for days in DAYS),
        "user_id",
        "time_ms",
        ("video_id", "play_time_ms", "duration_ms"),
        " + ".join(f"{name} * {1 << bit}" for bit, name in enumerate(FLAGS)),
    ),
}


def draw(shape: str, cores: int, folder: Path, millions: str) -> None:
    """Write a log of the columns and the shape of a public one: lognormal users, or 1,000."""
    import numpy as np
    import polars as pl

    query, rng, total = QUERIES[shape], np.random.default_rng(0), round(1e6 * float(millions))
    files = [folder / file for file in query.files]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    if shape == "ml-20m":
        lengths = rng.lognormal(np.log(82), 1.05, round(6924.65 * float(millions))).clip(20, 12_000)
        counts = np.maximum(1, (lengths * total / lengths.sum()).astype(np.int64))
        total = int(counts.sum())
        events = {
            "userId": np.repeat(np.arange(1, 1 + len(counts)), counts),
            "movieId": rng.integers(1, 131_263, total),
            "rating": rng.integers(1, 11, total) / 2,
            "timestamp": rng.integers(789_652_009, 1_427_784_002, total),
        }
        pl.DataFrame(events).write_csv(files[0])
        return
    names = ["user_active_degree", *(f"{name}_user_num_range" for name in ("follow", "fans", "friend"))]
    users = {"user_id": np.arange(1000), **{name: ["high"] * 1000 for name in names}}
    users |= {"register_days_range": ["61-90"] * 1000}
    pl.DataFrame(users).write_csv(files[0].with_name("user_features_1k.csv"))
    zeros = ("profile_stay_time", "comment_stay_time", "is_rand", "tab")
    for number, file in enumerate(files):
        days, count = np.sort(rng.integers(0, 14, total // 2)) + 14 * number, total // 2
        events = {
            "user_id": rng.integers(0, 1000, count),
            "video_id": rng.integers(0, 4_371_900, count),
            "date": 20_220_408 + days,
            "hourmin": rng.integers(0, 24, count) * 100,
            "time_ms": 1_649_347_200_000 + days * 86_400_000 + rng.integers(0, 86_400_000, count),
            **{name: (rng.random(count) < 0.3).astype(np.int64) for name in FLAGS},
            "play_time_ms": rng.integers(0, 60_000, count),
            "duration_ms": rng.integers(3_000, 120_000, count),
            **{name: np.zeros(count, dtype=np.int64) for name in zeros},
        }
        pl.DataFrame(events).write_csv(file)


def evenrank(shape: str, cores: int, folder: Path, out: str) -> None:
    """Do the whole job by the command: checks of every row, ids, split, audit, checksums, manifest."""
    from evenrank.cli.main import run_command
    from evenrank.cli.preprocess import preprocess_command

    sys.argv[1:] = ["--dataset", shape, "--raw-dir", str(folder), "--out", out]
    run_command(preprocess_command)


def polars(shape: str, cores: int, folder: Path, out: str) -> None:
    """Read, group by user, sort by time and write, without any checks; no ids are numbered."""
    import polars as pl

    query = QUERIES[shape]
    events = pl.scan_csv([folder / file for file in query.files]).with_columns(
        pl.sql_expr(f"{query.action} AS action")
    )
    columns = pl.col(*query.columns, "action", query.time).sort_by(query.time)
    events.group_by(query.user).agg(columns).collect().write_parquet(f"{out}.parquet")


def duckdb(shape: str, cores: int, folder: Path, out: str) -> None:
    """Do as `polars`, in SQL; structs are sorted, since DuckDB would sort each column of its own."""
    import duckdb as database

    query = QUERIES[shape]
    columns, files = (*query.columns, "action", query.time), [str(folder / file) for file in query.files]
    event = ", ".join(f"'{name}': {name}" for name in columns)
    lists = ", ".join(f"[event.{name} FOR event IN events] AS {name}" for name in columns)
    database.execute(f"SET threads = {cores}; SET preserve_insertion_order = false; SET temp_directory = '{out}.spill'")
    database.execute(f"""
        COPY (
            SELECT {query.user}, {lists} FROM (
                SELECT {query.user}, list({{{event}}} ORDER BY {query.time}) AS events
                FROM (SELECT *, {query.action} AS action FROM read_csv({files}))
                GROUP BY {query.user}
            )
        ) TO '{out}.parquet' (FORMAT parquet)
    """)


VARIANTS: dict[str, Callable[[str, int, Path, str], None]] = {
    function.__name__: function for function in (draw, evenrank, polars, duckdb)
}

if __name__ == "__main__":
    variant, shape, cores, folder, out = sys.argv[1:]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])  # before anything counts them
    VARIANTS[variant](shape, int(cores), Path(folder), out)
