"""`HSTUConfig`: the shape of a model, its embedding `tables`, and `ATTENTIONS`, where you can register your own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torchrec import EmbeddingConfig

from evenrank.core.errors import ConfigError
from evenrank.core.registry import Registry
from evenrank.dataloader.balance import HSTUCost
from evenrank.datasets.schema import ACTION, ITEM_ID
from hstu.attention import Sequences, padded_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class HSTUConfig:
    """The shape of an HSTU encoder, and how it is computed."""

    max_length: int
    """The longest that a sample can be, in tokens: contextual ones, items and, if interleaved, actions. Attention
    weights are divided by it, the same for every batch, so that logits do not depend on the other samples of a batch.
    """
    contextual: tuple[str, ...] = ()
    """Features whose values are tokens in front of the history, such as `user_id`, in this order."""
    interleave_actions: bool = True
    """Each action is a token of its own after its item; otherwise actions are not read."""
    embedding_dim: int = 128
    """Width of all embedding tables."""
    hidden: int = 256
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads of a layer."""
    head_dim: int = 64
    """Width of a head, for U, V, Q and K alike."""
    layers: int = 4
    """Number of layers."""
    position_buckets: int = 1024
    """Positions with an embedding of their own; later tokens share the last one."""
    dropout: float = 0.1
    """Of what a layer adds to the residual stream; 0 where balanced and unbalanced training are compared."""
    attention: str = "auto"
    """Name in `ATTENTIONS`; `auto`: `triton` on CUDA if it has kernels for head_dim and dtype, else `padded`."""
    fused_norms: bool = True
    """Compute layers by fused Triton kernels where those can run: on CUDA, but not in float64; see the README."""
    recompute: bool = False
    """Compute each layer's input LayerNorm and SiLU again in the backward pass instead of keeping their outputs."""

    def __post_init__(self) -> None:
        for name in ("max_length", "embedding_dim", "hidden", "heads", "head_dim", "layers", "position_buckets"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if isinstance(self.contextual, str):
            raise ConfigError(f"contextual must be a tuple of features, got {self.contextual!r}; add a comma behind it")
        ATTENTIONS.check(self.attention)

    def cost(self) -> HSTUCost:
        """Return what a sample costs in this model, for balancing."""
        return HSTUCost(
            hidden=self.hidden,
            heads=self.heads,
            head_dim=self.head_dim,
            layers=self.layers,
            interleave_actions=self.interleave_actions,
            contextual=self.contextual,
            max_tokens=self.max_length,
        )


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


NEGATIVE_ID = "negative_id"

_MARK = ":"  # in no name of a feature


def tables(
    vocabulary_sizes: Mapping[str, int], config: HSTUConfig, *, retrieval: bool = False
) -> list[EmbeddingConfig]:
    """Return a table for each feature that becomes tokens, for `torchrec.EmbeddingCollection`.

    Args:
        vocabulary_sizes: rows of each table by feature, as in a dataset's manifest.
        config: says which features become tokens.
        retrieval: negatives are looked up in the table of the items too.

    Raises:
        ConfigError: the size of a vocabulary is missing.
    """
    keys = (*config.contextual, ITEM_ID, *((ACTION,) if config.interleave_actions else ()))
    for key in keys:
        if key not in vocabulary_sizes:
            raise ConfigError(f"no vocabulary size of {key!r}; known are those of {', '.join(vocabulary_sizes)}")
    return [
        EmbeddingConfig(
            name=_table_name(key),
            num_embeddings=vocabulary_sizes[key],
            embedding_dim=config.embedding_dim,
            feature_names=[ITEM_ID, NEGATIVE_ID] if key == ITEM_ID and retrieval else [key],
        )
        for key in keys
    ]


def _table_name(feature: str) -> str:
    """Return a feature's name in the form of a key of an nn.ModuleDict: no dots, and not like its attributes."""
    name = feature.replace(".", _MARK)
    return f"{_MARK}{name}" if hasattr(nn.ModuleDict(), name) else name


def feature_of(table: str) -> str:
    """Return the feature of a table, given its name."""
    return table.removeprefix(_MARK).replace(_MARK, ".")
