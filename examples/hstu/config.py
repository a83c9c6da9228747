"""`HSTUConfig`: the shape of a model."""

from dataclasses import dataclass

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import HSTUCost
from hstu.attentions import ATTENTIONS


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
        """Return what a sample costs in this model, for a Balancer."""
        return HSTUCost(
            hidden=self.hidden,
            heads=self.heads,
            head_dim=self.head_dim,
            layers=self.layers,
            interleave_actions=self.interleave_actions,
            contextual=self.contextual,
            max_tokens=self.max_length,
        )
