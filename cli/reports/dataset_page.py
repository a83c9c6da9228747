"""The report of a dataset as one self-contained HTML page."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from evenrank.cli.reports import dataset_plots
from evenrank.cli.reports.dataset_data import (
    DAY_MS,
    ContextValues,
    ItemCounts,
    balancing_gains,
    context_values,
    count_items,
    length_histogram,
    timeline,
    top_share,
)
from evenrank.cli.reports.html_page import render_template, to_text
from evenrank.cli.reports.routing_loads import RoutingLoads, routing_loads
from evenrank.datasets.schema import ITEM_ID, Manifest
from evenrank.datasets.store import SequenceStore, open_store

_TRAIN = "train"
_AUDIT = "audit"  # the option under which a manifest keeps the counts of the split audit
_TOP_SHARES = (0.01, 0.1)
_Stage = Callable[[str], None]


class Report(NamedTuple):
    """A dataset's report."""

    html: str
    routing: RoutingLoads | None
    """What it says about routing, which is also shown in the terminal; None if there are no events, or no table."""


def build_page(folder: Path, manifest: Manifest, *, on_stage: _Stage = lambda stage: None) -> Report:
    """Open every split of the dataset and return its report.

    Raises:
        DataError: a split is not what the manifest describes.
    """
    stores = {}
    for split in manifest.splits:
        on_stage(f"opening {split}")
        stores[split] = open_store(folder, split)
    return render_page(manifest, stores, name=folder.resolve().name, on_stage=on_stage)


def render_page(
    manifest: Manifest, stores: Mapping[str, SequenceStore], *, name: str, on_stage: _Stage = lambda stage: None
) -> Report:
    """Return the report.

    Args:
        manifest: of the dataset.
        stores: every split of the dataset.
        name: of the dataset's folder.
        on_stage: called with the description of each stage as it starts.
    """
    audit = manifest.options.get(_AUDIT)
    on_stage("counting items")
    items = count_items(stores)
    routing = routing_loads(
        items.ids,
        items.counts,
        manifest.vocabulary_sizes[ITEM_ID],
        on_ranks=lambda ranks: on_stage(f"spreading items over {ranks:,} ranks"),
    )
    html = render_template(
        "dataset.html.j2",
        manifest=manifest,
        name=name,
        percentiles=list(dict.fromkeys(key for split in manifest.splits.values() for key in split.lengths)),
        options={key: to_text(value) for key, value in manifest.options.items() if key != _AUDIT},
        audit=audit if isinstance(audit, dict) else {},
        **_lengths(stores, on_stage),
        **_items(items),
        **_time(stores, on_stage),
        context=_context(manifest, stores, on_stage),
        **_balance(stores, on_stage),
        **_routing(routing),
    )
    return Report(html, routing)


def _lengths(stores: Mapping[str, SequenceStore], on_stage: _Stage) -> dict[str, Any]:
    on_stage("measuring histories")
    histogram = length_histogram(stores)
    has_events = any(density.any() for density in histogram.density.values())
    return {
        "lengths_svg": _trusted(dataset_plots.lengths_svg(histogram)) if has_events else None,
        "empty_rows": {split: rows for split, rows in histogram.empty.items() if rows},
    }


def _items(items: ItemCounts) -> dict[str, Any]:
    counts = items.by_popularity()
    return {
        "items": len(counts),
        "items_once": int((counts == 1).sum()),
        "top_items": [(share, *top_share(counts, share)) for share in _TOP_SHARES],
        "popularity_svg": _trusted(dataset_plots.popularity_svg(counts)) if len(counts) else None,
    }


def _time(stores: Mapping[str, SequenceStore], on_stage: _Stage) -> dict[str, Any]:
    on_stage("counting events over time")
    if (line := timeline(stores)) is None:
        return {"timeline_svg": None, "timeline": None, "time_rows": {}}
    busiest = int(line.counts.argmax())
    times = [line.start_ms + line.width_ms * index for index in (0, len(line.counts), busiest)]
    start, end, busiest_start = (dataset_plots.format_time(time, precise=line.width_ms < DAY_MS) for time in times)
    return {
        "timeline_svg": _trusted(dataset_plots.timeline_svg(line)),
        "timeline": line,
        "time_rows": {
            "from": start,
            "until before": end,
            f"start of the busiest {line.unit}": busiest_start,
            f"events in the busiest {line.unit}": int(line.counts[busiest]),
            f"events per {line.unit}, mean": float(line.counts.mean()),
        },
    }


def _context(manifest: Manifest, stores: Mapping[str, SequenceStore], on_stage: _Stage) -> list[ContextValues]:
    on_stage("counting context values")
    features = [context_values(stores, feature) for feature in manifest.contextual]
    return [feature for feature in features if feature.rows]


def _balance(stores: Mapping[str, SequenceStore], on_stage: _Stage) -> dict[str, Any]:
    on_stage("planning steps")
    gains = balancing_gains(stores[_TRAIN].lengths) if _TRAIN in stores else ()
    return {"gains": gains, "gains_svg": _trusted(dataset_plots.gains_svg(gains)) if gains else None}


def _routing(loads: RoutingLoads | None) -> dict[str, Any]:
    if loads is None:
        return {"routing": None}
    return {
        "routing": loads,
        "routing_ids_svg": _trusted(dataset_plots.routing_svg(loads, "distinct ids")),
        "routing_lookups_svg": _trusted(dataset_plots.routing_svg(loads, "lookups")),
    }


def _trusted(svg: str) -> Markup:
    # Rendered by matplotlib, which escapes the only text of a user in it, the names of splits.
    return Markup(svg)
