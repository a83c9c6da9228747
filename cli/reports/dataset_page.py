"""The report of a dataset as one self-contained HTML page, and its plots."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC
from itertools import cycle
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.ticker import FuncFormatter, MaxNLocator

from evenrank.cli.reports import dataset_data, render_template, svg, to_text
from evenrank.cli.reports.gains import EXPLANATION, PREDICTED, Gain, gains_table
from evenrank.datasets.event_statistics import DAY_MS, Statistics, read_statistics
from evenrank.datasets.schema import ITEM_ID, Manifest
from evenrank.datasets.store import SequenceStore

_TRAIN = "train"
_COLOURS = (svg.BLUE, svg.ORANGE, svg.GREEN, svg.RED)
_LAST_DATE_MS = 253_370_764_800_000  # of the year 9998: the calendars of Python and matplotlib end one year later


class Report(NamedTuple):
    """The report of a dataset, what balancing gains and, if there are events and a table, the loads of routing."""

    html: str
    gains: Sequence[Gain]
    routing: dataset_data.RoutingLoads | None


def render_page(
    manifest: Manifest,
    stores: Mapping[str, SequenceStore],
    *,
    name: str,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Return the report of a dataset with these stores, of every split; `name` is that of its folder."""
    statistics = read_statistics(manifest)
    on_stage("counting items")
    ids, counts = dataset_data.count_values([stores[split].columns[ITEM_ID] for split in stores if split == _TRAIN])
    routing = dataset_data.routing_loads(
        ids,
        counts,
        manifest.vocabulary_sizes[ITEM_ID],
        on_ranks=lambda ranks: on_stage(f"spreading items over {ranks:,} ranks"),
    )
    on_stage("measuring histories")
    histogram = dataset_data.length_histogram(stores)
    on_stage("counting context values")
    context = [dataset_data.context_values(stores, feature) for feature in manifest.context_labels]
    on_stage("planning steps")
    gains = dataset_data.balancing_gains(stores[_TRAIN].lengths) if _TRAIN in stores else ()
    html = render_template(
        "dataset.html.j2",
        manifest=manifest,
        name=name,
        tables=dataset_data.tables_of(manifest, statistics.num_events),
        options={key: to_text(value) for key, value in manifest.options.items() if key not in ("audit", "statistics")},
        statistics={**statistics.describe(), **manifest.options.get("audit", {})},
        lengths_svg=lengths_svg(histogram),
        empty_rows={split: rows for split, rows in histogram.empty.items() if rows},
        popularity_svg=popularity_svg(statistics),
        timeline_svg=timeline_svg(statistics),
        hours_svg=hours_svg(statistics),
        context=[feature for feature in context if feature.rows],
        gains=gains_table(gains, "model") if gains else None,
        gain_settings=dataset_data.describe_gains(len(stores[_TRAIN]), name) if gains else None,
        gain_columns=EXPLANATION,
        predicted=PREDICTED,
        gains_svg=gains_svg(gains) if gains else None,
        routing=routing,
        routing_tables=dataset_data.routing_tables(routing) if routing else (),
        routing_ids_svg=routing_svg(routing, "distinct ids") if routing else None,
        routing_lookups_svg=routing_svg(routing, "lookups") if routing else None,
    )
    return Report(html, gains, routing)


@svg.plot()
def lengths_svg(axes: Axes, histogram: dataset_data.LengthHistogram) -> None:
    """Draw the distribution of lengths of each split, on a logarithmic axis."""
    filled_bins = np.flatnonzero(sum(histogram.density.values()))
    for (name, density), colour in zip(histogram.density.items(), cycle(_COLOURS), strict=False):
        if density.any():
            axes.stairs(density, histogram.edges, color=colour, linewidth=1.6, label=name)
            axes.stairs(density, histogram.edges, color=colour, fill=True, alpha=0.12)
    axes.set_xscale("log")
    axes.set_xlim(histogram.edges[filled_bins[0]], histogram.edges[filled_bins[-1] + 1])
    svg.log_ticks(axes, "x")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="events per row", ylabel="rows per doubling of length")
    svg.legend_above(axes)


