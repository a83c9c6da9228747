"""`evenrank metrics`: show what balancing did in a training job, as a table and as a page with plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenrank.cli import console
from evenrank.cli.options import file_option, page_path, write_page
from evenrank.core.errors import DataError

if TYPE_CHECKING:
    from rich.table import Table

    from evenrank.dataloader.balance.metrics import LogRecord


def metrics_command(
    log: Annotated[
        Path,
        typer.Argument(help="Log written by `JsonLines` in a training job.", metavar="FILE.jsonl", show_default=False),
    ],
    html: Annotated[Path | None, file_option(help="Page to write. Default: FILE-report.html, next to the log.")] = None,
) -> None:
    """Show what balancing did in a training job: loads before and after, moved samples, times.

    Also writes one self-contained HTML page with plots. The last line of output is the path of the page. The job, which
    may still be running, writes the log on one rank:

    \b
        with JsonLines("out/balance.jsonl") as log:
            balancer = Balancer(loader, BalanceConfig(cost=cost, on_step=log))   # on rank 0

    Example:

    \b
        evenrank metrics out/balance.jsonl --html balance.html
    """
    with console.stages() as on_stage:
        on_stage(f"reading {log}")
        from evenrank.cli.reports.balance_log import describe_log, read_json_lines

        page = page_path(log, html)
        records, skipped = read_json_lines(log)
    if not records:
        raise DataError(f"{log} has no record yet; the job writes one after every `every` steps")
    console.print_result(f"{log}: {describe_log(records)}\n")
    if skipped:
        console.print_result(f"skipped {skipped:,} line{'' if skipped == 1 else 's'} that could not be read")
    console.print_result(metrics_table(records))
    with console.stages() as on_stage:
        on_stage("drawing")
        from evenrank.cli.reports.balance_page import render_page

        write_page(page, render_page(records, name=log.name))
    console.print_result(f"report: {page}")


def metrics_table(records: "Sequence[LogRecord]") -> "Table":
    """Return a table of the means over all records and of the last record, less than 80 columns wide."""
    from evenrank.dataloader.balance.metrics import Unit, combine, shown_fields

    formats = {
        Unit.RATIO: "{:.3f}",
        Unit.SPEEDUP: "{:.2f}x",
        Unit.FRACTION: "{:.1%}",
        Unit.BYTES: "{:,.0f}",
        Unit.SECONDS: "{:,.2f}",
    }
    summary, last = combine(records), records[-1]
    window = f"last {last.steps:,}" if last.steps > 1 else "last"
    table = console.new_table("mean per step", "all steps", window, left=["mean per step"])
    for entry in shown_fields():
        unit, label = entry.metadata["unit"], entry.metadata["label"]
        scale, suffix = (1e3, " (ms)") if unit is Unit.SECONDS else (1, "")
        values = (formats[unit].format(scale * getattr(record, entry.name)) for record in (summary, last))
        table.add_row(label + suffix, *values)
    return table
