"""The usual ways to exchange a field, which scripts/bench/exchange.py compares: sizes are exchanged and read back."""

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader import SequenceBatch

Group = dist.ProcessGroup | None
Jagged = tuple[Tensor, Tensor]  # values, lengths [K, B]


def jagged_fields(batch: SequenceBatch) -> list[KeyedJaggedTensor]:
    """Return the fields that the baselines exchange one by one."""
    return [batch.features, batch.labels]


def select_rows(values: Tensor, lengths: Tensor, rows: Tensor) -> Jagged:
    """Select rows of jagged keys: key-major values, lengths [K, B]; the size of the result is read back."""
    offsets = torch.cumsum(lengths.view(-1), 0) - lengths.view(-1)
    selected = lengths[:, rows]
    starts = offsets.view(lengths.shape)[:, rows].reshape(-1)
    flat = selected.reshape(-1)
    ends = torch.cumsum(flat, 0)
    shifts = torch.repeat_interleave(starts - (ends - flat), flat)
    return values[shifts + torch.arange(len(shifts), device=values.device)], selected


def gather_select(field: KeyedJaggedTensor, rows: Tensor, group: Group) -> Jagged:
    """All-gather a field and select rows, numbered over all ranks."""
    world_size, num_keys = dist.get_world_size(), len(field.keys())
    lengths = field.lengths().view(num_keys, -1)
    lengths_of_ranks = [torch.empty_like(lengths) for _ in range(world_size)]
    dist.all_gather(lengths_of_ranks, lengths.contiguous(), group=group)
    totals = torch.stack([lengths_of_rank.sum() for lengths_of_rank in lengths_of_ranks]).tolist()
    padded = torch.zeros(max(totals), dtype=field.values().dtype, device=lengths.device)
    padded[: len(field.values())] = field.values()
    values_of_ranks = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(values_of_ranks, padded, group=group)
    by_rank_and_key = [
        torch.split(values[:total], lengths_of_rank.sum(1).tolist())
        for values, total, lengths_of_rank in zip(values_of_ranks, totals, lengths_of_ranks, strict=True)
    ]
    key_major = torch.cat([by_key[key] for key in range(num_keys) for by_key in by_rank_and_key])
    return select_rows(key_major, torch.cat(lengths_of_ranks, dim=1), rows)


def per_field(field: KeyedJaggedTensor, rows: Tensor, counts: tuple[list[int], list[int]], group: Group) -> Jagged:
    """Exchange a field: rows by destination, lengths first, then values of the sizes that the lengths give.

    Args:
        field: to exchange.
        rows: to send, by destination.
        counts: rows sent to each rank, and rows received from each rank.
        group: of all ranks.
    """
    num_keys = len(field.keys())
    send_counts, receive_counts = counts
    values, selected = select_rows(field.values(), field.lengths().view(num_keys, -1), rows)
    sent_lengths = selected.t().contiguous()
    shape = (sum(receive_counts), num_keys)
    received_lengths = torch.empty(shape, dtype=sent_lengths.dtype, device=sent_lengths.device)
    dist.all_to_all_single(received_lengths, sent_lengths, receive_counts, send_counts, group=group)
    # Row-major for sending: the keys of a row are adjacent.
    num_rows = len(sent_lengths)
    row_major = torch.arange(num_rows * num_keys, device=values.device).view(num_keys, num_rows).t().reshape(-1)
    sent_values, _ = select_rows(values, selected.reshape(1, -1), row_major)
    send_sizes = [int(part.sum()) for part in torch.split(sent_lengths, send_counts)]
    receive_sizes = [int(part.sum()) for part in torch.split(received_lengths, receive_counts)]
    received_values = torch.empty(sum(receive_sizes), dtype=values.dtype, device=values.device)
    dist.all_to_all_single(received_values, sent_values, receive_sizes, send_sizes, group=group)
    num_received = len(received_lengths)
    key_major = torch.arange(num_received * num_keys, device=values.device).view(num_received, num_keys)
    values, lengths = select_rows(received_values, received_lengths.reshape(1, -1), key_major.t().reshape(-1))
    return values, lengths.view(num_keys, -1)
