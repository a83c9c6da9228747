"""Benchmark preprocessing next to the bare query in Polars and in DuckDB, over rows, cores and engines.

    .venv/bin/python scripts/bench/preprocess.py [--shape ml-20m|kuairand-1k|kuairand] [--millions 20,100]
        [--cores 1,16] [--variants evenrank,ray,polars,duckdb] [--runs 3] [--dir DIR]

Shapes, and how many million rows they have unless other numbers are asked for:

    ml-20m         20, of MovieLens-20M: 4 columns, 6,925 users per million, lognormal histories, one CSV file
    kuairand-1k    11.7, of KuaiRand-1K: 19 columns, 1,000 users, 2 CSV files
    kuairand       10, of the same columns: 2,000 users per million, 4.4 million items, a CSV file per 5 million rows,
                   dense ids

`preprocess_variants.py` has what is compared. Logs are drawn on all cores and kept in DIR: 100 million rows are 2.7 GB
of ml-20m and 8 GB of kuairand. Each run is a process of its own on the first of the cores; numbers of cores and
variants take turns, after a run of evenrank on a small log, which compiles. Prints a JSON line about the machine, then
one for each variant, number of rows and number of cores:

    seconds, least_seconds       median and least of the runs, from the start of Python to its end
    peak_mib                     the most memory of all processes together, median; shared pages count once. That of
                                 several processes is sampled
    x_polars, x_duckdb, x_local  time relative to that of these on as many cores, and for ray to that of threads
    mib_x_...                    the same of memory
    x_fewest_cores               time relative to that on the fewest cores
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from preprocess_logs import make_log, num_cores
from preprocess_variants import QUERIES, VARIANTS

MILLIONS = {"ml-20m": 20.0, "kuairand-1k": 11.7, "kuairand": 10.0}
RATIOS = {"polars": "polars", "duckdb": "duckdb", "evenrank": "local"}  # what those to a variant are called
SMALL = 0.05  # million rows
SECONDS_PER_SAMPLE = 0.2


def run(variant: str, shape: str, cores: int, folder: Path, files: Sequence[Path]) -> tuple[float, float]:
    """Run a variant in its own process; return its wall-clock seconds, from the start of Python on, and its peak MiB.

    That of several processes together is sampled.
    """
    (folder / "out").mkdir(exist_ok=True)
    arguments = [variant, shape, str(cores), str(folder), str(folder / "out" / variant), *map(str, files)]
    start, peak_kib, has_ended = time.perf_counter(), 0, threading.Event()
    script = Path(__file__).with_name("preprocess_variants.py")
    process = subprocess.Popen([sys.executable, "-P", str(script), *arguments], stdout=subprocess.DEVNULL)

    def sample() -> None:
        nonlocal peak_kib
        while not has_ended.wait(SECONDS_PER_SAMPLE):
            if len(tree := tree_of(process.pid)) > 1:
                peak_kib = max(peak_kib, sum(map(kib_of, tree)))

    sampler = threading.Thread(target=sample)
    sampler.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    has_ended.set()
    sampler.join()
    if status:
        code = os.waitstatus_to_exitcode(status)
        sys.exit(f"preprocess.py: {variant} exited with code {code}; see its error message above")
    return seconds, max(peak_kib, usage.ru_maxrss) / 1024


def tree_of(root: int) -> list[int]:
    """Return the ids of a process and of all that it and its children have started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = path.read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(path.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, ())
    return found


def kib_of(pid: int) -> int:
    """Return the memory of a process, to which a page that others share counts in part."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return 0


def compare(
    shape: str, millions: float, variants: Sequence[str], all_cores: Sequence[int], num_runs: int, folder: Path
) -> list[dict[str, Any]]:
    """Run all variants on one log on all numbers of cores, in turns; return a row for each."""
    folder = folder / shape / f"{millions:g}"
    files = make_log(shape, folder, millions)
    keys = [*itertools.product(variants, all_cores)]
    runs = [[run(variant, shape, cores, folder, files) for variant, cores in keys] for _ in range(num_runs)]
    seconds, mib = ({key: [one[n][part] for one in runs] for n, key in enumerate(keys)} for part in (0, 1))
    shutil.rmtree(folder / "out")
    log = {"shape": shape, "million_rows": millions}
    return [log | summarize(key, millions, seconds, mib, min(all_cores)) for key in keys]


def summarize(
    key: tuple[str, int],
    millions: float,
    seconds: Mapping[tuple[str, int], Sequence[float]],
    mib: Mapping[tuple[str, int], Sequence[float]],
    fewest: int,
) -> dict[str, Any]:
    """Return the numbers of a variant on a number of cores, given the runs of all variants on all numbers of cores."""
    variant, cores = key
    time_of, mib_of = ({at: statistics.median(of) for at, of in runs.items()} for runs in (seconds, mib))
    row = {"variant": variant, "cores": cores, "runs": len(seconds[key]), "seconds": round(time_of[key], 2)}
    row |= {"least_seconds": round(min(seconds[key]), 2), "peak_mib": round(mib_of[key])}
    row["million_rows_per_second"] = round(millions / time_of[key], 2)
    for other, name in RATIOS.items():
        if other != variant and (other, cores) in time_of:
            row[f"x_{name}"] = round(time_of[key] / time_of[other, cores], 2)
            row[f"mib_x_{name}"] = round(mib_of[key] / mib_of[other, cores], 2)
    if cores != fewest:
        row["x_fewest_cores"] = round(time_of[key] / time_of[variant, fewest], 3)
    return row


def describe_machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    versions = {}
    for package in ("polars", "duckdb", "pyarrow", "numba", "ray"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    machine = {"processor": model and model[1], "cores": num_cores(), "gib": round(memory / 2**30)}
    return {"date": time.strftime("%Y-%m-%d"), **machine, "python": platform.python_version(), **versions}


def main() -> None:
    """Run all variants on logs of all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=QUERIES, default="ml-20m")
    parser.add_argument("--millions", type=numbers_of(float), metavar="N,...", help="rows of each log")
    parser.add_argument("--cores", type=numbers_of(int), metavar="N,...", help="default: all")
    parser.add_argument("--variants", default="evenrank,polars,duckdb", metavar="NAME,...", help="also: ray")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path("out/bench/preprocess"))
    options = parser.parse_args()
    variants, all_cores = options.variants.split(","), options.cores or [num_cores()]
    if unknown := [name for name in variants if name not in VARIANTS]:
        parser.error(f"--variants must be of {', '.join(VARIANTS)}, got {unknown[0]!r}")
    if missing := [name for name in variants if name in ("duckdb", "ray") and not importlib.util.find_spec(name)]:
        parser.error(f"the package {missing[0]} is not installed; run pip install {missing[0]}, or leave it out")
    if max(all_cores) > num_cores() or options.runs < 1:
        parser.error(f"--cores must be at most {num_cores()}, which there are, and --runs at least 1")
    print(json.dumps(describe_machine()), flush=True)
    folder = options.dir.absolute()
    compare(options.shape, SMALL, variants, [num_cores()], 1, folder)  # compiles, and finds what fails
    for millions in options.millions or [MILLIONS[options.shape]]:
        for row in compare(options.shape, millions, variants, all_cores, options.runs, folder):
            print(json.dumps(row), flush=True)


def numbers_of(kind: type[float]) -> Callable[[str], list[float]]:
    """Return what parses positive numbers that commas separate."""

    def numbers(text: str) -> list[float]:
        found: list[float] = [*map(kind, text.split(","))]
        if not min(found) > 0:
            raise ValueError(text)
        return found

    return numbers


if __name__ == "__main__":
    main()
