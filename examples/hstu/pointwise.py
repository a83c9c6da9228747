"""`pointwise_for`: how a layer computes what is between its matrix products, by torch or by fused kernels."""

from typing import Protocol

import torch
from torch import Tensor, nn

from hstu import unfused


class Pointwise(Protocol):
    """The functions that the modules `unfused` and `fused` have in common; `unfused` says what they do."""

    def norm(self, tokens: Tensor, update: Tensor | None, module: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """Return the residual stream after an update, and LayerNorm of it."""
        ...

    def activate(self, projected: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return U, V, Q and K."""
        ...

    def gate(self, attended: Tensor, u: Tensor, module: nn.Module) -> Tensor:
        """Return LayerNorm(attended), gated by U."""
        ...


def pointwise_for(tokens: Tensor, *, fused: bool) -> Pointwise:
    """Return the module `fused` if it is asked for and has kernels for these tokens, else `unfused`."""
    if not (fused and tokens.is_cuda and tokens.dtype in (torch.bfloat16, torch.float16, torch.float32)):
        return unfused
    from hstu import fused as kernels  # Triton comes with PyTorch for CUDA alone

    return kernels
