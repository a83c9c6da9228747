"""`evenrank inspect`: show the content of a dataset, as tables and as a page with plots."""

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from evenrank.cli import console
from evenrank.cli.options import DatasetFolder, Json, file_option, page_path, write_page
from evenrank.cli.reports.gains import describe_settings, print_gains
from evenrank.core.storage import Remote, locate

if TYPE_CHECKING:
    from rich.table import Table

    from evenrank.cli.reports.dataset_data import RoutingLoads
    from evenrank.datasets.schema import Manifest

_MAX_LABELS = 8  # shown of a contextual feature
_ROUTING = """Routing of item ids: load of the busiest rank over the mean, all of train, for a
table of {rows:,} rows that stock TorchRec shards by rows, with a KeyMap of
each mode. All lookups of an id are on one rank, so no mode is below what the
most frequent id has alone."""


def inspect_command(
    path: DatasetFolder,
    html: Annotated[
        Path | None,
        file_option(help="Page to write. Default: PATH-report.html, next to the dataset; of a URL, in this folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the content of a dataset: events, what the split leaks, history lengths, vocabulary sizes, routing of items.

    Also writes one self-contained HTML page with plots and the expected gain from balancing. The last line of output is
    the path of the page. Example:

    \b
        evenrank inspect out/ml-20m --html ml-20m.html
    """
    from evenrank.datasets.event_statistics import read_statistics
    from evenrank.datasets.schema import read_manifest

    manifest = read_manifest(path)
    statistics = read_statistics(manifest)
    dataset = locate(path)
    name = dataset.name if isinstance(dataset, Remote) else dataset.resolve().name
    page = page_path(Path(name) if isinstance(dataset, Remote) else dataset, html)  # of a URL, in the current folder
    splits = {
        name: {"rows": one.rows, "events": one.interactions, "files": len(one.files), "lengths": one.lengths}
        for name, one in manifest.splits.items()
    }
    console.print_result(
        f"{dataset}: {manifest.dataset}, content {manifest.content_hash[:12]}\n",
        path=str(dataset),
        dataset=manifest.dataset,
        content_hash=manifest.content_hash,
        splits=splits,
        vocabulary_sizes=manifest.vocabulary_sizes,
        statistics=statistics,
        gains=[],
        routing=None,
    )
    for table in (splits_table(manifest, statistics.num_events), lengths_table(manifest), vocabulary_table(manifest)):
        console.print_result(table)
    console.print_aligned(statistics.describe())
    with console.stages() as on_stage:
        from evenrank.cli.reports.dataset_page import render_page
        from evenrank.datasets.store import open_store

        stores = {}
        for split in manifest.splits:
            on_stage(f"opening {split}")
            stores[split] = open_store(path, split)
        report = render_page(manifest, stores, name=name, on_stage=on_stage)
        write_page(page, report.html)
    if report.gains:
        console.print_result(f"Steps of {describe_settings()}:")
        print_gains(report.gains)
    if report.routing is not None:
        console.print_result(_ROUTING.format(rows=report.routing.num_embeddings), routing=report.routing)
        for table in routing_tables(report.routing):
            console.print_result(table)
    console.print_result(f"report: {page}", report=page)


def splits_table(manifest: "Manifest", num_events: int) -> "Table":
    """Return a table of the rows, events and files of each split and of all, which have `num_events`."""
    table = console.new_table("split", "rows", "events", "files", left=["split"])
    counts = {name: (split.rows, split.interactions, len(split.files)) for name, split in manifest.splits.items()}
    for name, of_split in counts.items():
        table.add_row(name, *(f"{count:,}" for count in of_split))
    table.add_section()
    rows, _, files = map(sum, zip(*counts.values(), strict=True))
    table.add_row("all, each event once", f"{rows:,}", f"{num_events:,}", f"{files:,}")
    return table


def lengths_table(manifest: "Manifest") -> "Table":
    """Return a table of the percentiles of history lengths in each split."""
    table = console.new_table("events per row", *manifest.splits, left=["events per row"])
    of_splits = [split.lengths for split in manifest.splits.values()]
    for name in dict.fromkeys(chain.from_iterable(of_splits)):
        table.add_row(name, *(f"{lengths[name]:,}" if name in lengths else "-" for lengths in of_splits))
    return table


def vocabulary_table(manifest: "Manifest") -> "Table":
    """Return a table of each feature's vocabulary size, which is the number of rows its embedding table needs."""
    table = console.new_table("feature", "largest id + 1", "labels", left=["feature", "labels"])
    for name, size in manifest.vocabulary_sizes.items():
        labels = [label for label in manifest.context_labels.get(name, ()) if label is not None]
        shown = ", ".join(labels[:_MAX_LABELS]) + (", ..." if len(labels) > _MAX_LABELS else "")
        table.add_row(name, f"{size:,}", shown)
    return table


def routing_tables(loads: "RoutingLoads") -> list["Table"]:
    """Return tables of the busiest rank's distinct ids and lookups over the mean, per mode and number of ranks."""
    lookups = {**loads.lookups, "most frequent": loads.most_frequent}
    tables = []
    for name, ratios in (("distinct ids", loads.ids), ("lookups", lookups)):
        table = console.new_table(name, *(f"{ranks:,}" for ranks in loads.ranks), left=[name], narrow=True)
        for label, values in ratios.items():
            table.add_row(label, *map(_format_ratio, values))
        tables.append(table)
    return tables


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"
