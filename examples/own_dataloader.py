"""One's own Dataset and DataLoader in front of a Balancer, with a checkpoint from which training continues exactly.

    evenrank preprocess --dataset synthetic --out out/synthetic
    torchrun --nproc_per_node 2 examples/own_dataloader.py --data out/synthetic

`Histories` and `MeanOfHistory` stand for any dataset and any model. What evenrank adds is in `build_balancer` and
`train`: ElasticSampler, JaggedCollate, the Balancer and `scale_loss`. ElasticSampler gives each sample to one rank, in
an order that any number of ranks can resume; the DataLoader is PyTorch's own.
"""

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from evenrank.dataloader import ElasticSampler, JaggedCollate, dense, jagged
from evenrank.dataloader.balance import BalanceConfig, Balancer, StepMetrics, summarize
from evenrank.datasets import read_manifest
from evenrank.training import LossAverage, scale_loss
from next_item import report, run

MAX_LENGTH, BATCH_SIZE, WIDTH = 256, 16, 32  # the batch size is that of a rank


class Histories(Dataset[dict[str, Any]]):
    """The histories in a folder of Parquet files, each without its last event, which is to be predicted."""

    def __init__(self, folder: Path) -> None:
        column = pyarrow.parquet.read_table(folder, columns=["item_id"])["item_id"].combine_chunks()
        self.items, self.offsets = column.values.to_numpy(), column.offsets.to_numpy()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        items = self.items[self.offsets[index] : self.offsets[index + 1]][-MAX_LENGTH:]
        return {"item_id": items[:-1], "next_item": items[-1]}


class MeanOfHistory(nn.Module):
    """Predicts the next item from the mean embedding of a history."""

    def __init__(self, num_items: int) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(num_items, WIDTH, mode="mean", include_last_offset=True)
        self.scores = nn.Linear(WIDTH, num_items)

    def forward(self, items: Tensor, offsets: Tensor) -> Tensor:
        """Return a logit per row and item: [rows, num_items]."""
        logits: Tensor = self.scores(self.items(items, offsets))
        return logits


def cost(lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what each sample costs: looking up its events, and its scores, which cost as much as 64 events."""
    return 64 + lengths["item_id"]


def build_balancer(histories: Histories, loads: list[StepMetrics]) -> Balancer[Any]:
    """Return balanced batches of the histories."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = ElasticSampler(len(histories), batch_size=BATCH_SIZE, rank=rank, world_size=world_size)
    collate = JaggedCollate({"item_id": jagged(max_length=MAX_LENGTH), "next_item": dense(dtype=torch.int64, shape=())})
    loader = DataLoader(histories, batch_sampler=sampler, collate_fn=collate)
    return Balancer(loader, BalanceConfig(cost=cost, on_step=loads.append))


def train(histories: Histories, num_items: int, last_step: int, checkpoint: Path) -> list[float]:
    """Train to `last_step`, from the checkpoint if there is one, or else save one halfway.

    Returns:
        The mean loss of each step that was trained, over all ranks.
    """
    is_resumed, first_step = checkpoint.exists(), 0
    torch.manual_seed(0 if not is_resumed else 1)  # which must not matter: all that does is in the checkpoint
    model = DistributedDataParallel(MeanOfHistory(num_items))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    average, losses = LossAverage(), list[float]()
    loads: list[StepMetrics] = []
    with build_balancer(histories, loads) as balancer:
        if is_resumed:
            saved = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            balancer.load_state_dict(saved["data"])
            first_step = saved["step"]
            report(f"resuming after step {first_step}")
        epochs = itertools.chain.from_iterable(itertools.repeat(balancer))
        for step, batch in zip(range(first_step + 1, last_step + 1), epochs, strict=False):
            history = batch.features["item_id"]
            logits = model(history.values(), history.offsets())
            # The rows from num_real on are padding.
            loss_sum = F.cross_entropy(logits[: batch.num_real], batch.next_item[: batch.num_real], reduction="sum")
            optimizer.zero_grad()
            scale_loss(loss_sum, batch).backward()
            optimizer.step()
            if step == last_step // 2 and not is_resumed and dist.get_rank() == 0:  # all of it is the same on all ranks
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state | {"data": balancer.state_dict()}, checkpoint)
            average.reset()
            average.update(loss_sum, batch)
            losses += average.compute()
            if step % 10 == 0:
                load = summarize(loads)
                ratios = f"{load.ratio_before:.3f} before balancing, {load.ratio_after:.3f} after"
                report(f"step {step} | loss {losses[-1]:.4f} | heaviest rank over lower bound {ratios}")
                loads.clear()
    return losses


def main(data: Path = Path("out/synthetic"), steps: int = 60) -> None:
    """Train from one's own DataLoader, and again from a checkpoint; run it under torchrun."""
    num_items, histories = read_manifest(data).vocabulary_sizes["item_id"], Histories(data / "train")
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as own_folder:
        folders = [own_folder]
        dist.broadcast_object_list(folders)
        checkpoint = Path(folders[0]) / "checkpoint.pt"
        losses, resumed = (train(histories, num_items, steps, checkpoint) for _ in range(2))
        dist.barrier()  # rank 0 removes the folder
    assert resumed == losses[steps // 2 :], "resumed training has other losses"
    report(f"the {len(resumed)} losses after the checkpoint are the same, bit for bit")


if __name__ == "__main__":
    run(main)
