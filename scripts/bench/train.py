"""Measure what balancing and other parts of a training job gain, from a table of runs; see scripts/bench/experiments.

.venv/bin/python scripts/bench/train.py scripts/bench/experiments/hstu.toml
"""

import importlib.util
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import report
from end_to_end.experiments import Run, read_runs
from end_to_end.summary import with_unbalanced
from evenrank.cli.main import run_command
from evenrank.core import files
from evenrank.core.errors import ConfigError

HSTU = Path(__file__).resolve().parent / "experiments" / "hstu.toml"
_HIDDEN = ("conditions", "machine")  # columns, in tables and printed rows


def train(
    experiments: Annotated[
        Path, typer.Argument(help="TOML file of runs.", metavar="EXPERIMENTS", show_default="hstu.toml")
    ] = HSTU,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of rows and logs. [default: out/bench/NAME, as EXPERIMENTS is NAME.toml]"),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Processes of a run, each with a GPU. [default: all GPUs of the host]", min=1)
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this run; repeatable.", metavar="NAME")] = None,
    lengths: Annotated[
        list[str] | None, typer.Option(help="Only this distribution of lengths; repeatable.", metavar="NAME")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Timed steps, instead of the file's.", min=1)] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of the timed steps, instead of the file's.", min=1)] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps before them, instead of the file's.", min=0)] = None,
    time_limit: Annotated[
        float, typer.Option(help="Minutes of a run; one that takes longer is ended, and has failed.", min=0.01)
    ] = 60,
    rerun: Annotated[bool, typer.Option("--rerun", help="Measure again what has been measured.")] = False,
) -> None:
    """Measure what balancing and other parts of a training job gain, from a table of runs.

    Each run trains alone on its GPUs, on the same batches, and leaves a row and a log in OUT. Runs that were measured
    under the same conditions are kept, so that the same command continues a table that was interrupted. A run that
    fails is a row that says why; the exit code is 1 if it is not for lack of GPU memory. Prints a JSON line per run and
    a table, and writes rows.jsonl, report.md and plot.png; end_to_end/summary.py explains the columns. Examples:

    \b
        python scripts/bench/train.py scripts/bench/experiments/smoke.toml     # a first try, without a GPU
        python scripts/bench/train.py                                          # hstu.toml: hours, on 4 GPUs
        python scripts/bench/train.py --only unbalanced --only lpt-swap --lengths lognormal --steps 200
        python scripts/bench/train.py --gpus 2 --out out/bench/hstu-2          # the same on fewer GPUs
    """
    folder = out or Path("out/bench") / experiments.stem
    given = {"steps": steps, "rounds": rounds, "warmup_steps": warmup_steps}
    changed = {name: value for name, value in given.items() if value is not None}
    there = _count_gpus()
    runs = read_runs(experiments, gpus=gpus or there or 1, changed=changed, only=only or (), lengths=lengths or ())
    rows = []
    for number, run in enumerate(runs, 1):
        path, title = run.path(folder), f"[{number}/{len(runs)}] {run.lengths}: {run.name}, {run.gpus} processes"
        row = None if rerun else _kept(path, run)
        if row is None:
            print(f"{title} (log: {path.with_suffix('.log')})", file=sys.stderr, flush=True)
            row = _measure(run, path, device="cuda" if there else "cpu", gpus=there, seconds=60 * time_limit)
        rows.append(row)
    _report(folder, rows)
    if any(row.get("failure") not in (None, "out of memory") for row in rows):
        raise typer.Exit(1)


def _count_gpus() -> int:
    try:
        import torch
    except ModuleNotFoundError:
        return 0
    return torch.cuda.device_count()


def _kept(path: Path, run: Run) -> report.Row | None:
    """Return the row of a run that was measured under these conditions."""
    rows = report.read([path]) if path.exists() else []
    return next((row for row in rows if row["conditions"] == run.conditions and "failure" not in row), None)


def _measure(run: Run, path: Path, *, device: str, gpus: int, seconds: float) -> report.Row:
    # Imported here, because they import torch, which --help does not need.
    from torch.multiprocessing.spawn import ProcessException

    from end_to_end.measure import measure_run
    from local_ranks import LocalRanks

    if gpus and run.gpus > gpus:
        raise ConfigError(f"run {run.name!r} has {run.gpus} processes, this host {gpus} GPUs; choose runs with --only")
    log, started = path.with_suffix(".log"), time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(log, "")
    ranks = LocalRanks(device=device, count=run.gpus, seconds=seconds, log=log)
    try:
        row: report.Row = ranks.run(measure_run, run)
    except ProcessException as error:
        reason = str(error).strip().splitlines()[-1]
        if "OutOfMemoryError" in log.read_text(errors="replace"):
            reason = "out of memory"
        elif time.monotonic() - started > seconds:
            reason = f"took longer than the limit of {seconds / 60:g} minutes"
        row = {"lengths": run.lengths, "run": run.name, "gpus": run.gpus, "failure": reason}
        row |= {"conditions": run.conditions, "machine": report.machine()}
    report.write(path, [row])
    return row


def _report(folder: Path, measured: Sequence[report.Row]) -> None:
    """Print rows and their table, and write them and a plot to the folder."""
    rows = with_unbalanced(measured)
    for row in rows:
        report.emit({name: value for name, value in row.items() if name not in _HIDDEN})
    found = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    shown = [name for name in found if name not in _HIDDEN]
    report.write(folder / "rows.jsonl", rows)
    machine = "".join(f"- {name}: {value}\n" for name, value in rows[-1]["machine"].items())
    command = f"```bash\npython {shlex.join(sys.argv)}\n```\n"
    files.write_text(folder / "report.md", f"{command}\n{machine}\n{report.table(rows, shown)}")
    print(f"\n{report.table(rows, shown)}\nwritten to {folder}: rows.jsonl, report.md and, with matplotlib, plot.png")
    if importlib.util.find_spec("matplotlib"):
        report.plot(rows, "live_over_even", ("lengths", "run"), folder / "plot.png")


if __name__ == "__main__":
    run_command(train)
