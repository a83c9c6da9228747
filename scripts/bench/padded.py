"""A SASRec that pads every batch to its longest history: padded tokens and step times, with and without windows.

    .venv/bin/python scripts/bench/padded.py DATASET [--ranks 2] [--epochs 20] [--windows 4,8,16]

DATASET is a folder that `evenrank preprocess --split none` wrote. The variants train with DistributedDataParallel, on
GPUs over NCCL where there are enough, else on the CPU over Gloo. They take turns, an epoch each; a StepTimer measures
all epochs but the first. Prints one JSON line per variant:

    real_tokens      events of a step, all ranks together; padded_tokens: rows times the longest history of each rank
    step_ms          mean measured time of a step, with the 5th, 50th and 95th percentile behind it
    promised         time over that of `unbalanced`, by the cost; measured: the same by the clock
"""

import argparse
import gc
import json
import multiprocessing
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, PaddedCost, SelfAttentionCost, StepMetrics
from evenrank.datasets import read_manifest
from evenrank.training import StepTimer, scale_loss

HIDDEN, HEADS, LAYERS, MAX_LENGTH, BATCH_SIZE, NUM_NEGATIVES = 256, 4, 4, 1024, 32, 128
COST = SelfAttentionCost(hidden=HIDDEN, heads=HEADS, head_dim=HIDDEN // HEADS, layers=LAYERS, ffn_multiplier=4)


class PaddedSASRec(nn.Module):
    """Predicts each item of a history among random ones, on dense batches [rows, longest] with 0 for padding."""

    def __init__(self, num_items: int) -> None:
        super().__init__()
        self.items = nn.Embedding(num_items, HIDDEN)
        self.positions = nn.Embedding(MAX_LENGTH, HIDDEN)
        sizes: dict[str, Any] = {"d_model": HIDDEN, "nhead": HEADS, "dim_feedforward": 4 * HIDDEN, "dropout": 0.0}
        sizes |= {"activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(**sizes) for _ in range(LAYERS))

    def forward(self, items: Tensor, negatives: Tensor) -> Tensor:
        """Return the sum of the losses of all next items."""
        x = self.items(items) + self.positions.weight[: items.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(items.shape[1], device=items.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        states, labels = x[:, :-1], items[:, 1:]
        positive = (states * self.items(labels)).sum(dim=2, keepdim=True)
        losses = torch.cat([positive, states @ self.items(negatives).T], dim=2).logsumexp(dim=2) - positive.squeeze(2)
        loss_sum: Tensor = (losses * (labels > 0)).sum()
        return loss_sum


def variants(windows: Sequence[int]) -> dict[str, BalanceConfig]:
    """Return the ways to balance, by name."""
    padded = PaddedCost(COST)
    return {
        "unbalanced": BalanceConfig(cost=padded, strategy="none"),
        "equal sums": BalanceConfig(cost=COST),
        **{f"window {window}": BalanceConfig(cost=padded, window=window) for window in windows},
    }


class Variant:
    """One way to balance, and what its steps took."""

    def __init__(self, balance: BalanceConfig, data: Path, rank: int, world_size: int, *, on_gpu: bool) -> None:
        config = LoaderConfig(
            batch_size=BATCH_SIZE, max_history_length=MAX_LENGTH, num_workers=1, pin_memory=on_gpu, drop_last=True
        )
        balance = replace(balance, on_step=lambda metrics: self.timer(metrics))
        self.timer = StepTimer()
        self.loader = build_loader(data, config, rank=rank, world_size=world_size, balance=balance)
        self.steps: list[StepMetrics] = []
        self.longest: list[int] = []  # of this rank, in each step

    def train_epoch(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Train an epoch, and measure its steps."""
        num_items: int = model.module.items.num_embeddings  # type: ignore[union-attr,assignment]
        with StepTimer(self.steps.append, device=device) as self.timer:
            for batch in self.loader:
                longest = max(2, (batch.max_lengths or {})["item_id"])
                items = batch.to(device, non_blocking=True).features["item_id"].to_padded_dense(longest)
                negatives = torch.randint(1, num_items, (NUM_NEGATIVES,), device=device)
                loss = scale_loss(model(items, negatives), batch)
                self.timer.watch(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                self.longest.append(longest)


def run_rank(rank: int, data: Path, store: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Be a rank of the job; return the rows of `train`."""
    on_gpu = torch.cuda.device_count() >= options.ranks
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    torch.set_num_threads(1)
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=store, rank=rank, world_size=options.ranks)
    rows = train(rank, data, device, options)
    gc.collect()  # DistributedDataParallel refers to the process group, in cycles
    dist.destroy_process_group()
    return rows


def train(rank: int, data: Path, device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train all variants in turns; return a row for each on rank 0."""
    torch.manual_seed(0)
    model = DistributedDataParallel(PaddedSASRec(read_manifest(data).vocabulary_sizes["item_id"]).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trained = {
        name: Variant(balance, data, rank, options.ranks, on_gpu=device.type == "cuda")
        for name, balance in variants(options.windows).items()
    }
    for epoch in range(options.epochs):
        for variant in trained.values():
            variant.train_epoch(model, optimizer, device)
            if epoch == 0:
                variant.steps.clear()
                variant.longest.clear()
    rows = []
    for name, variant in trained.items():
        longest: list[Any] = [None] * options.ranks
        dist.all_gather_object(longest, variant.longest)
        if rank == 0:  # which has the times of all ranks
            rows.append({"variant": name, **measured(variant.steps, np.array(longest))})
    return rows


def measured(steps: Sequence[StepMetrics], longest: "np.ndarray[Any, Any]") -> dict[str, Any]:
    """Return the numbers of a variant, given the longest history of each rank in each step: [ranks, steps]."""
    times = [(step.compute_seconds, step.wait_seconds) for step in steps]
    ms = np.array([1e3 * (own + wait).mean() for own, wait in times if own is not None and wait is not None])
    costs = np.array([COST.of_tokens(row, np.zeros_like(row)) for row in longest])
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "steps": len(ms),
        "real_tokens": round(float(np.mean([step.tokens for step in steps]))),
        "padded_tokens": round(BATCH_SIZE * float(longest.sum(axis=0).mean())),
        "step_ms": [round(float(value), 2) for value in (ms.mean(), *np.percentile(ms, (5, 50, 95)))],
        "promised": float(costs.max(axis=0).mean()),
        "measured": float(ms.mean()),
    }


def main() -> None:
    """Run all variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--windows", type=lambda text: [int(part) for part in text.split(",")], default=[4, 8, 16])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(options.ranks) as pool:
        arguments = (options.data, f"file://{folder}/store", options)
        ranks = [pool.apply_async(run_rank, (rank, *arguments)) for rank in range(options.ranks)]
        rows = ranks[0].get(timeout=1800)
    for row in reversed(rows):  # the first one, to which all are compared, last
        row |= {name: round(row[name] / rows[0][name], 3) for name in ("promised", "measured")}
    for row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
