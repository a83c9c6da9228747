"""Batches of samples that are no dataset of ours, and torchdata's nodes that make them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from torchdata import nodes

from evenrank.dataloader import JaggedCollate, dense, jagged

COLLATE = JaggedCollate({"item_id": jagged(), "sample_ids": dense(dtype=torch.int64, shape=())})


def nodes_over(samples: Sequence[dict[str, Any]], batch_size: int) -> Any:
    source = nodes.MapStyleWrapper(dict(enumerate(samples)), SequentialSampler(samples))
    return nodes.Mapper(nodes.Batcher(source, batch_size, drop_last=False), COLLATE)
