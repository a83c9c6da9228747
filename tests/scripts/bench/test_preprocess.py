import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from preprocess_logs import make_log

from preprocess_variants import QUERIES, VARIANTS

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench" / "preprocess.py"


@pytest.mark.processes
@pytest.mark.parametrize("shape", QUERIES)
def test_all_variants_write_the_same_events_in_order_of_time(shape: str, tmp_path: Path) -> None:
    files = [str(path) for path in make_log(shape, tmp_path / "log", 0.005)]
    query, tables = QUERIES[shape], {}
    for name in ("polars", "duckdb"):
        VARIANTS[name](shape, 2, str(tmp_path / "log"), str(tmp_path / name), files)
        tables[name] = pl.read_parquet(tmp_path / f"{name}.parquet").sort(query.user)
        assert tables[name][query.time].list.eval(pl.element().diff().min() >= 0).list.all().all()
    lists = tables["polars"].columns[1:]
    events = {name: table.explode(lists).sort(query.user, query.time, *lists) for name, table in tables.items()}
    assert events["polars"].equals(events["duckdb"])
    assert 4900 < len(events["polars"]) <= 5000
    command = [str(SCRIPT.with_name("preprocess_variants.py")), "evenrank", shape, "2", str(tmp_path / "log")]
    subprocess.run([sys.executable, "-P", *command, str(tmp_path / "ours"), *files], check=True)  # it ends its process
    ours = pl.read_parquet([*(tmp_path / "ours").glob("*/*.parquet")])
    times = ours["timestamp_ms"].explode().sort() // (1000 if shape == "ml-20m" else 1)
    assert times.to_list() == events["polars"][query.time].sort().to_list()


def measure(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--dir", str(tmp_path), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_rows_have_ratios_to_what_ran_on_as_many_cores(tmp_path: Path) -> None:
    cores = sorted({1, len(os.sched_getaffinity(0))})
    options = ("--millions", "0.01", "--runs", "1", "--cores", ",".join(map(str, cores)))
    done = measure(tmp_path, *options, "--variants", "polars,duckdb")
    assert done.returncode == 0, done.stderr
    machine, *rows = map(json.loads, done.stdout.splitlines())
    assert machine["polars"] == pl.__version__
    found: dict[tuple[str, int], dict[str, Any]] = {(row["variant"], row["cores"]): row for row in rows}
    assert [*found] == [(name, count) for name in ("polars", "duckdb") for count in cores]
    for count in cores:
        polars, duckdb = found["polars", count], found["duckdb", count]
        assert polars["x_duckdb"] == pytest.approx(polars["seconds"] / duckdb["seconds"], abs=0.05)
        assert duckdb["mib_x_polars"] == pytest.approx(duckdb["peak_mib"] / polars["peak_mib"], abs=0.05)
        assert ("x_fewest_cores" in duckdb) == (count > 1)


@pytest.mark.parametrize(
    ("option", "fault"),
    [
        (("--variants", "duckdb,sqlite"), "got 'sqlite'"),
        (("--cores", "0"), "argument --cores"),
        (("--cores", "9999"), "--cores must be at most"),
        (("--millions", "-1"), "argument --millions"),
        (("--runs", "0"), "--runs at least 1"),
    ],
)
def test_options_that_cannot_be_are_named(option: tuple[str, str], fault: str, tmp_path: Path) -> None:
    done = measure(tmp_path, *option)
    assert done.returncode == 2
    assert fault in done.stderr.splitlines()[-1]
