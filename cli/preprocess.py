"""`evenrank preprocess`: raw logs -> sequence Parquet."""

from pathlib import Path
from typing import Annotated

import typer

from evenrank.cli import console
from evenrank.preprocess import DATASETS, PreprocessConfig, preprocess


def preprocess_command(
    dataset: Annotated[str, typer.Option(help=f"Which dataset: {', '.join(DATASETS)}.", show_default=False)],
    raw_dir: Annotated[
        Path,
        typer.Option(
            help="Folder of the raw files: DIR/ml-1m/ratings.dat and users.dat, DIR/ml-20m/ratings.csv, or the "
            "official zip in DIR. What is missing is downloaded into it.",
            metavar="DIR",
        ),
    ] = Path("raw"),
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write; a dataset that is there is replaced once the new one is complete. "
            "Default: out/DATASET.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    eval_fraction: Annotated[float, typer.Option(help="Part of the users that goes to the eval split, 0 to 1.")] = 0.3,
    seed: Annotated[int, typer.Option(help="Of the split, and of synthetic data.")] = 0,
) -> None:
    """Turn raw interaction logs into sequence Parquet: one row per user, events in time order.

    Writes OUT/train/*.parquet, OUT/eval/*.parquet and OUT/manifest.json. For example:

    \b
        evenrank preprocess --dataset ml-20m --raw-dir raw --out out/ml-20m
    """
    folder = Path("out", dataset) if out is None else out
    config = PreprocessConfig(dataset=dataset, out=folder, raw_dir=raw_dir, eval_fraction=eval_fraction, seed=seed)
    with console.stages() as on_stage:
        manifest = preprocess(config, on_stage=on_stage, show_progress=console.stderr.is_terminal)
    for name, split in manifest.splits.items():
        console.stdout.print(f"{folder}/{name}: {split.rows:,} users, {split.interactions:,} interactions")
