"""SASRec with DistributedDataParallel on balanced batches: next items, sampled negatives, evaluation.

    evenrank preprocess --dataset synthetic --out out/synthetic
    torchrun --nproc_per_node 2 examples/ddp_sasrec.py --data out/synthetic

Everything of evenrank is in `main` and `evaluate`: the loader, which balances its batches, `scale_loss`, and averages
and metrics over all ranks. The model above them is plain PyTorch. It attends to padded histories or, with `--attention
jagged`, without padding; before training, both are checked to have the same loss.
"""

import itertools
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.sparse.jagged_tensor import JaggedTensor

from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, SelfAttentionCost, StepMetrics, summarize
from evenrank.datasets import read_manifest
from evenrank.training import LossAverage, RankingMetrics, scale_loss
from next_item import report, run

HIDDEN, HEADS, LAYERS = 64, 2, 2
MAX_LENGTH, BATCH_SIZE = 128, 16  # events of a history, and samples of a rank
NUM_NEGATIVES = 128  # shared by all positions of a batch

Kind = Literal["padded", "jagged"]


def padded_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_length: int) -> Tensor:
    """Attend within each history, all padded to the longest. q, k, v and the result: [tokens, heads, head_dim]."""

    def pad(x: Tensor) -> Tensor:  # [rows, heads, max_length, head_dim]
        rows = JaggedTensor(x.flatten(1), offsets=offsets).to_padded_dense(max_length)
        by_head: Tensor = rows.unflatten(2, x.shape[1:]).transpose(1, 2)
        return by_head

    # Causal attention never looks at the padding, which comes last.
    attended = F.scaled_dot_product_attention(pad(q), pad(k), pad(v), is_causal=True).transpose(1, 2)
    is_token = torch.arange(max_length, device=q.device) < offsets.diff()[:, None]
    return attended[is_token]


def jagged_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_length: int) -> Tensor:
    """Attend within each history, one by one, without padding; `varlen_attn` of PyTorch takes all at once on a GPU."""
    lengths = offsets.diff().tolist()
    rows = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)), strict=True)  # [heads, length, head_dim]
    attended = [F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in rows]
    return torch.cat(attended, dim=1).transpose(0, 1)


ATTENTIONS = {"padded": padded_attention, "jagged": jagged_attention}


class Block(nn.Module):
    """Causal self-attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.feed_forward = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, offsets: Tensor, max_length: int, kind: Kind) -> Tensor:
        """Return the next layer's input, [tokens, HIDDEN] like x."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(1, (3, HEADS, HIDDEN // HEADS)).unbind(1)
        x = x + self.out(ATTENTIONS[kind](q, k, v, offsets, max_length).flatten(1))
        out: Tensor = x + self.feed_forward(self.norm2(x))
        return out


