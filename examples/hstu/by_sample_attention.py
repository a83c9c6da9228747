"""HSTU attention whose backward has one program per (sample, head): a baseline of benchmarks, not for training.

It stands for jagged kernels that were tuned on samples of equal length. There a program per sample and head is as fast
as any other division, as long as there are enough of them. With skewed lengths the longest sample sets the time of all,
because its blocks are computed one after another while the rest of the GPU is idle.

The forward is that of triton_attention.py, because such kernels do divide queries there. Samples start in the order of
the batch. Blocks are computed by the same code with the same launch settings: all that differs is what runs at a time.
"""

import torch
from torch import Tensor

from hstu import by_sample_kernels as kernels
from hstu.attention import Sequences
from hstu.launch import Kernel
from hstu.triton_attention import Schedule, triton_attention


def by_sample_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, *, scale_length: int
) -> Tensor:
    """Attend as `triton_attention` does, with one program per (sample, head) in the backward."""
    return triton_attention(query, key, value, sequences, scale_length=scale_length, schedule=BY_SAMPLE)


def _batch_order(sequences: Sequences) -> Tensor:
    return torch.arange(len(sequences.offsets) - 1, device=sequences.offsets.device)


BY_SAMPLE = Schedule(
    order=_batch_order,
    backward_query=Kernel(kernels.backward_query),
    backward_key=Kernel(kernels.backward_key),
    divides_samples=False,
)
