"""The losses that the examples that predict the next item must print."""

import re
from itertools import chain, islice, repeat
from pathlib import Path

import torch

from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.datasets import read_manifest
from next_item import NextItem

# Losses are printed with 4 digits. A mean over each rank's tokens instead of all of them differs by 2e-4 and more.
TOLERANCE = 1e-4


def losses_of(output: str) -> dict[int, float]:
    """Return the printed losses by step."""
    found = re.findall(r"^step (\d+) \| loss (\d+\.\d+)", output, re.M)
    assert len(found) == len(dict(found))  # one rank prints
    return {int(step): float(loss) for step, loss in found}


def losses_in_one_process(data: Path, num_steps: int, config: LoaderConfig) -> dict[int, float]:
    """Return the losses by step of the examples' model, trained on unbalanced batches of the same samples."""
    torch.manual_seed(0)
    model = NextItem(read_manifest(data).vocabulary_sizes["item_id"])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = {}
    batches = chain.from_iterable(repeat(build_loader(data, config, rank=0, world_size=1)))
    for step, batch in enumerate(islice(batches, num_steps), start=1):
        optimizer.zero_grad()
        loss = model(batch) / batch.loss_tokens
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    return losses
