"""A log of balancing metrics as one self-contained HTML page."""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from evenrank.cli.reports import balance_plots
from evenrank.cli.reports.balance_log import describe_log, typical_record
from evenrank.cli.reports.html_page import render_template
from evenrank.dataloader.balance.metrics import LogRecord, MetricsSummary, combine

_BACKGROUND = ("gather_seconds", "plan_seconds")
_EXPOSED = ("exchange_seconds", "waited_seconds")


class Tile(NamedTuple):
    """A number with its unit in large print, its label above, and its scope below."""

    label: str
    value: str
    caption: str


def render_page(records: Sequence[LogRecord], *, name: str) -> str:
    """Return the page of a log of at least one record as HTML."""
    summary, typical = combine(records), typical_record(records)
    return render_template(
        "balance.html.j2",
        name=name,
        headline=headline(records, summary),
        tiles=tiles(summary),
        records=records,
        records_per_point=balance_plots.records_per_point(len(records)),
        typical=typical,
        has_many_ranks=len(typical.before) > balance_plots.MAX_BARS,
        moved_rows=moved_rows(summary),
        ratio_svg=Markup(balance_plots.ratio_svg(records)),
        loads_svg=Markup(balance_plots.loads_svg(typical)),
        moved_svg=Markup(balance_plots.moved_svg(records)) if summary.moved_bytes else None,
        background_svg=Markup(balance_plots.times_svg(records, _BACKGROUND)),
        exposed_svg=Markup(balance_plots.times_svg(records, _EXPOSED)),
    )


def headline(records: Sequence[LogRecord], summary: MetricsSummary) -> str:
    """Return the effect of balancing in one sentence."""
    if summary.moved_samples == 0:
        return (
            f"No sample moved to another rank in {describe_log(records)}: the load of the heaviest rank was "
            f"{summary.ratio_before:.3f} times the lower bound."
        )
    return (
        f"Balancing reduced the load of the heaviest rank from {summary.ratio_before:.3f} to {summary.ratio_after:.3f} "
        f"times the lower bound in {describe_log(records)}; the cost model expects steps to be {summary.speedup:.2f} "
        "times as fast."
    )


def moved_rows(summary: MetricsSummary) -> list[tuple[str, str, str, str]]:
    """Return the rows of a table: a quantity, its amount per step, the amount that moves, and the share that moves."""
    rows: list[tuple[str, str, str, str]] = []
    for quantity, total, share in (
        ("samples", summary.samples, summary.moved_samples),
        ("tokens", summary.tokens, summary.moved_tokens),
    ):
        rows.append((quantity, f"{total:,.0f}", f"{total * share:,.0f}", _percent(share)))
    total_bytes, moved_bytes = map(balance_plots.format_bytes, (summary.sample_bytes, summary.moved_bytes))
    return [*rows, ("bytes", total_bytes, moved_bytes, _percent(summary.moved_bytes / (summary.sample_bytes or 1)))]


def tiles(summary: MetricsSummary) -> list[Tile]:
    """Return the most important numbers."""
    background, exposed = (
        f"{1e3 * sum(getattr(summary, field) for field in fields):,.2f} ms" for fields in (_BACKGROUND, _EXPOSED)
    )
    ratio = "heaviest rank / lower bound"
    moved_bytes = balance_plots.format_bytes(summary.moved_bytes)
    return [
        Tile("Load before balancing", f"{summary.ratio_before:.3f}", ratio),
        Tile("Load after balancing", f"{summary.ratio_after:.3f}", ratio),
        Tile("Worst step after balancing", f"{summary.worst_after:.3f}", ratio),
        Tile("Expected speed-up", f"{summary.speedup:.2f}x", "by the cost model"),
        Tile("Tokens moved", _percent(summary.moved_tokens), "trained on another rank"),
        Tile("Bytes moved", moved_bytes, "per step, all ranks together"),
        Tile("In the background", background, "per step, gather and plan"),
        Tile("Exposed", exposed, "per step, on the training thread"),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"
