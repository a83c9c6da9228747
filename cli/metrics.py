"""`evenrank metrics`: show what balancing did in training jobs, as a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenrank.cli import console
from evenrank.cli.options import Json
from evenrank.core.errors import DataError

if TYPE_CHECKING:
    from rich.table import Table

    from evenrank.dataloader.balance.metrics.log import BalanceLog
    from evenrank.dataloader.balance.metrics.step_metrics import MetricsSummary


def metrics_command(
    logs: Annotated[
        list[Path],
        typer.Argument(
            help="Logs written by `JsonLines` in training jobs; several are compared.",
            metavar="FILE.jsonl",
            show_default=False,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show what balancing did in a training job: what the cost promised beside what was measured.

    Of several logs, shows where the runs differ. A job, which may still be running, writes its log on rank 0:

    \b
        with JsonLines("out/balance.jsonl") as log:
            loader = build_loader(..., balance=BalanceConfig(..., on_step=log))

    Examples:

    \b
        evenrank metrics out/balance.jsonl
        evenrank metrics out/balance.jsonl out/balance-2.jsonl
    """
    with console.stages() as on_stage:
        from evenrank.dataloader.balance.metrics.log import read_json_lines
        from evenrank.dataloader.balance.metrics.step_metrics import combine, shown_numbers

        found = []
        for path in logs:
            on_stage(f"reading {path}")
            found.append(read_json_lines(path))
            if not found[-1].records:
                raise DataError(f"{path} has no record yet; the job writes one after every `every` steps")
    summaries = [combine(log.records) for log in found]
    documents = []
    for path, log, summary in zip(logs, found, summaries, strict=True):
        last = log.records[-1]
        numbers = {"all": shown_numbers(summary), "last": shown_numbers(last), "skipped": log.skipped}
        documents.append({"log": path, "steps": last.seen, "ranks": len(last.before), "run": log.run, **numbers})
        run = f", run {log.run.id} of {log.run.started}" if log.run else ""
        console.print_result(f"{path}: {log.describe()}{run}", logs=documents)
        if log.skipped:
            console.print_result(f"skipped {log.skipped:,} line{'s' * (log.skipped != 1)} that could not be read")
    if len(logs) > 1:
        console.print_result(metrics_table(dict(zip(_short_names(logs), summaries, strict=True))))
        table = differences_table(logs, found)
        console.print_result(table if table.row_count else "The runs have the same versions and options.")
        return
    last = found[0].records[-1]
    console.print_result(
        metrics_table({"all steps": summaries[0], f"last {last.steps:,}" if last.steps > 1 else "last": last})
    )


def metrics_table(summaries: "dict[str, MetricsSummary]") -> "Table":
    """Return a table with a column for each summary by its name; numbers that none of them has are left out."""
    from evenrank.dataloader.balance.metrics.step_metrics import SHOWN, shown_texts

    texts = [shown_texts(summary) for summary in summaries.values()]
    table = console.new_table("", *summaries, left=[""])
    for label in (shown.label for shown in SHOWN):
        if any(label in known for known in texts):
            table.add_row(label, *(known.get(label, "-") for known in texts))
    return table


def differences_table(logs: Sequence[Path], found: "Sequence[BalanceLog]") -> "Table":
    """Return a table of the versions and options in which runs differ."""
    flat = [_flat({"versions": log.run.versions, **log.run.options} if log.run else {}) for log in found]
    table = console.new_table("options", *_short_names(logs), left=["options"])
    for name in sorted(set().union(*flat)):
        values = [str(options.get(name, "-")) for options in flat]
        if len(set(values)) > 1:
            table.add_row(name, *values)
    return table


def _flat(options: Any, name: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by dotted names."""
    if not isinstance(options, dict):
        return {name: options}
    parts = [_flat(value, f"{name}.{key}".lstrip(".")) for key, value in options.items()]
    return {key: value for part in parts for key, value in part.items()}


def _short_names(logs: Sequence[Path]) -> list[str]:
    names = [log.name for log in logs]
    return names if len(set(names)) == len(names) else [str(log) for log in logs]
