"""Semantic ids: a small causal decoder that predicts the codes of the next item, on balanced batches.

    evenrank preprocess --dataset synthetic --out out/synthetic
    torchrun --nproc_per_node 2 examples/train_semantic_ids.py --data out/synthetic

An item is a tuple of codes, one per level, instead of a row of one large table (as in TIGER, Rajput et al., 2023).
Without --codes, a folder of `evenrank semantic-ids`, they are made up from the item ids here. The model and the beam
search over the items that exist are those of examples/semantic_ids. What evenrank adds is in `main` and
`evaluate`: LoaderConfig, which turns histories into tokens, and the balance of the loader.
"""

import itertools
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from evenrank.dataloader import CodeTable, Loader, LoaderConfig, SemanticIdBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, StepMetrics, summarize
from evenrank.dataloader.codes import read_codes
from evenrank.datasets import read_manifest
from evenrank.training import LossAverage, RankingMetrics, scale_loss
from next_item import report, run
from semantic_ids import Catalogue, DecoderConfig, SemanticIdModel, beam_search

LEVELS, BEAMS = 3, 10


def make_up_codes(num_items: int) -> CodeTable:
    """Return the digits of each item id as its codes. Id 0 stands for no item and has none."""
    size = int(np.ceil(num_items ** (1 / LEVELS)))  # of each codebook
    ids = np.arange(num_items)
    codes = np.stack([ids // size ** (LEVELS - 1 - level) % size for level in range(LEVELS)], axis=1).astype(np.int32)
    codes[0] = -1
    return CodeTable(codes=codes, codebook_sizes=(size,) * LEVELS)


def open_loader(data: Path, codes: CodeTable, split: str, balance: BalanceConfig) -> Loader[SemanticIdBatch]:
    """Return this rank's loader of a split: 16 samples per rank, of 64 events at most, of a token per level each."""
    config = LoaderConfig(split=split, codes=codes, batch_size=16, max_history_length=64, candidate_feature=True)
    return build_loader(data, config, rank=dist.get_rank(), world_size=dist.get_world_size(), balance=balance)


def evaluate(model: SemanticIdModel, loader: Loader[SemanticIdBatch], catalogue: Catalogue) -> str:
    """Search for the last item of users that are not trained on."""
    metrics = RankingMetrics(ks=(1, BEAMS))
    for batch in itertools.islice(loader, 10):
        metrics.update(beam_search(model, batch, catalogue, beams=BEAMS).places_of_targets(batch))
    return " | ".join(f"{name} {value:.4f}" for name, value in metrics.compute().items() if "recall" in name)


def main(data: Path = Path("out/synthetic"), codes: Path | None = None, steps: int = 100) -> None:
    """Train on semantic ids, and evaluate before and after; run it under torchrun."""
    num_items = read_manifest(data).vocabulary_sizes["item_id"]
    table = make_up_codes(num_items) if codes is None else read_codes(codes)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = SemanticIdModel(DecoderConfig(codebook_sizes=table.codebook_sizes, hidden=64, heads=2, layers=2, dropout=0))
    parallel, catalogue = DistributedDataParallel(model), Catalogue(table)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    average = LossAverage()
    loads: list[StepMetrics] = []
    balance = BalanceConfig(cost=model.config.cost(), on_step=loads.append)
    loader = open_loader(data, table, "train", balance)
    held_out = open_loader(data, table, "eval", BalanceConfig(cost=model.config.cost()))
    report(f"before training | {evaluate(model, held_out, catalogue)}")
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, batch in enumerate(itertools.islice(epochs, steps), start=1):
        optimizer.zero_grad()
        loss_sums, _ = parallel(batch)  # of each level
        scale_loss(loss_sums, batch).sum().backward()  # each code of each item is a loss token
        optimizer.step()
        average.update(loss_sums.sum(), batch)
        if step % 20 == 0 or step == steps:
            (loss,), load = average.compute(), summarize(loads)
            ratios = f"{load.ratio_before:.3f} before balancing, {load.ratio_after:.3f} after"
            report(f"step {step} | loss per code {loss:.4f} | heaviest rank over lower bound {ratios}")
            average.reset()
            loads.clear()
    report(f"after training | {evaluate(model, held_out, catalogue)}")


if __name__ == "__main__":
    run(main)