class SASRec(nn.Module):
    """Predicts each item of a history from those before it, among sampled negatives (Kang and McAuley, 2018)."""

    def __init__(self, num_items: int) -> None:
        super().__init__()
        self.items = nn.Embedding(num_items, HIDDEN)
        self.positions = nn.Embedding(MAX_LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        nn.init.normal_(self.items.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def encode(self, history: JaggedTensor, max_length: int, kind: Kind) -> Tensor:
        """Return the state after each event: [tokens, HIDDEN]."""
        items, offsets = history.values(), history.offsets()
        starts = torch.repeat_interleave(offsets[:-1], offsets.diff(), output_size=len(items))
        x = self.items(items) + self.positions(torch.arange(len(items), device=items.device) - starts)
        for block in self.blocks:
            x = block(x, offsets, max_length, kind)
        normed: Tensor = self.norm(x)
        return normed

    def forward(self, history: JaggedTensor, negatives: Tensor, max_length: int, kind: Kind) -> Tensor:
        """Return the sum of the losses: of a softmax over the next item and the negatives, for each next item."""
        items, offsets = history.values(), history.offsets()
        states = self.encode(history, max_length, kind)
        # The labels are the items, shifted by one. The last event of a history has none: another history follows it.
        labels = items.roll(-1)
        is_start = torch.zeros(len(items) + 1, dtype=torch.bool, device=items.device)
        is_start[offsets] = True
        positive = (states * self.items(labels)).sum(dim=1, keepdim=True)
        negative = states @ self.items(negatives).T
        # A negative that happens to be the next item does not count.
        negative = negative.masked_fill(labels[:, None] == negatives, -torch.inf)
        losses = torch.logsumexp(torch.cat([positive, negative], dim=1), dim=1) - positive.squeeze(1)
        loss_sum: Tensor = (losses * ~is_start[1:]).sum()
        return loss_sum


@torch.no_grad()
def evaluate(model: SASRec, data: Path, kind: Kind, device: torch.device, num_steps: int = 10) -> str:
    """Rank all items for the last events of histories of other users: the first batches of the validation split."""
    loader = build_loader(data, config_of("eval"), rank=dist.get_rank(), world_size=dist.get_world_size())
    metrics = RankingMetrics(ks=(10, 100), device=device)
    for batch in itertools.islice(loader, num_steps):
        history = batch.to(device).features["item_id"]
        states = model.encode(history, longest(batch), kind)
        last = history.offsets()[1:][history.lengths() > 1] - 1  # predicted from the event before it
        scores = states[last - 1] @ model.items.weight.T
        scores[:, 0] = -torch.inf  # id 0 stands for no item
        of_target = scores.gather(1, history.values()[last, None])
        metrics.update(1 + (~(scores <= of_target)).sum(dim=1))  # 1: the best place; of NaN it is the last
    return " | ".join(f"{name} {value:.4f}" for name, value in metrics.compute().items() if "recall" in name)


@torch.no_grad()
def check_attentions(model: SASRec, history: JaggedTensor, negatives: Tensor, max_length: int) -> None:
    """Check that attention with and without padding gives the same loss."""
    padded, jagged = (float(model(history, negatives, max_length, kind)) for kind in ATTENTIONS)
    report(f"loss sum of the first batch | padded attention {padded:.2f} | jagged attention {jagged:.2f}")
    torch.testing.assert_close(padded, jagged, rtol=1e-4, atol=1e-4)


def longest(batch: SequenceBatch) -> int:
    """Return the events of the longest history, which the host knows without asking the GPU; at least 1."""
    return max(1, (batch.max_lengths or {}).get("item_id", 0))


def config_of(split: str) -> LoaderConfig:
    """Return the settings of the batches of a split."""
    return LoaderConfig(split=split, batch_size=BATCH_SIZE, max_history_length=MAX_LENGTH)


def main(data: Path = Path("out/synthetic"), steps: int = 100, attention: Kind = "padded") -> None:
    """Train SASRec on balanced batches, and evaluate before and after; run it under torchrun."""
    num_items = read_manifest(data).vocabulary_sizes["item_id"]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.distributed.get_node_local_rank())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(SASRec(num_items).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    cost = SelfAttentionCost(
        hidden=HIDDEN, heads=HEADS, head_dim=HIDDEN // HEADS, layers=LAYERS, ffn_multiplier=4, max_tokens=MAX_LENGTH
    )
    average = LossAverage(device=device)
    loads: list[StepMetrics] = []
    # Each rank plans the steps of all ranks and reads the samples that it trains on. Without candidates and labels,
    # each item but the first of a history is a loss token.
    balance, rank, world_size = BalanceConfig(cost=cost, on_step=loads.append), dist.get_rank(), dist.get_world_size()
    loader = build_loader(data, config_of("train"), rank=rank, world_size=world_size, balance=balance)
    report(f"before training | {evaluate(model.module, data, attention, device)}")
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, batch in enumerate(itertools.islice(epochs, steps), start=1):
        batch = batch.to(device)
        history, max_length = batch.features["item_id"], longest(batch)
        negatives = torch.randint(1, num_items, (NUM_NEGATIVES,), device=device)
        if step == 1:
            check_attentions(model.module, history, negatives, max_length)
        optimizer.zero_grad()
        loss_sum = model(history, negatives, max_length, attention)
        scale_loss(loss_sum, batch).backward()  # over the loss tokens of all ranks, which the batch knows
        optimizer.step()
        average.update(loss_sum, batch)
        if step % 20 == 0 or step == steps:
            (loss,), load = average.compute(), summarize(loads)
            ratios = f"{load.ratio_before:.3f} before balancing, {load.ratio_after:.3f} after"
            report(f"step {step} | loss {loss:.4f} | heaviest rank over lower bound {ratios}")
            average.reset()
            loads.clear()
    report(f"after training | {evaluate(model.module, data, attention, device)}")


if __name__ == "__main__":
    run(main)
