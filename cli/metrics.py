"""`evenrank metrics`: what balancing did in a training job, as a table on the terminal and as a page with pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from evenrank.cli import console
from evenrank.cli.reports.balance_log import LogRecord, read_json_lines, sum_up
from evenrank.core.errors import DataError

# What is in the table, and how it is written.
_ROWS = (
    ("load as dealt (heaviest rank / lower bound)", "ratio_before", "{:.3f}", 1),
    ("load balanced", "ratio_after", "{:.3f}", 1),
    ("worst load balanced", "worst_after", "{:.3f}", 1),
    ("expected speed-up", "speedup", "{:.2f}x", 1),
    ("samples moved to another rank", "moved_samples", "{:.1%}", 1),
    ("tokens moved", "moved_tokens", "{:.1%}", 1),
    ("bytes moved a step", "moved_bytes", "{:,.0f}", 1),
    ("of them from host to host", "bytes_between_hosts", "{:,.0f}", 1),
    ("in the background: gather (ms)", "gather_seconds", "{:,.2f}", 1e3),
    ("in the background: plan (ms)", "plan_seconds", "{:,.2f}", 1e3),
    ("training waited: exchange (ms)", "exchange_seconds", "{:,.2f}", 1e3),
    ("training waited: for plans (ms)", "waited_seconds", "{:,.2f}", 1e3),
)


def metrics_command(
    log: Annotated[
        Path,
        typer.Argument(
            help="Log that a training job wrote with `JsonLines`.", metavar="FILE.jsonl", show_default=False
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            help="The page to write. Default: FILE-report.html, beside the log.", metavar="FILE", show_default=False
        ),
    ] = None,
) -> None:
    """Show what balancing did in a training job: loads before and after, what moved, what it took.

    Also writes one self-contained HTML page with pictures, and prints its path last. The log comes from the job, which
    may still be running:

    \b
        with JsonLines("out/balance.jsonl") as log:
            balancer = Balancer(loader, cost=cost, on_step=log)   # on rank 0

    For example:

    \b
        evenrank metrics out/balance.jsonl --html balance.html
    """
    # Not above: matplotlib takes a second to import, which the other commands need not wait for.
    from evenrank.cli.reports.balance_page import log_in_words, page_path, render_page
    from evenrank.cli.reports.dataset_page import write_page

    page = page_path(log, html)
    records = read_json_lines(log)
    if not records:
        raise DataError(f"{log} has no record yet; the job writes one after every `every` steps")
    console.stdout.print(f"{log}: {log_in_words(records)}\n")
    console.stdout.print(metrics_table(records))
    write_page(page, render_page(records, name=log.name))
    console.stdout.print(f"report: {page}")


def metrics_table(records: Sequence[LogRecord]) -> Table:
    """Return the means of all records, and the last record, in less than 80 columns."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("mean of a step")
    table.add_column("all steps", justify="right")
    last = records[-1]
    table.add_column(f"last {last.steps:,}" if last.steps > 1 else "last", justify="right")
    summary = sum_up(records)
    for label, field, style, scale in _ROWS:
        table.add_row(label, *(style.format(scale * getattr(source, field)) for source in (summary, last)))
    return table
