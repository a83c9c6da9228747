"""`evenrank inspect`: show the content of a dataset, as tables and as a page with plots."""

import textwrap
from pathlib import Path
from typing import Annotated

from evenrank.cli import console
from evenrank.cli.options import DatasetFolder, Json, file_option, page_path, write_page
from evenrank.cli.reports.gains import print_gains
from evenrank.core.storage import Remote, locate

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
    from evenrank.cli.reports.dataset_data import describe_gains, routing_tables, tables_of
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
    for table in tables_of(manifest, statistics.num_events):
        console.print_result(table)
    audit = {what: f"{count:,}" for what, count in manifest.options.get("audit", {}).items()}
    console.print_aligned({**statistics.describe(), **audit})
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
        console.print_result(textwrap.fill(describe_gains(len(stores["train"]), str(dataset)), 79))
        print_gains(report.gains, compared="model")
    if report.routing is not None:
        console.print_result(_ROUTING.format(rows=report.routing.num_embeddings), routing=report.routing)
        for table in routing_tables(report.routing):
            console.print_result(table)
    console.print_result(f"report: {page}", report=page)
