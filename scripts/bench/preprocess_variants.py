"""What `preprocess.py` compares: evenrank, and the same query in Polars and in DuckDB.

    python scripts/bench/preprocess_variants.py VARIANT SHAPE CORES FOLDER OUT FILE...

Each run is a process of its own, which imports only what its variant needs.
"""

import os
import sys
from typing import NamedTuple

FLAGS = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view")


class Query(NamedTuple):
    """What is asked of a log."""

    user: str
    time: str
    columns: tuple[str, ...]  # of each event, besides its action and time
    action: str  # an expression of SQL


def _bits(*flags: str) -> str:
    return " + ".join(f"{name} * {1 << bit}" for bit, name in enumerate(flags))


_KUAIRAND = Query("user_id", "time_ms", ("video_id", "play_time_ms", "duration_ms"), _bits(*FLAGS))
QUERIES = {
    "ml-20m": Query("userId", "timestamp", ("movieId",), "rating"),
    "kuairand-1k": _KUAIRAND._replace(action=_bits(*FLAGS, "is_profile_enter")),
    "kuairand": _KUAIRAND,
}


def evenrank(shape: str, cores: int, folder: str, out: str, files: list[str], *, engine: str = "local") -> None:
    """Do the whole job by the command: checks of every row, ids, split, audit, checksums, manifest."""
    from evenrank.cli.main import run_command
    from evenrank.cli.preprocess import preprocess_command

    log = ["--dataset", shape, "--raw-dir", folder]
    if shape == "kuairand":
        log = ["--dataset", "custom", *(f"--events={file}" for file in files), "--ids", "dense"]
        log += ["--user-column", "user_id", "--item-column", "video_id", "--timestamp-column", "time_ms"]
        log += ["--action-columns", ",".join(FLAGS), "--event-columns", "play_time_ms:int=0,duration_ms:int=0"]
    sys.argv[1:] = [*log, "--out", out, "--engine", engine]
    run_command(preprocess_command)


def ray(shape: str, cores: int, folder: str, out: str, files: list[str]) -> None:
    """Do the whole job on a cluster of this machine, which is started and ended."""
    evenrank(shape, cores, folder, out, files, engine="ray")


def polars(shape: str, cores: int, folder: str, out: str, files: list[str]) -> None:
    """Read, group by user, sort by time and write, without any checks; no ids are numbered."""
    import polars as pl

    query = QUERIES[shape]
    events = pl.scan_csv(files).with_columns(pl.sql_expr(f"{query.action} AS action"))
    columns = pl.col(*query.columns, "action", query.time).sort_by(query.time)
    events.group_by(query.user).agg(columns).collect().write_parquet(f"{out}.parquet")


def duckdb(shape: str, cores: int, folder: str, out: str, files: list[str]) -> None:
    """Do as `polars`, in SQL; structs are sorted, since DuckDB would sort each column of its own."""
    import duckdb as database

    query = QUERIES[shape]
    columns = *query.columns, "action", query.time
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


VARIANTS = {function.__name__: function for function in (evenrank, ray, polars, duckdb)}

if __name__ == "__main__":
    variant, shape, cores, folder, out, *files = sys.argv[1:]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])  # before anything counts them
    VARIANTS[variant](shape, int(cores), folder, out, files)
