"""A next-item model in plain PyTorch on balanced batches, with an evaluation and a checkpoint that it resumes from."""

import gc
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.sparse.jagged_tensor import JaggedTensor

from evenrank.cli.main import run_command
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, SelfAttentionCost
from evenrank.datasets import read_manifest
from evenrank.training import LossAverage, RankingMetrics, scale_loss


class NextItem(nn.Module):
    """Causal self-attention over each history, and a score for each item that may come next."""

    def __init__(self, num_items: int, width: int = 32) -> None:
        super().__init__()
        self.items, self.qkv = nn.Embedding(num_items, width), nn.Linear(width, 3 * width)
        self.scores = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, num_items))

    def forward(self, history: JaggedTensor) -> Tensor:
        """Return the scores of all items after each event: [events, num_items]."""
        x = self.items(history.values())
        rows = self.qkv(x).split(history.lengths().tolist())  # each [length, 3 * width]; length 0 in rows of padding
        heads = (row[None].chunk(3, dim=2) for row in rows)  # query, key and value, [1, length, width] each
        attended = [F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in heads]
        scores: Tensor = self.scores(x + torch.cat(attended, dim=1)[0])
        return scores


def last_events(history: JaggedTensor, min_length: int) -> Tensor:
    """Return where in the values each history of at least this many events ends."""
    ends: Tensor = history.offsets()[1:][history.lengths() >= min_length]
    return ends - 1


@torch.no_grad()
def evaluate(model: NextItem, data: Path, rank: int, world_size: int) -> dict[str, float]:
    """Rank all items for the last event of each user in the eval split; the same result on all ranks."""
    config, metrics = LoaderConfig(split="eval", batch_size=64, max_history_length=200), RankingMetrics(ks=(10,))
    for batch in build_loader(data, config, rank=rank, world_size=world_size):
        history = batch.features["item_id"]
        last = last_events(history, min_length=2)
        scores = model(history)[last - 1]  # after the event before the last one
        of_target = scores.gather(1, history.values()[last, None])
        metrics.update(1 + (~(scores <= of_target)).sum(dim=1))  # 1: the best place; of NaN it is the last
    return metrics.compute()


def train(data: Path, num_items: int, steps: int, checkpoint: Path) -> None:
    """Train up to a step, from the checkpoint if there is one; evaluate, and save."""
    torch.manual_seed(0)
    model, average = NextItem(num_items), LossAverage()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parallel, optimizer = DistributedDataParallel(model), torch.optim.Adam(model.parameters(), lr=3e-3)
    cost = SelfAttentionCost(hidden=32, heads=1, head_dim=32, layers=1, ffn_multiplier=4)
    config, balance = LoaderConfig(batch_size=16, max_history_length=200), BalanceConfig(cost=cost)
    loader = build_loader(data, config, rank=rank, world_size=world_size, balance=balance)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    done = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        done = saved["steps"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for step, batch in zip(range(done + 1, steps + 1), chain.from_iterable(repeat(loader)), strict=False):
        history = batch.features["item_id"]
        has_next = torch.ones(len(history.values()), dtype=torch.bool)
        has_next[last_events(history, min_length=1)] = False
        loss = F.cross_entropy(parallel(history)[has_next], history.values()[has_next.roll(1)], reduction="sum")
        scale_loss(loss, batch).backward()  # divided by the loss tokens of all ranks
        optimizer.step()
        optimizer.zero_grad()
        average.update(loss, batch)
        if step % 20 == 0:
            (mean,) = average.compute()  # over all ranks
            average.reset()
            if rank == 0:
                print(f"step {step} | loss {mean:.4f}", flush=True)
    state = {name: part.state_dict() for name, part in parts.items()} | {"steps": steps}
    scores = evaluate(model, data, rank, world_size)
    if rank == 0:
        torch.save(state, checkpoint)
        print("evaluation |", " | ".join(f"{name} {value:.4f}" for name, value in scores.items()))


def main(data: Path = Path("out/shop"), steps: int = 120, checkpoint: Path = Path("out/own-model.pt")) -> None:
    """Train up to a step, evaluate, and save; run it under torchrun."""
    num_items = read_manifest(data).vocabulary_sizes["item_id"]
    dist.init_process_group("gloo")
    train(data, num_items, steps, checkpoint)
    gc.collect()  # DistributedDataParallel refers to the process group, in cycles
    dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
