"""The report on a table of runs, from their results: tables, whether targets are met, plots, and what was run."""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from end_to_end.experiments import Experiments, Run, lengths_of, resolved, slug
from end_to_end.reports import cost_section, plots, scaling_section
from end_to_end.reports.columns import UNBALANCED, Row, comparison, make_rows
from end_to_end.reports.table import (
    BALANCE,
    RANKS,
    SPEED,
    check_targets,
    markdown_table,
    notes,
    terminal_table,
    verdict_table,
)
from end_to_end.results import RunResult
from end_to_end.tasks import result_path
from evenrank.cli import console
from evenrank.core import files
from rendering import figures
from trainer.config import TrainConfig

_TITLES = {"Speed": SPEED, "Balance": BALANCE, "Ranks": RANKS}


def write_report(out: Path, experiments: Experiments) -> None:
    """Print the tables of all results, and write OUT/report.md and OUT/plots.

    Args:
        out: folder of the results, OUT/<lengths>/<name of the run>.json. Runs without one are named in the report.
        experiments: the table; its order is that of the rows.

    Raises:
        DataError: a result is damaged or of another version.
    """
    chosen = {lengths: _runs_with(lengths, experiments) for lengths in experiments.workload.lengths}
    found = {lengths: _load(out, lengths, runs) for lengths, runs in chosen.items()}
    tables = {lengths: make_rows(results) for lengths, results in found.items() if results}
    results = [result for one in found.values() for result in one]
    text = ["# Training benchmark", *_headline(out, tables), _conditions(results)]
    for lengths, runs in chosen.items():
        text += [f"## {lengths}: `{experiments.workload.lengths[lengths]}`"]
        if missing := [run.name for run in runs if run.name not in {result.name for result in found[lengths]}]:
            names = "all runs" if len(missing) == len(runs) else "; ".join(missing)  # a name may have a comma
            text += [f"Without a result: {names}."]
            console.print_result(f"{lengths}: without a result: {names}\n")
        if failed := [result for result in found[lengths] if result.failure is not None]:
            text += ["\n".join(f"- {result.name} failed: {result.failure}" for result in failed)]
            for result in failed:
                console.print_result(f"{lengths}: {result.name} failed: {result.failure}\n")
        if lengths in tables:
            _print(lengths, tables[lengths])
            text += _table_section(out, lengths, tables[lengths], found[lengths])
    # Of other tables in the same folder, a run with the same settings on another number of GPUs is a measurement too.
    scaled = [*results, *(result for lengths, runs in chosen.items() for result in _load_others(out / lengths, runs))]
    text += [
        section
        for section in (cost_section.write_section(out, results), scaling_section.write_section(out, scaled))
        if section
    ]
    text += ["## Columns", *(f"{title}:\n\n{notes(columns)}" for title, columns in _TITLES.items())]
    text += ["## Runs", _RUNS, _list_runs(results)]
    files.write_text(out / "report.md", "\n\n".join(part.strip("\n") for part in text) + "\n")
    console.print_result(f"report: {out / 'report.md'} (plots in {out / 'plots'})")


def _runs_with(lengths: str, experiments: Experiments) -> list[Run]:
    return [run for run in experiments.runs if lengths in lengths_of(run, experiments.workload)]


def _load(out: Path, lengths: str, runs: Sequence[Run]) -> list[RunResult]:
    paths = [result_path(out, lengths, run.name) for run in runs]
    return [RunResult.load(path) for path in paths if path.exists()]


def _load_others(folder: Path, runs: Sequence[Run]) -> list[RunResult]:
    """Return the results in a folder that are not those of these runs."""
    names = {path.stem: path for path in sorted(folder.glob("*.json")) if slug(path.stem) == path.stem}  # no tasks
    return [RunResult.load(path) for name, path in names.items() if name not in {slug(run.name) for run in runs}]


def _print(lengths: str, rows: Sequence[Row]) -> None:
    for title, columns in _TITLES.items():
        console.print_result(f"{lengths}: {title.lower()}")
        console.print_result(terminal_table(columns, rows))
    for verdict in check_targets(rows):
        console.print_result(
            f"{verdict.outcome}: {verdict.target}" + (f" ({verdict.measured})" if verdict.measured else "")
        )
    console.print_result("")


