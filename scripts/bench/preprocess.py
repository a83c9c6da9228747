"""Benchmark preprocessing next to the bare query in Polars and in DuckDB, over rows and cores.

    .venv/bin/python scripts/bench/preprocess.py [--millions 20,100] [--cores 1,16] [--runs 3] [--dir DIR]
        [--variants evenrank,polars,duckdb]

The log is one CSV file like MovieLens-20M: 4 columns, 6,925 users per million rows, lognormal histories.
`preprocess_variants.py` has what is compared. Logs are drawn once and kept in DIR. Each run is a process of its own on
the first of the cores; numbers of cores and variants take turns, after a run of evenrank that compiles.

    seconds        of each run, from the start of Python to its end
    peak_mib       the most memory of the process, median
    x_polars, ...  time relative to that of these on as many cores, for each run; mib_x_polars: the same of memory
    x_fewest_cores time relative to that on the fewest cores
"""

import argparse
import importlib.util
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from preprocess_variants import VARIANTS, log_of
from report import Row, emit, machine, show

COMPARED = [name for name in VARIANTS if name != "draw"]


def run(variant: str, cores: int, folder: Path, out: str) -> tuple[float, float]:
    """Run a variant in its own process; return its seconds, from the start of Python on, and its peak MiB."""
    script = Path(__file__).with_name("preprocess_variants.py")
    start, arguments = time.perf_counter(), [variant, str(cores), str(folder), out]
    process = subprocess.Popen([sys.executable, "-P", str(script), *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        code = os.waitstatus_to_exitcode(status)
        sys.exit(f"preprocess.py: {variant} exited with code {code}; see its error message above")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def compare(
    millions: float, variants: Sequence[str], all_cores: Sequence[int], num_runs: int, folder: Path
) -> list[Row]:
    """Run all variants on one log on all numbers of cores, in turns; return a row for each."""
    folder = folder / f"{millions:g}"
    if not log_of(folder).exists():
        run("draw", max(all_cores), folder, str(millions))  # the memory of this process would count in others
    out, keys = folder / "out", [*itertools.product(variants, all_cores)]
    out.mkdir(exist_ok=True)
    run("evenrank", max(all_cores), folder, str(out / "evenrank"))  # compiles, and reads files into the page cache
    runs = [[run(variant, cores, folder, str(out / variant)) for variant, cores in keys] for _ in range(num_runs)]
    shutil.rmtree(out)
    found = {key: [one[number] for one in runs] for number, key in enumerate(keys)}
    return [{"million_rows": millions, **summarize(key, millions, found, min(all_cores))} for key in keys]


def summarize(
    key: tuple[str, int], millions: float, runs: Mapping[tuple[str, int], Sequence[tuple[float, float]]], fewest: int
) -> Row:
    """Return the numbers of a variant on a number of cores, given the runs of all variants on all numbers of cores."""

    def ratios(other: tuple[str, int]) -> list[float]:
        return [round(own / of, 3) for (own, _), (of, _) in zip(runs[key], runs[other], strict=True)]

    (variant, cores), seconds = key, [seconds for seconds, _ in runs[key]]
    mib = {name: statistics.median(peak for _, peak in of_name) for name, of_name in runs.items()}
    row: Row = {"variant": variant, "cores": cores, "seconds": [round(each, 3) for each in seconds]}
    row |= {"peak_mib": round(mib[key]), "million_rows_per_s": [round(millions / each, 3) for each in seconds]}
    for other in ("polars", "duckdb"):
        if other != variant and (other, cores) in runs:
            row |= {f"x_{other}": ratios((other, cores)), f"mib_x_{other}": round(mib[key] / mib[other, cores], 2)}
    return row if cores == fewest else row | {"x_fewest_cores": ratios((variant, fewest))}


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    """Run all variants on logs of all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    there = len(os.sched_getaffinity(0))
    parser.add_argument("--millions", type=_numbers, default=[20.0], metavar="N,...", help="rows of each log")
    parser.add_argument("--cores", type=_numbers, default=[there], metavar="N,...", help="default: all")
    parser.add_argument("--variants", default=",".join(COMPARED), metavar="NAME,...", help=f"of {', '.join(COMPARED)}")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path("out/bench/preprocess"))
    options = parser.parse_args()
    variants = options.variants.split(",")
    if unknown := [name for name in variants if name not in COMPARED]:
        parser.error(f"--variants must be of {', '.join(COMPARED)}, got {unknown[0]!r}")
    if "duckdb" in variants and not importlib.util.find_spec("duckdb"):
        parser.error("the package duckdb is not installed; run pip install duckdb, or leave it out")
    all_cores = [int(cores) for cores in options.cores]
    if not 1 <= min(all_cores) <= max(all_cores) <= there or options.runs < 1:
        parser.error(f"--cores must be 1 to {there}, which there are, and --runs at least 1")
    emit(machine())
    rows, folder = list[Row](), options.dir.absolute()
    for millions in options.millions:
        rows += map(emit, compare(millions, variants, all_cores, options.runs, folder))
    show(rows)


if __name__ == "__main__":
    main()
