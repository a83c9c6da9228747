"""The report of a dataset as one self-contained HTML page."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from evenrank.cli.reports import dataset_plots
from evenrank.cli.reports.dataset_data import (
    DAY_MS,
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
from evenrank.datasets.store import SequenceStore

_TRAIN = "train"
_AUDIT = "audit"  # the option under which a manifest keeps the counts of the split audit
_TOP_SHARES = (0.01, 0.1)


class Report(NamedTuple):
    """The report of a dataset, and what it says about routing, if there are events and a table."""

    html: str
    routing: RoutingLoads | None


def render_page(
    manifest: Manifest,
    stores: Mapping[str, SequenceStore],
    *,
    name: str,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Return the report of a dataset with these stores, of every split; `name` is that of its folder.

    Its plots are Markup: matplotlib escapes the only text of a user in them, the names of splits.
    """
    audit = manifest.options.get(_AUDIT)
    on_stage("counting items")
    ids, counts = count_items(stores)
    routing = routing_loads(
        ids,
        counts,
        manifest.vocabulary_sizes[ITEM_ID],
        on_ranks=lambda ranks: on_stage(f"spreading items over {ranks:,} ranks"),
    )
    on_stage("measuring histories")
    histogram = length_histogram(stores)
    has_events = any(density.any() for density in histogram.density.values())
    by_popularity = np.sort(counts)[::-1]
    on_stage("counting context values")
    context = [context_values(stores, feature) for feature in manifest.contextual]
    on_stage("counting events over time")
    time = _time(stores)
    on_stage("planning steps")
    gains = balancing_gains(stores[_TRAIN].lengths) if _TRAIN in stores else ()
    html = render_template(
        "dataset.html.j2",
        manifest=manifest,
        name=name,
        percentiles=list(dict.fromkeys(key for split in manifest.splits.values() for key in split.lengths)),
        options={key: to_text(value) for key, value in manifest.options.items() if key != _AUDIT},
        audit=audit if isinstance(audit, dict) else {},
        lengths_svg=Markup(dataset_plots.lengths_svg(histogram)) if has_events else None,
        empty_rows={split: rows for split, rows in histogram.empty.items() if rows},
        items=len(counts),
        items_once=int((counts == 1).sum()),
        top_items=[(share, *top_share(by_popularity, share)) for share in _TOP_SHARES],
        popularity_svg=Markup(dataset_plots.popularity_svg(by_popularity)) if len(counts) else None,
        **time,
        context=[feature for feature in context if feature.rows],
        gains=gains,
        gains_svg=Markup(dataset_plots.gains_svg(gains)) if gains else None,
        routing=routing,
        routing_ids_svg=Markup(dataset_plots.routing_svg(routing, "distinct ids")) if routing else None,
        routing_lookups_svg=Markup(dataset_plots.routing_svg(routing, "lookups")) if routing else None,
    )
    return Report(html, routing)


def _time(stores: Mapping[str, SequenceStore]) -> dict[str, Any]:
    if (line := timeline(stores)) is None:
        return {"timeline_svg": None, "timeline": None, "time_rows": {}}
    busiest = int(line.counts.argmax())
    times = [line.start_ms + line.width_ms * index for index in (0, len(line.counts), busiest)]
    start, end, busiest_start = (dataset_plots.format_time(time, precise=line.width_ms < DAY_MS) for time in times)
    return {
        "timeline_svg": Markup(dataset_plots.timeline_svg(line)),
        "timeline": line,
        "time_rows": {
            "from": start,
            "until before": end,
            f"start of the busiest {line.unit}": busiest_start,
            f"events in the busiest {line.unit}": int(line.counts[busiest]),
            f"events per {line.unit}, mean": float(line.counts.mean()),
        },
    }
