"""`ATTENTIONS`: implementations of HSTU attention by name; register your own to choose it in an `HSTUConfig`."""

from typing import Protocol

from torch import Tensor

from evenrank.core.errors import ConfigError
from evenrank.core.registry import Registry
from hstu.attention import Sequences, padded_attention


class Attention(Protocol):
    """The call that all implementations have in common; `padded_attention` says what its arguments are."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, *, scale_length: int) -> Tensor:
        """Return what each token receives: [tokens, heads, head_dim]."""
        ...


ATTENTIONS: Registry[Attention] = Registry("attention", expected="a function", accepts=callable)
ATTENTIONS.register("padded")(padded_attention)


@ATTENTIONS.register("triton")
def _triton(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, *, scale_length: int) -> Tensor:
    _check_device("triton", query)
    from hstu.triton_attention import triton_attention  # Triton comes with PyTorch for CUDA alone

    return triton_attention(query, key, value, sequences, scale_length=scale_length)


@ATTENTIONS.register("auto")
def _of_inputs(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, *, scale_length: int) -> Tensor:
    return ATTENTIONS["triton" if _has_kernels(query) else "padded"](
        query, key, value, sequences, scale_length=scale_length
    )


def _check_device(name: str, query: Tensor) -> None:
    if not query.is_cuda:
        raise ConfigError(f"the attention {name!r} needs a CUDA device, got {query.device}; choose 'auto' or 'padded'")


def _has_kernels(query: Tensor) -> bool:
    if not query.is_cuda:
        return False
    from hstu.triton_attention import DTYPES, HEAD_DIMS

    return query.shape[-1] in HEAD_DIMS and query.dtype in DTYPES