def _headline(out: Path, tables: Mapping[str, Sequence[Row]]) -> list[str]:
    """Draw it if any comparison has a ratio to even batches."""
    rows = [row for table in tables.values() for row in comparison(table).values()]
    if not any(row.evenness and row.evenness.to_even for row in rows):
        return []
    figures.save(plots.headline(tables), out / "plots" / "headline.png")
    return ["![Step time by strategy over that of perfectly even batches](plots/headline.png)"]


def _table_section(out: Path, lengths: str, rows: Sequence[Row], results: Sequence[RunResult]) -> Iterator[str]:
    yield from _plots(out, lengths, rows, results)
    for title, columns in _TITLES.items():
        yield f"### {title}"
        yield markdown_table(columns, rows)
    yield "### Targets"
    yield verdict_table(check_targets(rows))


def _plots(out: Path, lengths: str, rows: Sequence[Row], results: Sequence[RunResult]) -> Iterator[str]:
    """Draw the plots of a table that its results allow."""
    folder = out / "plots"
    figures.save(plots.throughput(rows), folder / f"throughput-{lengths}.png")
    yield f"![TFLOP/s and MFU of each run](plots/throughput-{lengths}.png)"
    compared = comparison(rows)
    by_name = {result.name: result for result in results}
    balanced = [strategy for strategy in ("lpt-swap", *compared) if strategy in compared and strategy != UNBALANCED]
    if UNBALANCED in compared and balanced:
        pair = by_name[compared[UNBALANCED].name], by_name[compared[balanced[0]].name]
        figures.save(plots.ranks(*pair), folder / f"ranks-{lengths}.png")
        yield f"![Load and compute time of each rank in {plots.SHOWN_STEPS} steps](plots/ranks-{lengths}.png)"
        figures.save(plots.timeline(*pair), folder / f"timeline-{lengths}.png")
        yield f"![What each rank does during a step](plots/timeline-{lengths}.png)"


def _conditions(results: Sequence[RunResult]) -> str:
    """Return hardware, versions, workload, and the command that wrote the report; different values side by side."""
    lines = _side_by_side([{"GPUs of a run": result.gpus, **result.environment} for result in results])
    drawn = [{"user_exponent": 0, **result.workload} for result in results]  # earlier results drew users uniformly
    workloads = [
        {key.replace("_exponent", "s drawn from Zipf with exponent"): of[key] for key in of if key != "lengths"}
        for of in drawn
    ]
    return "\n".join([*lines, *_side_by_side(workloads), f"- written by: `{shlex.join(sys.argv)}`"])


def _side_by_side(records: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for record in records for key in record)
    values = {key: dict.fromkeys(_text(record[key]) for record in records if key in record) for key in keys}
    return [f"- {key.replace('_', ' ')}: {', '.join(found)}" for key, found in values.items()]


def _text(value: object) -> str:
    return f"{value:,}" if type(value) is int else str(value)


def _list_runs(results: Sequence[RunResult]) -> str:
    """Return a list of the runs, each with that in which it differs from the run that it adds to, or from defaults."""
    by_name: dict[str, RunResult] = {}
    for result in results:
        by_name.setdefault(result.name, result)  # settings are the same with all distributions
    lines = []
    for result in by_name.values():
        base = by_name.get(result.adds_to or "")
        before = _DEFAULTS if base is None else _all_settings(base)
        changed = {key: value for key, value in _all_settings(result).items() if before.get(key) != value}
        text = ", ".join(f"{key} = {_text(value)}" for key, value in changed.items()) or "the same"
        lines.append(f"- {result.name} (adds to {result.adds_to or 'none'}): {text}")
    return "\n".join(lines)


def _all_settings(result: RunResult) -> dict[str, Any]:
    rows = {key: value for key, value in result.workload.items() if key in ("item_rows", "user_rows")}
    cost = result.cost["name"] if result.cost else _DEFAULTS["cost"]
    return {"gpus": result.gpus, **rows, **result.settings, "cost": cost}


_DEFAULTS = {**resolved(TrainConfig()), "cost": "HSTUCost"}
_RUNS = """\
Settings of `scripts/train.py` in which a run differs from the one that it adds to, or from the defaults. Its result is
LENGTHS/NAME.json in the folder of this report, with its task in NAME.task.json and its output in NAME.log."""
