"""What programs of training loops share: a small next-item model, which stands for any model, and how they run."""

import functools
import gc
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from evenrank.cli.main import run_command
from evenrank.dataloader import SequenceBatch
from evenrank.dataloader.balance import SelfAttentionCost

WIDTH, HEADS, NUM_NEGATIVES = 32, 2, 64
COST = SelfAttentionCost(hidden=WIDTH, heads=HEADS, head_dim=WIDTH // HEADS, layers=1, ffn_multiplier=4)
"""What a sample of n events costs."""


class NextItem(nn.Module):
    """Causal self-attention over each history, and the loss of predicting the next item among sampled negatives."""

    def __init__(self, num_items: int) -> None:
        super().__init__()
        self.items = nn.Embedding(num_items, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        nn.init.normal_(self.items.weight, std=0.1)

    def forward(self, batch: SequenceBatch) -> Tensor:
        """Return the sum of the losses of this rank's events but the first of each history, a scalar."""
        ids, lengths = batch.features["item_id"].values(), batch.features["item_id"].lengths()
        x = self.items(ids)
        x = x + torch.cat([attend(sample) for sample in self.qkv(x).split(lengths.tolist())])
        x = x + self.mlp(x)
        has_next = batch.real_values("item_id")
        has_next[lengths.cumsum(0)[lengths > 0] - 1] = False
        hidden, target = x[has_next], ids[has_next.roll(1)]
        # The same on all ranks, and again when this step is trained again; others in each epoch.
        seeded = torch.Generator().manual_seed(batch.epoch << 32 | batch.position)
        negatives = torch.randint(1, self.items.num_embeddings, (NUM_NEGATIVES,), generator=seeded).to(ids.device)
        positive = (hidden * self.items(target)).sum(-1, keepdim=True)
        negative = (hidden @ self.items(negatives).T).masked_fill(target[:, None] == negatives, -torch.inf)
        logits = torch.cat([positive, negative], dim=1)
        return F.cross_entropy(logits, torch.zeros_like(target), reduction="sum")


def attend(qkv: Tensor) -> Tensor:
    """Return the causal self-attention [n, WIDTH] of a sample with the projections `qkv` [n, 3 * WIDTH]."""
    q, k, v = qkv.view(len(qkv), 3, HEADS, WIDTH // HEADS).transpose(0, 2).unbind(1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


def report(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def run(program: Callable[..., None]) -> None:
    """Run a function as a command, whose options are its arguments, and destroy the process group that it leaves."""

    @functools.wraps(program)
    def command(**options: object) -> None:
        program(**options)
        gc.collect()  # DistributedDataParallel refers to the process group, in cycles
        dist.destroy_process_group()

    run_command(command)
