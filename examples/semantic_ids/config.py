"""`DecoderConfig`: the shape of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import SelfAttentionCost
from evenrank.dataloader.codes import CANDIDATE_ID, SEMANTIC_ID


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """The shape of a decoder over semantic ids."""

    codebook_sizes: tuple[int, ...]
    """[levels]: the codes of a level are in 0..size-1; as in `CodeTable.codebook_sizes`."""
    contextual: Mapping[str, int] = field(default_factory=dict)
    """Features whose values are tokens in front of the history, such as `user_id`, with the size of their vocabulary,
    as in `Manifest.vocabulary_sizes`.
    """
    hidden: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads of a layer; `hidden / heads`, the width of a head, must be even."""
    layers: int = 4
    """Number of layers."""
    ffn_multiplier: int = 4
    """Inner width of the feed-forward network as a multiple of `hidden`."""
    dropout: float = 0.1
    """Of what a layer adds to the residual stream; 0 where balanced and unbalanced training are compared."""

    def __post_init__(self) -> None:
        if not self.codebook_sizes or min(self.codebook_sizes) < 1:
            raise ConfigError(f"codebook_sizes must be numbers of at least 1, got {list(self.codebook_sizes)}")
        for name in ("hidden", "heads", "layers", "ffn_multiplier"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not isinstance(self.contextual, Mapping):
            raise ConfigError(
                f"contextual must have the size of each feature's vocabulary, got {self.contextual!r}; pass a mapping "
                "from names to sizes"
            )
        if self.hidden % (2 * self.heads):
            raise ConfigError(
                f"hidden must be a multiple of 2 * heads, got hidden={self.hidden} and heads={self.heads}"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be at least 0 and below 1, got {self.dropout}")

    @property
    def levels(self) -> int:
        """Codes of an item."""
        return len(self.codebook_sizes)

    @property
    def level_offsets(self) -> tuple[int, ...]:
        """[levels]: the first token of each level."""
        return tuple(accumulate(self.codebook_sizes[:-1], initial=0))

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    def cost(self) -> SelfAttentionCost:
        """Return what a sample costs in this model, for balancing; BOS, the same for all samples, is left out."""
        return SelfAttentionCost(
            hidden=self.hidden,
            heads=self.heads,
            head_dim=self.head_dim,
            layers=self.layers,
            ffn_multiplier=self.ffn_multiplier,
            history_key=SEMANTIC_ID,
            contextual=(*self.contextual, CANDIDATE_ID),
        )
