"""A log of balancing metrics as one HTML page that needs nothing else: no script, no other file, no network."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markupsafe import Markup

from evenrank.cli.reports import balance_plots
from evenrank.cli.reports.balance_log import LogRecord, LogSummary, places, sum_up, typical
from evenrank.cli.reports.dataset_page import render_template
from evenrank.core.errors import ConfigError

_BACKGROUND = ("gather_seconds", "plan_seconds")
_EXPOSED = ("exchange_seconds", "waited_seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A number that is large on the page."""

    label: str
    value: str
    words: str  # what it is, in small print


def page_path(log: Path, chosen: Path | None) -> Path:
    """Return where the page of a log goes: `chosen`, or beside the log.

    Raises:
        ConfigError: that is a folder, or the log itself.

    """
    page = log.with_name(f"{log.stem}-report.html") if chosen is None else chosen
    if page.is_dir():
        raise ConfigError(f"{page} is a folder; --html needs the name of a file")
    if page.resolve() == log.resolve():
        raise ConfigError(f"{page} is the log, which the page would replace; choose another file with --html")
    return page


def render_page(records: Sequence[LogRecord], *, name: str) -> str:
    """Return the page of a log of at least one record as HTML.

    Args:
        records: of the log, in order.
        name: what the log is called.

    """
    summary, shown = sum_up(records), typical(records)
    return render_template(
        "balance.html.j2",
        name=name,
        headline=headline(records, summary),
        tiles=tiles(summary),
        records=records,
        per_point=balance_plots.per_point(len(records)),
        shown=shown,
        many_ranks=len(shown.before) > balance_plots.MOST_BARS,
        summary=summary,
        moved=moved(summary),
        ratio_svg=Markup(balance_plots.ratio_svg(records)),
        loads_svg=Markup(balance_plots.loads_svg(shown)),
        moved_svg=Markup(balance_plots.moved_svg(records)) if summary.moved_bytes else None,
        background_svg=Markup(balance_plots.times_svg(records, _BACKGROUND)),
        exposed_svg=Markup(balance_plots.times_svg(records, _EXPOSED)),
    )


def headline(records: Sequence[LogRecord], summary: LogSummary) -> str:
    """Say in one sentence what balancing did."""
    over = f"over {log_in_words(records)}"
    if summary.moved_samples == 0:
        return (
            f"Every sample stayed where it was dealt {over}: the heaviest rank's load was "
            f"{summary.ratio_before:.3f} times the lower bound."
        )
    return (
        f"Balancing brought the heaviest rank's load from {summary.ratio_before:.3f} to {summary.ratio_after:.3f} "
        f"times the lower bound {over}; the cost model expects steps to be {summary.speedup:.2f} times as fast."
    )


def log_in_words(records: Sequence[LogRecord]) -> str:
    """Return how many steps and ranks there were; ranks in turn, where a job was resumed on another number of them."""
    steps = int(places(records)[-1])
    counts = [len(record.before) for record in records]
    turns = [counts[0], *(count for last, count in pairwise(counts) if count != last)]
    ranks = ", then ".join(f"{count:,}" for count in turns)
    return f"{steps:,} step{_plural(steps)} on {ranks} rank{_plural(turns[-1])}"


def _plural(number: int) -> str:
    return "" if number == 1 else "s"


def moved(summary: LogSummary) -> list[tuple[str, str, str, str]]:
    """Return rows of a table: what, how much of it a step has, how much of that moves, and which part that is."""
    rows = []
    for what, total, part in (
        ("samples", summary.samples, summary.moved_samples),
        ("tokens", summary.tokens, summary.moved_tokens),
    ):
        rows.append((what, f"{total:,.0f}", f"{total * part:,.0f}", percent(part)))
    part = summary.moved_bytes / summary.bytes if summary.bytes else 0.0
    sizes = (balance_plots.as_bytes(summary.bytes), balance_plots.as_bytes(summary.moved_bytes))
    return [*rows, ("bytes", *sizes, percent(part))]


def tiles(summary: LogSummary) -> list[Tile]:
    """Return the numbers that matter most."""
    background = sum(getattr(summary, field) for field in _BACKGROUND)
    exposed = sum(getattr(summary, field) for field in _EXPOSED)
    bound = "heaviest rank / lower bound"
    return [
        Tile(label="Load as dealt", value=f"{summary.ratio_before:.3f}", words=bound),
        Tile(label="Load balanced", value=f"{summary.ratio_after:.3f}", words=bound),
        Tile(label="Worst step balanced", value=f"{summary.worst_after:.3f}", words=bound),
        Tile(label="Expected speed-up", value=f"{summary.speedup:.2f}x", words="by the cost model"),
        Tile(label="Tokens moved", value=percent(summary.moved_tokens), words="trained on another rank"),
        Tile(
            label="Bytes moved", value=balance_plots.as_bytes(summary.moved_bytes), words="a step, all ranks together"
        ),
        Tile(label="In the background", value=milliseconds(background), words="a step, to gather and plan"),
        Tile(label="Exposed", value=milliseconds(exposed), words="a step, that training waited"),
    ]


def percent(part: float) -> str:
    """Return 0.5 as 50.0 %, with a space that does not break."""
    return f"{100 * part:.1f}\N{NO-BREAK SPACE}%"


def milliseconds(seconds: float) -> str:
    """Return 0.0015 as 1.50 ms."""
    return f"{seconds * 1e3:,.2f} ms"
