"""Rows of benchmarks: JSON lines while they are measured, then a table in Markdown and, on request, a plot.

    .venv/bin/python scripts/bench/planner.py | tee planner.jsonl
    .venv/bin/python scripts/bench/report.py planner.jsonl --columns strategy,ranks,ratio,ms
    .venv/bin/python scripts/bench/report.py planner.jsonl --plot ms --by strategy,ranks --into planner.png

Keys are the names of columns and end in their unit. A list holds the values of single rounds, and is shown as their
mean and its standard error.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import evenrank
from evenrank.core import files

Row = dict[str, Any]
_PACKAGES = ("duckdb", "numba", "pandas", "polars", "pyarrow", "ray", "torch", "torchrec", "triton")
_ROOT = Path(__file__).resolve().parents[2]


def machine() -> Row:
    """Return what all figures depend on: date, commit, processor, GPUs, and versions of packages."""
    git = ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = {name: metadata.version(name) for name in _PACKAGES if importlib.util.find_spec(name)}
    row: Row = {"date": time.strftime("%Y-%m-%d"), "evenrank": evenrank.__version__, "commit": commit or None}
    row |= {"processor": processor and processor[1], "cores": len(os.sched_getaffinity(0))}
    row |= {"memory_gib": round(memory / 2**30), "python": platform.python_version(), **found}
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        row |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count(), "cuda": torch.version.cuda}
    return row


def emit(row: Row) -> Row:
    """Print a row as a JSON line, and return it."""
    print(json.dumps(row), flush=True)
    return row


def show(rows: Sequence[Row]) -> None:
    """Print rows as a table, after the JSON lines."""
    print(f"\n{table(rows)}", end="", flush=True)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows to a file of JSON lines, atomically."""
    files.write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def read(paths: Iterable[Path]) -> list[Row]:
    """Return the rows in the output of benchmarks, without those about machines."""
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    return [row for row in rows if "processor" not in row]


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return rows as a table in Markdown: all columns in order of appearance, or those named."""
    chosen = columns or [*dict.fromkeys(key for row in rows for key in row)]
    cells = [[cell(row.get(name)).replace("|", "\\|") for name in chosen] for row in rows]
    sides = ["---" if any(isinstance(row.get(name), str) for row in rows) else "---:" for name in chosen]
    return "".join(f"| {' | '.join(line)} |\n" for line in (chosen, sides, *cells))


def cell(value: Any) -> str:
    """Return a value as text: numbers with three or four digits, rounds as their mean ± its standard error."""
    if value is None:
        return "-"
    if isinstance(value, list):
        mean, noise = fmean(value), stdev(value) / sqrt(len(value)) if len(value) > 1 else 0.0
        return f"{mean:,.{_digits(mean)}f} ± {noise:,.{_digits(mean)}f}"
    if isinstance(value, float):
        return f"{value:,.{_digits(value)}f}"
    return f"{value:,}" if type(value) is int else str(value)


def _digits(value: float) -> int:
    return max(0, 3 - sum(abs(value) >= limit for limit in (10, 100, 1000)))


def plot(rows: Sequence[Mapping[str, Any]], column: str, by: Sequence[str], into: Path) -> None:
    """Draw a column as bars, with the range of the rounds; `by` names what tells rows apart."""
    import matplotlib as mpl  # imported here, because it takes a second
    from matplotlib.figure import Figure

    from evenrank.cli.reports import svg

    drawn = [row for row in rows if row.get(column) is not None]
    rounds = [row[column] if isinstance(row[column], list) else [row[column]] for row in drawn]
    means = [fmean(values) for values in rounds]
    ranges = [[mean - min(values) for mean, values in zip(means, rounds, strict=True)]]
    ranges += [[max(values) - mean for mean, values in zip(means, rounds, strict=True)]]
    with mpl.rc_context({**svg.STYLE, "figure.facecolor": "white", "savefig.dpi": 150}):
        figure = Figure(figsize=(8.2, 1.0 + 0.36 * len(drawn)), layout="constrained")
        axes = figure.add_subplot()
        axes.barh(range(len(drawn)), means, 0.66, xerr=ranges, color=svg.BLUE, error_kw={"ecolor": svg.INK})
        axes.set_yticks(range(len(drawn)), [", ".join(cell(row.get(name)) for name in by) for row in drawn])
        axes.invert_yaxis()
        axes.set_xlabel(column)
        into.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(into)


def main() -> None:
    """Print the table of files of rows, or draw a column of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="output of benchmarks")
    parser.add_argument("--columns", type=lambda text: text.split(","), default=(), help="default: all")
    parser.add_argument("--plot", metavar="COLUMN", help="draw it instead")
    parser.add_argument("--by", type=lambda text: text.split(","), default=(), help="columns that name a bar")
    parser.add_argument("--into", type=Path, default=Path("plot.png"), help="file of the plot")
    options = parser.parse_args()
    rows = read(options.files)
    if options.plot:
        plot(rows, options.plot, options.by, options.into)
    else:
        print(table(rows, options.columns), end="")


if __name__ == "__main__":
    main()
