"""What a layer computes between its matrix products, as launches of the kernels in `fused_kernels`.

Where the columns of rows are divided among ranks, these exchange two numbers of each row between two launches of a
kernel: the first computes them for this rank's columns, the second does the rest.
"""

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from hstu import fused_kernels as kernels
from hstu.launch import Kernel

_NORM_FORWARD, _NORM_BACKWARD = Kernel(kernels.norm_forward), Kernel(kernels.norm_backward)
_SILU_FORWARD, _SILU_BACKWARD = Kernel(kernels.silu_forward), Kernel(kernels.silu_backward)
SILU_VALUES = 1024  # of each of V, Q and K that a program computes at a time
MAX_PROGRAMS = 528  # that sum gradients: 4 for each multiprocessor of an H100 or H200, which has room for all at once


def product_dtype(stream: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype of matrix products: that of autocast on a type of device, or else of the residual stream."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else stream


def norm_rows(
    values: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    output: Tensor,
    update: Tensor | None = None,
    total: Tensor | None = None,
    u: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Write LayerNorm of rows, also of several heads.

    Args:
        values: [tokens, width] or [tokens, heads, head_dim].
        weight: [width], or [heads * head_dim].
        bias: like `weight`.
        eps: added to the variance.
        output: like `values`; written.
        update: like `values`, which it is added to before.
        total: the sum of both, if there is an `update`; written.
        u: [tokens, heads, head_dim]; the output is multiplied by SiLU of it.
        group: ranks among which the columns of rows are divided, equally; all must call this. They have no `update`.

    Returns:
        What the backward pass needs of each row: float32 [tokens, 2], its mean and 1 / standard deviation.
    """
    statistics = torch.empty(len(values), 2, dtype=torch.float32, device=values.device)

    def launch(output: Tensor | None, of_ranks: Tensor | None) -> None:
        _NORM_FORWARD.launch(
            (len(values), 1, 1), values, update, total, u, weight, bias, output, of_ranks, statistics,
            len(weight), *_strides(u), eps, **_norm_constants(len(weight), values.shape[-1], _size(group)),
        )  # fmt: skip

    if len(values):
        of_ranks = None
        if group is not None:
            launch(None, None)
            of_ranks = statistics.new_empty(group.size() * len(values), 2)
            dist.all_gather_into_tensor(of_ranks, statistics, group=group)
        launch(output, of_ranks)
    return statistics


def partial_sums(tokens: Tensor, columns: int) -> Tensor:
    """Return where programs write sums over equally many tokens each: float32 [programs, columns], uninitialized.

    Args:
        tokens: [tokens, ...], on the device of the sums.
        columns: of all sums.
    """
    tokens_each = max(_blocks(len(tokens), MAX_PROGRAMS), 8)
    return torch.empty(_blocks(len(tokens), tokens_each), columns, dtype=torch.float32, device=tokens.device)


def norm_rows_backward(
    gradient: Tensor,
    values: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    *,
    d_values: Tensor,
    sums: Tensor,
    u: Tensor | None = None,
    d_u: Tensor | None = None,
    u_sums: Tensor | None = None,
    d_total: Tensor | None = None,
    d_update: Tensor | None = None,
    also_summed: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the gradients of rows, and their sums for weight and bias.

    Args:
        gradient: of the output.
        values: what was normalized: the total, if there was an update.
        weight: as in `norm_rows`.
        bias: as in `norm_rows`.
        statistics: from `norm_rows`.
        d_values: like `values`; written.
        sums: from `partial_sums`; the first columns are written, for weight, bias and, if there is one, `also_summed`.
        u: as in `norm_rows`.
        d_u: like `u`, if there is one, but its heads may be apart differently; written.
        u_sums: other columns of `sums`, for that of `d_u`, if there is one, with heads as far apart; written.
        d_total: the gradient of `values` from elsewhere, which is added to that of the norm.
        d_update: the same as `d_values` in another dtype; written.
        also_summed: [tokens, width], contiguous: a tensor to sum over tokens.
        group: as in `norm_rows`; then there are no `d_total` and `also_summed`.
    """
    gradient, d_total = gradient.contiguous(), None if d_total is None else d_total.contiguous()

    def launch(d_values: Tensor | None, d_u: Tensor | None, row_sums: Tensor | None) -> None:
        _NORM_BACKWARD.launch(
            (len(sums), 1, 1),
            values, u, weight, bias, statistics, gradient, d_total, also_summed, d_values, d_update, d_u,
            sums, u_sums, row_sums,
            len(values), len(weight), *_strides(u), *_strides(d_u), sums.stride(0), _blocks(len(values), len(sums)),
            **_norm_constants(len(weight), values.shape[-1], _size(group)),
        )  # fmt: skip

    if len(values):
        row_sums = None
        if group is not None:
            row_sums = torch.empty_like(statistics)
            launch(None, None, row_sums)
            dist.all_reduce(row_sums, group=group)
        launch(d_values, d_u, row_sums)


def split_heads(projected: Tensor, head_dim: int) -> Tensor:
    """Return what the first linear returns as [tokens, heads, (U, V, Q, K), head_dim]."""
    return projected.view(len(projected), projected.shape[1] // (4 * head_dim), 4, head_dim)


def silu_heads(projected: Tensor, head_dim: int) -> Tensor:
    """Return SiLU of V, Q and K: [tokens, heads, (V, Q, K), head_dim]."""
    tokens, heads = len(projected), projected.shape[1] // (4 * head_dim)
    activated = projected.new_empty(tokens, heads, 3, head_dim)
    if tokens:
        constants = _silu_constants(head_dim)
        grid = (_blocks(tokens * heads, constants["ROWS"]), 1, 1)
        _SILU_FORWARD.launch(grid, projected, activated, tokens * heads, **constants)
    return activated


def silu_heads_backward(
    projected: Tensor, d_v: Tensor, d_q: Tensor, d_k: Tensor, *, d_projected: Tensor, sums: Tensor
) -> None:
    """Write the gradient of what the first linear has returned, except for U, and its sums.

    Args:
        projected: what it has returned.
        d_v: that of SiLU(V): [tokens, heads, head_dim].
        d_q: that of SiLU(Q), like `d_v`.
        d_k: that of SiLU(K), like `d_v`.
        d_projected: like `projected`; all of it but U's is written.
        sums: from `partial_sums`; as many columns as `projected` has are written, all but U's.
    """
    tokens, heads, head_dim = d_v.shape
    if tokens:
        gradients = [gradient.contiguous() for gradient in (d_v, d_q, d_k)]
        _SILU_BACKWARD.launch(
            (len(sums), heads, 1), projected, *gradients, d_projected, sums,
            tokens, heads, sums.stride(0), _blocks(tokens, len(sums)), **_silu_constants(head_dim),
        )  # fmt: skip


def _blocks(length: int, block: int) -> int:
    return -(-length // block)  # as triton.cdiv, which takes the host 3 us


def _power_of_2(width: int) -> int:
    """Return the first that is not less."""
    return 1 << (width - 1).bit_length()


@cache
def _silu_constants(head_dim: int) -> dict[str, int]:
    block = _power_of_2(head_dim)
    return {"HEAD_DIM": head_dim, "BLOCK": block, "ROWS": max(SILU_VALUES // block, 1), "num_warps": 4}


def _strides(u: Tensor | None) -> tuple[int, int]:
    """Return those of tokens and heads."""
    return (0, 0) if u is None else (u.stride(0), u.stride(1))


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


@cache
def _norm_constants(width: int, head_dim: int, ranks: int) -> dict[str, int]:
    block = _power_of_2(width)
    return {"HEAD_DIM": head_dim, "BLOCK": block, "RANKS": ranks, "num_warps": min(max(block // 256, 1), 16)}
