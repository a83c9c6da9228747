"""What a layer computes between its matrix products, by torch: for every device and dtype."""

from torch import Tensor, nn
from torch.nn.functional import silu


def norm(tokens: Tensor, update: Tensor | None, module: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Add an update to the residual stream, and normalize it.

    Args:
        tokens: the residual stream [tokens, hidden].
        update: like it, but maybe in another dtype; None: there is nothing to add.
        module: the LayerNorm.

    Returns:
        The residual stream; LayerNorm of it. Both [tokens, hidden].
    """
    stream = tokens if update is None else tokens + update
    return stream, module(stream)


def activate(projected: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split what the first linear returns, and apply SiLU.

    Args:
        projected: [tokens, heads * (U, V, Q, K) * head_dim], contiguous.
        head_dim: width of a head.

    Returns:
        U, as `gate` takes it; V, Q and K, which are views of one tensor. All [tokens, heads, head_dim].
    """
    heads = projected.shape[-1] // (4 * head_dim)  # of this rank
    u, v, q, k = silu(projected).unflatten(-1, (heads, 4, head_dim)).unbind(-2)
    return u, v, q, k


def gate(attended: Tensor, u: Tensor, module: nn.LayerNorm) -> Tensor:
    """Normalize what attention returns, and gate it.

    Args:
        attended: [tokens, heads, head_dim].
        u: from `activate`.
        module: the LayerNorm, of rows of all heads.

    Returns:
        [tokens, heads * head_dim].
    """
    normed: Tensor = module(attended.flatten(-2))
    return (normed.view_as(u) * u).flatten(-2)
