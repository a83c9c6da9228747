"""The main job from nothing: synthetic data -> Parquet -> balanced batches on several processes, a table, a picture."""

import pickle
import tempfile
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from evenrank.cli import console
from evenrank.cli.balance_walk import Walk, walk_epoch
from evenrank.cli.reports.epoch_report import EXPLANATION, draw_loads, load_table
from evenrank.dataloader import LoaderConfig
from evenrank.dataloader.balance import STRATEGIES, HSTUCost
from evenrank.preprocess import PreprocessConfig, preprocess

_RANKS = 4
_LOADER = LoaderConfig(batch_size=32, max_history_length=2048, max_num_candidates=1)
# The model of the published balancing results: 8 layers, width 1024, 4 heads of 256.
_COST = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, contextual=("segment",))


def demo(out: Path) -> None:
    """Run the whole job below the folder `out` and print what it shows."""
    data = out / "data"
    with console.stages() as on_stage:
        manifest = preprocess(PreprocessConfig(dataset="synthetic", out=data), on_stage=on_stage)
    train = manifest.splits["train"]
    console.stdout.print(
        f"{data}: {train.rows:,} users, {train.interactions:,} interactions; histories of median "
        f"{train.lengths['p50']:,}, longest {train.lengths['max']:,}"
    )
    console.stdout.print(f"one epoch on {_RANKS} processes (Gloo, CPU), batches of {_LOADER.batch_size}:")
    walks = _walk_on_ranks(data)
    console.stdout.print(load_table(walks))
    console.stdout.print(EXPLANATION)
    console.stdout.print(f"every strategy: {walks[0].samples:,} samples, each seen exactly once and unaltered")
    picture = out / "balance.png"
    title = f"{_RANKS} ranks, {_LOADER.batch_size} samples each, lognormal histories, cost of an HSTU model"
    draw_loads(walks, picture, title=title)
    console.stdout.print(f"picture: {picture}")


def _walk_on_ranks(data: Path) -> list[Walk]:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "walks"
        spawn(_rank_main, args=(data, f"file://{folder}/store", results), nprocs=_RANKS)
        walks: list[Walk] = pickle.loads(results.read_bytes())
        return walks


def _rank_main(rank: int, data: Path, store: str, results: Path) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=_RANKS, timeout=timedelta(seconds=100))
    walks = [
        walk_epoch(data, _LOADER, cost=_COST, strategy=strategy, show_progress=rank == 0) for strategy in STRATEGIES
    ]
    if rank == 0:
        # A file, because a pipe holds 64 KiB, and nobody reads it before the ranks have ended.
        results.write_bytes(pickle.dumps(walks))
    dist.destroy_process_group()
