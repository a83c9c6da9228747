"""Semantic ids: a small encoder and decoder that predict the codes of the next item, on balanced batches.

    evenrank preprocess --dataset synthetic --out out/synthetic
    torchrun --nproc_per_node 2 examples/train_semantic_ids.py --data out/synthetic

An item is a tuple of codes, one per level, instead of a row of one large table (as in TIGER, Rajput et al., 2023). The
table of codes is made here from the item ids; a real one comes from a quantizer, in a .npy or .pt file. What evenrank
adds is in `train` and `evaluate`: LoaderConfig, which turns histories into tokens, and the balance of the loader.
"""

import gc
import itertools
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evenrank.cli.main import run_command
from evenrank.core.errors import DataError
from evenrank.dataloader import CodeTable, Loader, LoaderConfig, SemanticIdBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, SelfAttentionCost, StepMetrics, summarize
from evenrank.datasets import read_manifest
from evenrank.training import LossAverage, RankingMetrics, scale_loss

LEVELS = 3
HIDDEN, HEADS = 64, 2
MAX_HISTORY = 64  # events, of LEVELS tokens each
BATCH_SIZE = 16  # per rank
BEAM_WIDTH = 10


def make_codes(num_items: int) -> CodeTable:
    """Return the digits of each item id as its codes. Id 0 stands for no item and has none."""
    size = int(np.ceil(num_items ** (1 / LEVELS)))  # of each codebook
    ids = np.arange(num_items)
    codes = np.stack([ids // size ** (LEVELS - 1 - level) % size for level in range(LEVELS)], axis=1).astype(np.int32)
    codes[0] = -1
    return CodeTable(codes=codes, codebook_sizes=(size,) * LEVELS)


class CodePredictor(nn.Module):
    """Encodes the tokens of a history, and decodes the codes of the next item one after the other."""

    def __init__(self, codebook_size: int) -> None:
        super().__init__()
        self.codebook_size = codebook_size
        self.tokens = nn.Embedding(LEVELS * codebook_size + 1, HIDDEN)  # the last one begins every sequence
        self.positions = nn.Embedding(LEVELS * MAX_HISTORY + 1, HIDDEN)
        layer = {"dim_feedforward": 4 * HIDDEN, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.encoder = nn.TransformerEncoderLayer(HIDDEN, HEADS, **layer)  # type: ignore[arg-type]
        self.decoder = nn.TransformerDecoderLayer(HIDDEN, HEADS, **layer)  # type: ignore[arg-type]
        self.logits = nn.Linear(HIDDEN, codebook_size)

    def encode(self, batch: SemanticIdBatch) -> tuple[Tensor, Tensor]:
        """Return the encoded histories, [batch_size, 1 + tokens, HIDDEN], and which of their tokens are padding."""
        history = batch.features["semantic_id"]
        tokens = history.to_padded_dense(int(history.lengths().max())).long()
        is_padding = torch.arange(tokens.shape[1] + 1, device=tokens.device) > history.lengths()[:, None]
        return self.encoder(self._embed(tokens), src_key_padding_mask=is_padding), is_padding

    def decode(self, encoded: Tensor, is_padding: Tensor, codes: Tensor) -> Tensor:
        """Return the logits of the next code after each code: [rows, n + 1, codebook_size], given codes [rows, n]."""
        x = self._embed(codes + self.codebook_size * torch.arange(codes.shape[1], device=codes.device))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device).isinf()
        logits: Tensor = self.logits(self.decoder(x, encoded, tgt_mask=mask, memory_key_padding_mask=is_padding))
        return logits

    def forward(self, batch: SemanticIdBatch) -> Tensor:
        """Return the sum of the losses of all codes of all samples."""
        # All rows go through the model, so that the loss depends on all parameters if none of them is a sample.
        codes = batch.labels["label"].to_padded_dense(LEVELS).long()
        encoded, is_padding = self.encode(batch)
        logits = self.decode(encoded, is_padding, codes[:, :-1])[: batch.num_real]
        return F.cross_entropy(logits.flatten(0, 1), codes[: batch.num_real].flatten(), reduction="sum")

    @torch.no_grad()
    def beam_search(self, batch: SemanticIdBatch, width: int) -> Tensor:
        """Return the most likely tuples of codes, which need not be items, best first: [batch_size, width, LEVELS]."""
        encoded, is_padding = self.encode(batch)
        beams = torch.zeros(len(encoded), 1, 0, dtype=torch.int64, device=encoded.device)
        scores = torch.zeros(len(encoded), 1, device=encoded.device)
        for _ in range(LEVELS):
            width_so_far = beams.shape[1]
            logits = self.decode(
                encoded.repeat_interleave(width_so_far, dim=0),
                is_padding.repeat_interleave(width_so_far, dim=0),
                beams.flatten(0, 1),
            )[:, -1]
            extended = scores[:, :, None] + logits.log_softmax(dim=1).unflatten(0, beams.shape[:2])
            scores, chosen = extended.flatten(1).topk(min(width, extended[0].numel()))
            parents = beams.gather(1, (chosen // self.codebook_size)[:, :, None].expand(-1, -1, beams.shape[2]))
            beams = torch.cat([parents, (chosen % self.codebook_size)[:, :, None]], dim=2)
        if scores.isnan().any():  # in which order they are is no ranking
            raise DataError("the scores of the model are NaN; train with a lower learning rate")
        return beams

    def _embed(self, tokens: Tensor) -> Tensor:
        begin = tokens.new_full((len(tokens), 1), self.tokens.num_embeddings - 1)
        embedded: Tensor = self.tokens(torch.cat([begin, tokens], dim=1))
        return embedded + self.positions.weight[: embedded.shape[1]]


def train(data: Path, num_steps: int) -> None:
    """Train, and evaluate before and after."""
    table = make_codes(read_manifest(data).vocabulary_sizes["item_id"])
    torch.manual_seed(0)
    model = DistributedDataParallel(CodePredictor(table.codebook_sizes[0]))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    config = LoaderConfig(codes=table, batch_size=BATCH_SIZE, max_history_length=MAX_HISTORY)
    cost = SelfAttentionCost(
        hidden=HIDDEN,
        heads=HEADS,
        head_dim=HIDDEN // HEADS,
        layers=1,
        ffn_multiplier=4,
        causal=False,
        history_key="semantic_id",
    )
    average = LossAverage()
    loads: list[StepMetrics] = []
    balance = BalanceConfig(cost=cost, on_step=loads.append)
    loader: Loader[SemanticIdBatch] = build_loader(
        data, config, rank=dist.get_rank(), world_size=dist.get_world_size(), balance=balance
    )
    report(f"before training | {evaluate(model.module, data, table)}")
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, batch in enumerate(itertools.islice(epochs, num_steps), start=1):
        optimizer.zero_grad()
        loss_sum = model(batch)
        scale_loss(loss_sum, batch).backward()  # each code of each item is a loss token
        optimizer.step()

        average.update(loss_sum, batch)
        if step % 20 == 0 or step == num_steps:
            (loss,) = average.compute()
            summary = summarize(loads)
            report(
                f"step {step} | loss per code {loss:.4f} | heaviest rank over lower bound "
                f"{summary.ratio_before:.3f} before balancing, {summary.ratio_after:.3f} after"
            )
            average.reset()
            loads.clear()
    report(f"after training | {evaluate(model.module, data, table)}")


def evaluate(model: CodePredictor, data: Path, table: CodeTable, num_steps: int = 10) -> str:
    """Search for the last item of users that are not trained on."""
    config = LoaderConfig(codes=table, split="eval", batch_size=BATCH_SIZE, max_history_length=MAX_HISTORY)
    loader: Loader[SemanticIdBatch] = build_loader(data, config, rank=dist.get_rank(), world_size=dist.get_world_size())
    metrics = RankingMetrics(ks=(1, BEAM_WIDTH))
    for batch in itertools.islice(loader, num_steps):
        codes = batch.labels["label"].values().view(-1, 1, LEVELS)  # of the samples, without padding
        is_found = (model.beam_search(batch, BEAM_WIDTH)[: batch.num_real] == codes).all(dim=2)
        metrics.update(is_found.any(dim=1) * (1 + is_found.int().argmax(dim=1)))  # 0: not among the items found
    return " | ".join(f"{name} {value:.4f}" for name, value in metrics.compute().items() if "recall" in name)


def report(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main(data: Path = Path("out/synthetic"), steps: int = 100) -> None:
    """Train on semantic ids; run it under torchrun."""
    read_manifest(data)  # raises if there is no dataset, before anything starts
    dist.init_process_group("gloo")
    train(data, steps)
    gc.collect()  # DistributedDataParallel refers to the process group, in cycles
    dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
