"""Runs the kernels of HSTU attention in Triton's interpreter, on the CPU, beside the padded reference."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from hstu.attention import Sequences, padded_attention
from hstu.triton_attention import triton_attention

# Lengths, contextual tokens and candidates of the samples of a batch.
BATCHES = [
    ([0, 5, 70, 33], [0, 1, 3, 0], [0, 2, 10, 1]),
    ([65, 64, 100], [64, 0, 70], [1, 64, 30]),
    ([0, 0], [0, 0], [0, 0]),
]


def main() -> None:
    """Print the largest difference in a result or gradient of each batch, relative to the reference."""
    for lengths, contextual, candidates in BATCHES:
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        sequences = Sequences(
            offsets=offsets,
            num_contextual=torch.tensor(contextual),
            num_candidates=torch.tensor(candidates),
            num_tokens=sum(lengths),
            max_length=max(lengths),
        )
        generator = torch.Generator().manual_seed(0)
        inputs = list(torch.randn(sum(lengths), 1, 4, 64, generator=generator).unbind(2))
        expected = _run(padded_attention, inputs, sequences)
        errors = [
            (one - other).norm() / other.norm().clamp_min(1e-9)
            for one, other in zip(_run(triton_attention, inputs, sequences), expected, strict=True)
        ]
        sys.stdout.write(f"{max(errors):.1e}\n")


def _run(attention: Callable[..., Tensor], inputs: list[Tensor], sequences: Sequences) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    output = attention(*leaves, sequences, scale_length=100)
    output.backward(inputs[3])
    return [output.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]]


if __name__ == "__main__":
    main()
