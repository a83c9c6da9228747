"""`evenrank inspect`: what is in a dataset, as tables on the terminal and as a page with pictures."""

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from evenrank.cli import console
from evenrank.datasets.schema import Manifest, read_manifest


def inspect_command(
    path: Annotated[Path, typer.Argument(help="Folder that `evenrank preprocess` wrote.", show_default=False)],
    html: Annotated[
        Path | None,
        typer.Option(
            help="The page to write. Default: PATH-report.html, beside the dataset.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show what is in a dataset: rows, interactions, history lengths, vocabulary sizes.

    Also writes one self-contained HTML page, with pictures and what balancing would gain, and prints its path last.
    For example:

    \b
        evenrank inspect out/ml-20m --html ml-20m.html
    """
    # Not above: matplotlib takes a second to import, which the other commands need not wait for.
    from evenrank.cli.reports.dataset_page import build_page, page_path, write_page

    manifest = read_manifest(path)
    page = page_path(path, html)
    console.stdout.print(f"{path}: {manifest.dataset}, content {manifest.content_hash[:12]}\n")
    for table in (splits_table(manifest), lengths_table(manifest), vocabulary_table(manifest)):
        console.stdout.print(table)
    with console.stages() as on_stage:
        write_page(page, build_page(path, manifest, on_stage=on_stage))
    console.stdout.print(f"report: {page}")


def splits_table(manifest: Manifest) -> Table:
    """Rows, interactions and files of each split, and of all together."""
    table = _table("split", "users", "interactions", "files")
    for name, split in manifest.splits.items():
        table.add_row(name, f"{split.rows:,}", f"{split.interactions:,}", str(len(split.files)))
    splits = manifest.splits.values()
    table.add_section()
    table.add_row(
        "all",
        f"{sum(split.rows for split in splits):,}",
        f"{sum(split.interactions for split in splits):,}",
        str(sum(len(split.files) for split in splits)),
    )
    return table


def lengths_table(manifest: Manifest) -> Table:
    """Percentiles of the history lengths of each split."""
    table = _table("events of a user", *manifest.splits)
    names = dict.fromkeys(name for split in manifest.splits.values() for name in split.lengths)
    for name in names:
        lengths = [split.lengths.get(name) for split in manifest.splits.values()]
        table.add_row(name, *("-" if length is None else f"{length:,}" for length in lengths))
    return table


def vocabulary_table(manifest: Manifest) -> Table:
    """Each feature's number of ids, which is the size that its embedding table needs."""
    table = _table("feature", "largest id + 1", "labels")
    for name, size in manifest.vocabulary_sizes.items():
        labels = [label for label in manifest.context_labels.get(name, ()) if label is not None]
        shown = ", ".join(labels[:8]) + (", ..." if len(labels) > 8 else "")
        table.add_row(name, f"{size:,}", Text(shown))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="left" if name == "labels" else "right")
    return table
