"""A log of balancing metrics as one self-contained HTML page, and its plots."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from evenrank.cli.reports import render_template, svg
from evenrank.dataloader.balance.metrics.log_reader import BalanceLog
from evenrank.dataloader.balance.metrics.log_record import LogRecord
from evenrank.dataloader.balance.metrics.step_metrics import MetricsSummary, Unit, combine, shown_texts

_BACKGROUND = ("gather_seconds", "plan_seconds")
_EXPOSED = ("exchange_seconds", "waited_seconds")
MAX_POINTS = 300  # of a curve: about as many dots as the plots are wide
MAX_BARS = 64  # ranks
_MILLISECONDS = 1e3
_OUTLIER_FACTOR = 5  # times above this multiple of the 98th percentile would flatten the plot
_BYTE_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
_BEFORE, _AFTER = "before balancing", "after balancing"


def render_page(log: BalanceLog, *, name: str) -> str:
    """Return the page of a log of at least one record as HTML."""
    records = log.records
    summary, typical = combine(records), typical_record(records)
    return render_template(
        "balance.html.j2",
        name=name,
        headline=headline(log, summary),
        tiles=shown_texts(summary),
        records=records,
        records_per_point=records_per_point(len(records)),
        typical=typical,
        has_many_ranks=len(typical.before) > MAX_BARS,
        idle_svg=idle_svg(records),
        loads_svg=loads_svg(typical),
        moved_svg=moved_svg(records) if summary.moved_bytes else None,
        background_svg=times_svg(records, _BACKGROUND),
        exposed_svg=times_svg(records, _EXPOSED),
    )


def headline(log: BalanceLog, summary: MetricsSummary) -> str:
    """Return the effect of balancing in one or two sentences: what the cost promises, and what was measured."""
    share, speedup = Unit.SHARE.show, Unit.SPEEDUP.show
    if not summary.steps:
        return f"{log.describe()}, of which only unbalanced ones were recorded: nothing shows what balancing does."
    promised = (
        f"By the cost, ranks were idle for {share(summary.idle_before)} of their time before balancing and for "
        f"{share(summary.idle_after)} after it in {log.describe()}, a speed-up of {speedup(summary.speedup)}."
    )
    if not summary.measured_steps:
        return promised
    measured = (
        f" Measured in {summary.measured_steps:,} of these, they were idle for {share(summary.measured_idle_after)}"
    )
    if not summary.compared_steps:
        return f"{promised}{measured} with balancing."
    return (
        f"{promised}{measured}, and for {share(summary.measured_idle_before)} in the {summary.compared_steps:,} left "
        f"unbalanced for comparison, a speed-up of {speedup(summary.measured_speedup)}."
    )


class Curve(NamedTuple):
    """Values of a log, float64 [points] each; a point stands for consecutive records, and has the steps of the last."""

    steps: NDArray[np.float64]
    mean: NDArray[np.float64]
    minimum: NDArray[np.float64]
    maximum: NDArray[np.float64]


def records_per_point(num_records: int) -> int:
    """Return how many consecutive records make one point of a curve."""
    return -(-num_records // MAX_POINTS)


def downsample(steps: NDArray[np.float64], values: NDArray[np.float64]) -> Curve:
    """Make one point of every `records_per_point` records; the last point may have fewer."""
    starts = np.arange(0, len(values), records_per_point(len(values)))
    counts = np.diff([*starts, len(values)])
    return Curve(
        steps=steps[starts + counts - 1],
        mean=np.add.reduceat(values, starts) / counts,
        minimum=np.minimum.reduceat(values, starts),
        maximum=np.maximum.reduceat(values, starts),
    )


def column(records: Sequence[LogRecord], field: str) -> NDArray[np.float64]:
    """Return the values of a field: float64 [records]."""
    return np.array([getattr(record, field) for record in records], dtype=np.float64)


def typical_record(records: Sequence[LogRecord]) -> LogRecord:
    """Return the record with the median imbalance before balancing, of those whose last step is balanced if any is."""
    records = [record for record in records if record.is_balanced] or records
    imbalance = [int(record.before.max()) / max(record.lower_bound, 1) for record in records]
    return records[int(np.argsort(imbalance, kind="stable")[(len(records) - 1) // 2])]


@svg.plot()
def idle_svg(axes: Axes, records: Sequence[LogRecord]) -> None:
    """Draw the share of rank time that is idle over the steps: before and after, by the cost and as measured."""
    styles = zip((svg.GREY, svg.BLUE), ("idle_before", "idle_after"), ("compared_steps", "measured_steps"), strict=True)
    for colour, name, counted_by in styles:
        _draw(axes, records, name, colour=colour, scale=100, label=f"{name.removeprefix('idle_')} balancing")
        measured = {"counted_by": counted_by, "label": "measured", "style": ":"}
        _draw(axes, records, f"measured_{name}", colour=colour, scale=100, **measured)
    axes.set(ylim=(0, None), ylabel="idle rank time (%)")
    svg.legend_above(axes, columns=2)


@svg.plot()
def loads_svg(axes: Axes, record: LogRecord) -> None:
    """Draw the load of each rank in the last step of a record: as bars or, of many ranks, lines of sorted loads."""
    bound = max(record.lower_bound, 1)
    before, after = record.before / bound, record.after / bound
    ranks = np.arange(len(before))
    if len(ranks) > MAX_BARS:
        for loads, colour, label in ((before, svg.GREY, _BEFORE), (after, svg.BLUE, _AFTER)):
            axes.plot(ranks, np.sort(loads)[::-1], color=colour, linewidth=1.8, label=label)
        axes.set_xlabel("ranks, heaviest first")
    else:
        axes.bar(ranks, before, 0.86, color=svg.GREY, alpha=0.6, label=_BEFORE)
        axes.bar(ranks, after, 0.46, color=svg.BLUE, label=_AFTER)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("rank")
    axes.axhline(1, color=svg.INK, linewidth=0.8, linestyle="--")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.set(ylim=(0, None), ylabel="load / lower bound")
    svg.legend_above(axes)


@svg.plot()
def moved_svg(axes: Axes, records: Sequence[LogRecord]) -> None:
    """Draw the bytes that move to another rank in a step."""
    unit, unit_bytes = _byte_unit(float(column(records, "moved_bytes").max()))
    _draw(axes, records, "moved_bytes", colour=svg.GREEN, scale=1 / unit_bytes)
    axes.set(ylim=(0, None), ylabel=f"moved per step ({unit})")


@svg.plot()
def times_svg(axes: Axes, records: Sequence[LogRecord], fields: Sequence[str]) -> None:
    """Draw two times of a step, such as `gather_seconds`; few that are far longer, as of a first step, are cut off."""
    for field, colour in zip(fields, (svg.ORANGE, svg.BLUE), strict=True):
        _draw(axes, records, field, colour=colour, scale=_MILLISECONDS, label=field.removesuffix("_seconds"))
    axes.set_ylim(bottom=0)
    times = np.concatenate([column(records, field) for field in fields]) * _MILLISECONDS
    longest, percentile_98 = float(times.max()), float(np.percentile(times, 98))
    if longest > _OUTLIER_FACTOR * percentile_98 > 0:
        axes.set_ylim(top=2 * percentile_98)
        axes.text(1, 1.03, f"cut off: up to {longest:,.1f} ms", transform=axes.transAxes, ha="right", fontsize=8)
    axes.set_ylabel("ms per step")
    svg.legend_above(axes)


def _byte_unit(num_bytes: float) -> tuple[str, float]:
    """Return the name and the size of the largest unit that is not above `num_bytes`."""
    return next((unit for unit in _BYTE_UNITS if num_bytes >= unit[1]), _BYTE_UNITS[-1])


def _draw(
    axes: Axes,
    records: Sequence[LogRecord],
    field: str,
    *,
    colour: str,
    scale: float = 1.0,
    counted_by: str = "steps",
    label: str | None = None,
    style: str = "-",
) -> None:
    """Draw a number over the steps that have it: the mean of each point, and a band from its minimum to its maximum."""
    records = [record for record in records if getattr(record, counted_by)]
    if not records:
        return
    curve = downsample(column(records, "seen"), column(records, field) * scale)
    marker = "o" if len(curve.steps) == 1 else None  # a line through one point is invisible
    if records_per_point(len(records)) > 1:
        axes.fill_between(curve.steps, curve.minimum, curve.maximum, color=colour, alpha=0.22, linewidth=0)
    axes.plot(curve.steps, curve.mean, color=colour, linewidth=1.5, linestyle=style, marker=marker, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(svg.compact))
    axes.set_xlabel("steps")
