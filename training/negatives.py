"""`in_batch_mask`: which targets of a batch are negatives of which others."""

import torch
from torch import Tensor

from evenrank.dataloader.batches.batch import SequenceBatch


def in_batch_mask(batch: SequenceBatch) -> Tensor:
    """Return for which targets (rows) which targets (columns) are negatives: bool [N, N], N = `batch.loss_tokens`.

    Targets are the candidates or, in batches without labels, the items but the first of each row, in the order of
    `log_q["positive"]`. All are negatives of each other, except for a sample's own targets and items of its row in the
    batch. It takes 8 * batch_size * N bytes, and does not wait for a GPU.
    """
    history = batch.features["item_id"]
    items, lengths = history.values(), history.lengths().long()
    targets = (lengths - 1).clamp(min=0) if batch.labels is None else batch.labels["label"].lengths().long()
    rows = torch.arange(len(lengths), device=items.device)
    row_of_target = torch.repeat_interleave(rows, targets, output_size=batch.loss_tokens)
    from_end = targets.cumsum(0)[row_of_target] - torch.arange(batch.loss_tokens, device=items.device)
    items = torch.searchsorted(items.sort().values, items)  # because ids of 63 bits leave no room for the row
    target_items = items[lengths.cumsum(0)[row_of_target] - from_end]
    # Pairs of an item, by its place in order, and a row that has it, as single numbers, sorted to be found.
    row_of_item = torch.repeat_interleave(rows, lengths, output_size=len(items))
    pairs = (items * len(rows) + row_of_item).sort().values
    asked = target_items * len(rows) + rows[:, None]  # [batch_size, N]
    found = torch.searchsorted(pairs, asked).clamp(max=max(len(pairs) - 1, 0))
    mask: Tensor = (pairs[found] != asked)[row_of_target]
    return mask