@svg.plot()
def popularity_svg(axes: Axes, statistics: Statistics) -> None:
    """Draw the events of each item, most frequent first; both axes are logarithmic."""
    marker = "o" if len(statistics.ranks) == 1 else None  # a line through one point is invisible
    axes.plot(statistics.ranks, statistics.ranks_events, color=svg.BLUE, linewidth=2, marker=marker)
    axes.set(xscale="log", yscale="log")
    svg.log_ticks(axes, "x")
    svg.log_ticks(axes, "y")
    axes.set(xlabel="popularity rank of the item", ylabel="events of the item")


@svg.plot()
def timeline_svg(axes: Axes, statistics: Statistics) -> None:
    """Draw the number of events over time."""
    edges = statistics.bin_start_ms + statistics.bin_width_ms * np.arange(len(statistics.bins) + 1, dtype=np.float64)
    axes.stairs(statistics.bins, edges / DAY_MS, fill=True, color=svg.BLUE)  # matplotlib counts days from 1970
    axes.margins(x=0)
    if has_dates := edges[-1] < _LAST_DATE_MS:
        locator = AutoDateLocator(minticks=3, maxticks=6, tz=UTC)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC))  # type: ignore[no-untyped-call]
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(svg.compact))
    days = statistics.bin_width_ms / DAY_MS
    unit = "hour" if days < 1 else "day" if days == 1 else f"{days:,.0f} days"
    axes.set(ylim=(0, None), xlabel="" if has_dates else "days since 1970", ylabel=f"events per {unit}")


@svg.plot()
def hours_svg(axes: Axes, statistics: Statistics) -> None:
    """Draw the number of events in each hour of the day."""
    axes.stairs(statistics.hours_of_day, range(25), fill=True, color=svg.BLUE)
    axes.set_xticks(range(0, 25, 6))
    axes.yaxis.set_major_formatter(FuncFormatter(svg.compact))
    axes.set(ylim=(0, None), xlabel="hour of the day (UTC)", ylabel="events in all")


@svg.plot(height=2.6)
def gains_svg(axes: Axes, gains: Sequence[Gain]) -> None:
    """Draw the speed-up, per number of ranks and model."""
    models, ranks = (list(dict.fromkeys(values)) for values in zip(*((g.label, g.ranks) for g in gains), strict=True))
    width = 0.7 / len(models)
    for index, (model, colour) in enumerate(zip(models, (svg.BLUE, svg.GREY), strict=True)):
        places = np.arange(len(ranks)) + (index - (len(models) - 1) / 2) * width
        speedups = [gain.summary.speedup for gain in gains if gain.label == model]
        bars = axes.bar(places, speedups, width * 0.94, color=colour, label=model)
        axes.bar_label(bars, fmt="%.2f", fontsize=9, padding=2)
    axes.margins(y=0.15)  # room for the numbers above the bars
    axes.axhline(1, color=svg.INK, linewidth=0.8, linestyle="--")
    axes.set_xticks(np.arange(len(ranks)), [f"{count:,}" for count in ranks])
    axes.grid(visible=False, axis="x")
    axes.set(xlabel="ranks", ylabel="predicted speed-up")
    svg.legend_above(axes)


@svg.plot(height=3.3)
def routing_svg(axes: Axes, loads: dataset_data.RoutingLoads, load: Literal["distinct ids", "lookups"]) -> None:
    """Draw the busiest rank's load over the mean, per number of ranks and mode; both axes are logarithmic."""
    # Modes can be equal: each is drawn with smaller markers than the one below it.
    styles = zip((svg.GREY, svg.ORANGE, svg.BLUE), "os^", (7, 5.5, 4), strict=True)
    ratios = loads.ids if load == "distinct ids" else loads.lookups
    for (mode, values), (colour, marker, size) in zip(ratios.items(), styles, strict=True):
        axes.plot(loads.ranks, values, color=colour, marker=marker, markersize=size, linewidth=1.6, label=mode)
    if load == "lookups":
        axes.plot(loads.ranks, loads.most_frequent, color=svg.RED, linestyle=":", label="most frequent id")
    axes.axhline(1, color=svg.INK, linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(0.9, 1.2 * max(2, *(value for values in ratios.values() for value in values)))
    axes.set_xticks(loads.ranks, [f"{ranks:,}" for ranks in loads.ranks])
    svg.log_ticks(axes, "y")
    axes.set(xlabel="ranks", ylabel=f"{load}, busiest rank / mean")
    svg.legend_above(axes, columns=2)
