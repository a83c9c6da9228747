"""The contents of batches as lists, for comparisons."""

from typing import Any

import torch

from evenrank.dataloader import SemanticIdBatch, SequenceBatch


def ids_of(batch: SequenceBatch | SemanticIdBatch) -> list[int]:
    """Return the ids of the samples of a batch, without padding."""
    ids: list[int] = batch.sample_ids[: batch.num_real].tolist()
    return ids


def rows_of(jagged: Any, key: str) -> list[list[int]]:
    """Return each row of a key of a KeyedJaggedTensor, including padding rows."""
    feature = jagged[key]
    return [row.tolist() for row in torch.split(feature.values(), feature.lengths().tolist())]
