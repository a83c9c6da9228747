"""A log of balancing metrics as one self-contained HTML page."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from evenrank.cli.reports import balance_plots
from evenrank.cli.reports.balance_log import describe_log, typical_record
from evenrank.cli.reports.html_page import render_template
from evenrank.dataloader.balance.log_schema import LogRecord
from evenrank.dataloader.balance.metrics import MetricsSummary, combine

_BACKGROUND = ("gather_seconds", "plan_seconds")
_EXPOSED = ("exchange_seconds", "waited_seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A number in large print."""

    label: str
    """What the number is, above it."""

    value: str
    """The number with its unit."""

    caption: str
    """Scope of the number, in small print below it."""


def render_page(records: Sequence[LogRecord], *, name: str) -> str:
    """Return the page of a log as HTML.

    Args:
        records: of the log, in order, at least one.
        name: of the log.

    """
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
    rows = []
    for quantity, total, moved_share in (
        ("samples", summary.samples, summary.moved_samples),
        ("tokens", summary.tokens, summary.moved_tokens),
    ):
        rows.append((quantity, f"{total:,.0f}", f"{total * moved_share:,.0f}", format_percent(moved_share)))
    total_bytes, moved_bytes = (
        balance_plots.format_bytes(number) for number in (summary.sample_bytes, summary.moved_bytes)
    )
    moved_share = summary.moved_bytes / summary.sample_bytes if summary.sample_bytes else 0.0
    return [*rows, ("bytes", total_bytes, moved_bytes, format_percent(moved_share))]


def tiles(summary: MetricsSummary) -> list[Tile]:
    """Return the most important numbers."""
    background = sum(getattr(summary, field) for field in _BACKGROUND)
    exposed = sum(getattr(summary, field) for field in _EXPOSED)
    ratio = "heaviest rank / lower bound"
    moved_bytes = balance_plots.format_bytes(summary.moved_bytes)
    return [
        Tile(label="Load before balancing", value=f"{summary.ratio_before:.3f}", caption=ratio),
        Tile(label="Load after balancing", value=f"{summary.ratio_after:.3f}", caption=ratio),
        Tile(label="Worst step after balancing", value=f"{summary.worst_after:.3f}", caption=ratio),
        Tile(label="Expected speed-up", value=f"{summary.speedup:.2f}x", caption="by the cost model"),
        Tile(label="Tokens moved", value=format_percent(summary.moved_tokens), caption="trained on another rank"),
        Tile(label="Bytes moved", value=moved_bytes, caption="per step, all ranks together"),
        Tile(label="In the background", value=format_milliseconds(background), caption="per step, gather and plan"),
        Tile(label="Exposed", value=format_milliseconds(exposed), caption="per step, on the training thread"),
    ]


def format_percent(share: float) -> str:
    """Return 0.5 as 50.0 %, with a no-break space."""
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def format_milliseconds(seconds: float) -> str:
    """Return 0.0015 as 1.50 ms."""
    return f"{seconds * 1e3:,.2f} ms"
