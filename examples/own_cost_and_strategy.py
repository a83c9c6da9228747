"""A cost and a strategy of one's own, next to the built-in ones.

    evenrank preprocess --dataset synthetic --out out/synthetic
    torchrun --nproc_per_node 2 examples/own_cost_and_strategy.py --data out/synthetic

The cost is that of attention within a sliding window, in which a long history costs less than in full attention. The
strategy gives each sample, heaviest first, to the rank with the least load. Every line printed is for the same samples,
with the load of the heaviest rank over the mean of the ranks, by the cost of one's own.
"""

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evenrank.cli.main import run_command
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import (
    BalanceConfig,
    Cost,
    PartitionProblem,
    SelfAttentionCost,
    StepMetrics,
    register_strategy,
    summarize,
)
from evenrank.datasets import read_manifest

HIDDEN, LAYERS, WINDOW = 64, 2, 64
MAX_LENGTH = 2048
BATCH_SIZE = 16  # per rank


@dataclass(frozen=True, kw_only=True)
class SlidingWindowCost:
    """Multiplications of a transformer in which an event attends to the last `window` events, itself included.

    A cost is any function of the lengths. Ranks compare it: a dataclass by its fields, a function by its name.
    """

    hidden: int
    layers: int
    window: int

    def __call__(
        self, lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the cost of each sample: int64 [B]."""
        events = lengths["item_id"]
        in_full = np.minimum(events, self.window)  # events that see all events before them
        pairs = in_full * (in_full + 1) // 2 + (events - in_full) * self.window
        costs: NDArray[np.int64] = self.layers * (12 * events * self.hidden**2 + 2 * pairs * self.hidden)
        return costs

    def tokens(self, lengths: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return the tokens of each sample: int64 [B], by which strategies choose what to move."""
        return lengths["item_id"]


@register_strategy("heaviest-first")
def heaviest_first(problem: PartitionProblem) -> NDArray[np.int32]:
    """Give each sample, heaviest first, to the rank with the least load that has a row left.

    Every rank calls this and has to get the same result, so it is a pure function of the problem.
    """
    rows_per_rank = len(problem.costs) // problem.world_size
    rank_of = np.empty(len(problem.costs), dtype=np.int32)
    ranks = [(0, 0, rank) for rank in range(problem.world_size)]  # load, rows, number
    for slot in problem.order:
        load, rows, rank = heapq.heappop(ranks)
        rank_of[slot] = rank
        if rows + 1 < rows_per_rank:
            heapq.heappush(ranks, (load + int(problem.costs[slot]), rows + 1, rank))
    return rank_of


def compare(data: Path, cost: Cost, strategy: str, own_cost: Cost, num_steps: int) -> str:
    """Balance some steps by a cost with a strategy; return the load by one's own cost, and how many samples moved."""
    config = LoaderConfig(batch_size=BATCH_SIZE, max_history_length=MAX_LENGTH)
    steps: list[StepMetrics] = []
    balance = BalanceConfig(cost=cost, strategy=strategy, on_step=steps.append)
    loader = build_loader(data, config, rank=dist.get_rank(), world_size=dist.get_world_size(), balance=balance)
    ratios = []
    for batch in itertools.islice(loader, num_steps):
        lengths = batch.features["item_id"].lengths().numpy().astype(np.int64)
        load = own_cost({"item_id": lengths}, np.zeros_like(lengths)).sum()
        loads = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(loads, torch.tensor([load]))
        ratios.append(float(torch.cat(loads).max() / torch.cat(loads).double().mean()))
    moved = summarize(steps).moved_samples
    return f"heaviest rank over mean {np.mean(ratios):.4f}, worst step {max(ratios):.4f}, {moved:.0%} of samples moved"


def main(data: Path = Path("out/synthetic"), steps: int = 20) -> None:
    """Compare costs and strategies; run it under torchrun."""
    read_manifest(data)  # raises if there is no dataset, before anything starts
    own_cost = SlidingWindowCost(hidden=HIDDEN, layers=LAYERS, window=WINDOW)
    full = SelfAttentionCost(hidden=HIDDEN, heads=2, head_dim=HIDDEN // 2, layers=LAYERS, ffn_multiplier=4)
    dist.init_process_group("gloo")
    runs: list[tuple[str, Cost, str]] = [
        ("not balanced", own_cost, "none"),
        ("cost of full attention", full, "lpt-swap"),
        ("own cost, lpt-swap", own_cost, "lpt-swap"),
        ("own cost, min-move", own_cost, "min-move"),
        ("own cost, karmarkar-karp", own_cost, "karmarkar-karp"),
        ("own cost, own strategy", own_cost, "heaviest-first"),
    ]
    for name, cost, strategy in runs:
        result = compare(data, cost, strategy, own_cost, steps)
        if dist.get_rank() == 0:
            print(f"{name:<25}| {result}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
