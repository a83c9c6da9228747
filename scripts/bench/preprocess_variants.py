"""What `preprocess.py` runs, each in a process of its own, which imports only what it needs.

    python scripts/bench/preprocess_variants.py VARIANT CORES FOLDER OUT

VARIANT is `draw`, which writes a log of OUT million rows to FOLDER, `evenrank`, `polars` or `duckdb`.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path


def log_of(folder: Path) -> Path:
    """Return the file of the log."""
    return folder / "ml-20m" / "ratings.csv"


def draw(cores: int, folder: Path, out: str) -> None:
    """Write the log: 6,925 users per million rows, with lognormal histories."""
    import numpy as np
    import polars as pl

    rng, millions = np.random.default_rng(0), float(out)
    lengths = rng.lognormal(np.log(82), 1.05, round(6924.65 * millions)).clip(20, 12_000)
    counts = np.maximum(1, (lengths * 1e6 * millions / lengths.sum()).astype(np.int64))
    ratings = {
        "userId": np.repeat(np.arange(1, 1 + len(counts)), counts),
        "movieId": rng.integers(1, 131_263, counts.sum()),
        "rating": rng.integers(1, 11, counts.sum()) / 2,
        "timestamp": rng.integers(789_652_009, 1_427_784_002, counts.sum()),
    }
    log_of(folder).parent.mkdir(parents=True, exist_ok=True)
    pl.DataFrame(ratings).write_csv(log_of(folder))


def evenrank(cores: int, folder: Path, out: str) -> None:
    """Do the whole job by the command: checks of every row, ids, split, audit, checksums, manifest."""
    from evenrank.cli.main import run_command
    from evenrank.cli.preprocess import preprocess_command

    sys.argv[1:] = ["--dataset", "ml-20m", "--raw-dir", str(folder), "--out", out]
    run_command(preprocess_command)


def polars(cores: int, folder: Path, out: str) -> None:
    """Read, group by user, sort by time and write, without any checks; no ids are numbered."""
    import polars as pl

    columns = pl.col("movieId", "rating", "timestamp").sort_by("timestamp")
    pl.scan_csv(log_of(folder)).group_by("userId").agg(columns).collect().write_parquet(f"{out}.parquet")


def duckdb(cores: int, folder: Path, out: str) -> None:
    """Do as `polars`, in SQL; structs are sorted, since DuckDB would sort each column of its own."""
    import duckdb as database

    database.execute(f"SET threads = {cores}; SET preserve_insertion_order = false; SET temp_directory = '{out}.spill'")
    columns = ("movieId", "rating", "timestamp")
    event = ", ".join(f"'{name}': {name}" for name in columns)
    lists = ", ".join(f"[event.{name} FOR event IN events] AS {name}" for name in columns)
    events = f"list({{{event}}} ORDER BY timestamp) AS events"
    users = f"SELECT userId, {events} FROM read_csv('{log_of(folder)}') GROUP BY userId"
    database.execute(f"COPY (SELECT userId, {lists} FROM ({users})) TO '{out}.parquet' (FORMAT parquet)")


VARIANTS: dict[str, Callable[[int, Path, str], None]] = {
    function.__name__: function for function in (draw, evenrank, polars, duckdb)
}

if __name__ == "__main__":
    variant, cores, folder, out = sys.argv[1:]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])  # before anything counts them
    VARIANTS[variant](int(cores), Path(folder), out)
