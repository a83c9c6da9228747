"""Recall of a small SASRec that is trained with different negatives.

    evenrank preprocess --dataset ml-20m --raw-dir raw --split leave-last:1 --out out/ml-20m
    .venv/bin/python scripts/bench/negatives.py --data out/ml-20m [--epochs 12] [--seeds 0 1 2] [--count 64]

Each run trains on the next items of the train split and ranks all items for the last event of each user; it prints one
JSON line: the recall of the target among the best 10 and 50, and the seconds of training.

    in-batch         the other targets of the batch that the user has not seen
    uniform          --count items per sample, each as probable as the others
    popularity       --count items per sample, drawn by events^0.75
    ..., log-Q       with the logarithm of the probability to be drawn subtracted from every score
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from evenrank.dataloader import LoaderConfig, Negatives, SequenceBatch, build_loader
from evenrank.datasets import read_manifest
from evenrank.training import RankingMetrics, in_batch_mask, scale_loss

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from ddp_sasrec import MAX_LENGTH, SASRec, longest

BATCH_SIZE = 32
KINDS = ("in-batch", "in-batch, log-Q", "uniform", "popularity", "popularity, log-Q")


def loss_of(model: SASRec, batch: SequenceBatch, kind: str) -> Tensor:
    """Return the sum of the losses of the next items: of a softmax over each and its negatives."""
    assert batch.negatives is not None
    assert batch.log_q is not None
    history = batch.features["item_id"]
    lengths, offsets, items = history.lengths(), history.offsets(), history.values()
    is_first = torch.zeros(len(items) + 1, dtype=torch.bool)
    is_first[offsets] = True
    states = model.encode(history, longest(batch), "padded")[~is_first[1:]]  # before each target
    targets = model.items(items[~is_first[:-1]])
    positive = (states * targets).sum(dim=1)
    if kind.startswith("in-batch"):
        scores, is_negative = states @ targets.T, in_batch_mask(batch)
        negative_log_q = batch.log_q["positive"].values()[None]
    else:
        rows = torch.repeat_interleave(torch.arange(len(lengths)), (lengths - 1).clamp(min=0))
        drawn = batch.negatives["item_id"].values().view(batch.num_real, -1)
        scores = torch.bmm(model.items(drawn)[rows], states[:, :, None]).squeeze(2)
        negative_log_q = batch.log_q["negative"].values().view_as(drawn)[rows]
        is_negative = torch.ones_like(scores, dtype=torch.bool)
    if kind.endswith("log-Q"):
        positive, scores = positive - batch.log_q["positive"].values(), scores - negative_log_q
    scores = scores.masked_fill(~is_negative, -torch.inf)
    logits = torch.cat([positive[:, None], scores], dim=1)
    return functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64), reduction="sum")


def train(data: Path, kind: str, seed: int, epochs: int, count: int) -> SASRec:
    """Train a model from scratch."""
    torch.manual_seed(seed)
    model = SASRec(read_manifest(data).vocabulary_sizes["item_id"])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    negatives = Negatives(count=count)
    if kind != "uniform":  # the targets of a batch come with the frequencies of items, to the power of 1
        is_in_batch = kind.startswith("in-batch")
        negatives = Negatives(count=1 if is_in_batch else count, by="popularity", alpha=1.0 if is_in_batch else 0.75)
    config = LoaderConfig(batch_size=BATCH_SIZE, max_history_length=MAX_LENGTH, seed=seed, negatives=negatives)
    loader = build_loader(data, config, rank=0, world_size=1)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            batch.world_loss_tokens, batch.dp_size = batch.loss_tokens, 1
            scale_loss(loss_of(model, batch, kind), batch).backward()
            optimizer.step()
    return model


@torch.no_grad()
def evaluate(model: SASRec, data: Path) -> dict[str, float]:
    """Rank all items for the last event of each user."""
    config = LoaderConfig(split="eval", batch_size=64, max_history_length=MAX_LENGTH - 1, max_num_candidates=1)
    metrics = RankingMetrics(ks=(10, 50))
    for batch in build_loader(data, config, rank=0, world_size=1):
        history = batch.features["item_id"]
        last = history.offsets()[1:][: batch.num_real] - 1
        scores = model.encode(history, longest(batch), "padded")[last - 1] @ model.items.weight.T
        scores[:, 0] = -torch.inf  # id 0 stands for no item
        metrics.update(1 + (~(scores <= scores.gather(1, history.values()[last, None]))).sum(dim=1))  # NaN is last
    return {name: round(value, 4) for name, value in metrics.compute().items() if "recall" in name}


def main() -> None:
    """Train and evaluate each kind with each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("out/ml-20m"))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--count", type=int, default=64)
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        for kind in KINDS:
            start = time.perf_counter()
            model = train(arguments.data, kind, seed, arguments.epochs, arguments.count)
            seconds = round(time.perf_counter() - start, 1)
            row = {"negatives": kind, "seed": seed, **evaluate(model, arguments.data), "seconds": seconds}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
