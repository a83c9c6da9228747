"""`lay_out`, `HSTUEncoder`: from a batch to the tokens of its samples, and to their representations.

    features of a sample         user_id u    item_id a b c    action 1 2    num_candidates 1
    its tokens                   u   a   1   b   2   c

The values of contextual features come first, then the items, each followed by its action if it has one; candidates are
the last items. All of it is integer arithmetic on whole batches, with sizes known on the host: no loop over samples, no
synchronization with the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader import SequenceBatch
from evenrank.datasets.schema import ACTION, ITEM_ID
from hstu.attention import Sequences
from hstu.config import HSTUConfig
from hstu.layer import NORM_EPS, HSTULayer, pointwise_for


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLayout:
    """Where the values of a batch's features are among its tokens."""

    sequences: Sequences
    """Where the samples are."""
    places: Mapping[str, Tensor]
    """Per feature, the token of each of its values: int64 [values]."""
    num_items: Tensor
    """int64 [B]: items of each sample, candidates included."""

    def arrange(self, embeddings: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of all tokens, in their order: [tokens, embedding_dim].

        Args:
            embeddings: per feature, the embedding of each of its values: [values, embedding_dim].

        Raises:
            ConfigError: those of a feature are missing.
        """
        for name in self.places:
            check_embedded(name, embeddings)
        values = torch.cat([embeddings[name] for name in self.places])
        # Every token is copied from exactly one value, so the backward pass is a selection of rows, without sums.
        return torch.zeros_like(values).index_copy(0, torch.cat(list(self.places.values())), values)

    def last_items(self, counts: Tensor, num_values: int) -> Tensor:
        """Return which of the batch's items are among the last of their sample.

        Args:
            counts: int64 [B]: how many of them.
            num_values: their sum, on the host.

        Returns:
            int64 [num_values]: indices of values of `item_id`, in order.
        """
        rows, index = rows_and_index(counts, num_values)
        return (offsets_of(self.num_items)[1:] - counts)[rows] + index


def lay_out(batch: SequenceBatch, config: HSTUConfig, *, predicts_history: Tensor) -> TokenLayout:
    """Lay out the tokens of a batch.

    Args:
        batch: with its features.
        config: says which features become tokens.
        predicts_history: bool [B]: samples whose history has loss tokens. There, contextual tokens see only those
            before them. If they saw the history, the next layer would show it its own future in them.

    Raises:
        ConfigError: the batch lacks a feature whose values are tokens, or the lengths of its longest rows; or samples
            can have more than `max_length` tokens.
    """
    features = batch.features
    keys = (*config.contextual, ITEM_ID, *((ACTION,) if config.interleave_actions else ()))
    known = features.keys()
    for key in keys:
        if key not in known:
            raise ConfigError(f"the model needs the feature {key!r}; batches have {', '.join(known)}")
    if batch.max_lengths is None:
        raise ConfigError("the batch has no max_lengths; iterate over a loader of evenrank or a Balancer")

    limits = batch.length_limits or {}
    longest = sum(limits.get(key, 0) for key in keys)
    if longest > config.max_length:
        raise ConfigError(
            f"samples can have {longest} tokens by the batch's length_limits, but max_length is {config.max_length}; "
            "raise it, or cut histories"
        )
    all_lengths = features.lengths().view(len(known), -1).long()
    counts = torch.stack([all_lengths[known.index(key)] for key in keys])  # [K, B]
    num_values = [features.length_per_key()[known.index(key)] for key in keys]
    num_tokens = sum(num_values)
    items = len(config.contextual)  # the row of these
    num_items = counts[items]
    num_actions = counts[items + 1] if config.interleave_actions else torch.zeros_like(num_items)
    offsets = offsets_of(counts.sum(0))

    # The values of all features at once, because on a GPU each operation takes the host longer than the device. A value
    # comes after those before it in its sample, and after as many of the other feature, up to a limit: none for a
    # contextual feature, actions for items, any number of items for actions, which begin one place later.
    begin = offsets[:-1] + counts.cumsum(0) - counts
    limits_of_others = torch.zeros_like(counts)
    if config.interleave_actions:
        begin[items + 1] = begin[items] + 1
        limits_of_others[items] = num_actions
        limits_of_others[items + 1] = num_tokens
    rows, index = rows_and_index(counts.flatten(), num_tokens)
    of_values = begin.flatten()[rows] + index + torch.minimum(index, limits_of_others.flatten()[rows])
    places = dict(zip(keys, of_values.split(num_values), strict=True))
    return TokenLayout(
        sequences=Sequences(
            offsets=offsets,
            num_contextual=counts[:items].sum(0).masked_fill(predicts_history, 0),
            # Actions are those of the first items: of the history alone, or of candidates as well.
            num_candidates=batch.num_candidates + (num_actions - (num_items - batch.num_candidates)).clamp(min=0),
            num_tokens=num_tokens,
            max_length=sum(batch.max_lengths[key] for key in keys),
        ),
        places=places,
        num_items=num_items,
    )


def check_embedded(name: str, embeddings: Mapping[str, Tensor]) -> None:
    """Check that a feature has embeddings.

    Raises:
        ConfigError: it has none.
    """
    if name not in embeddings:
        raise ConfigError(
            f"the embeddings lack the feature {name!r}, they have {', '.join(embeddings)}; create the tables with "
            "hstu.config, from the model's config and, for retrieval, with retrieval=True"
        )


def values_of(embeddings: Mapping[str, JaggedTensor]) -> dict[str, Tensor]:
    """Return the values of each feature: [values, embedding_dim]."""
    # What a sharded module returns has arrived as soon as one of its methods has been called. It has no [].
    return {name: jagged.values() for name, jagged in embeddings.items()}


def rows_and_index(counts: Tensor, num_values: int) -> tuple[Tensor, Tensor]:
    """Return, for each value of jagged rows, its row and its number in it: int64 [num_values] both.

    Args:
        counts: int64 [B]: values of each row.
        num_values: their sum, on the host.
    """
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=num_values)
    return rows, torch.arange(num_values, device=counts.device) - offsets_of(counts)[rows]


def offsets_of(counts: Tensor) -> Tensor:
    """Return where each row begins, and where the last one ends: int64 [B + 1]."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


_COPIES = 64  # of the last bucket, for its gradient


class PositionEmbedding(nn.Module):
    """An embedding of each token's position, counted from the first token of its sample.

    Candidates all have the position of the token that would come next, because they are alternatives, not a sequence.

    Args:
        buckets: positions with an embedding of their own; later ones share the last one.
        hidden: width of the tokens.
    """

    def __init__(self, buckets: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(buckets, hidden))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, sequences: Sequences) -> Tensor:
        """Return the embedding of each token's position: [tokens, hidden]."""
        history = (sequences.lengths - sequences.num_candidates)[sequences.rows]
        positions = torch.minimum(sequences.positions(), history)
        # A GPU adds up the gradients of a bucket in one thread per column, which takes long for the last one, with most
        # tokens of long samples. So these are spread over copies of it.
        last = len(self.weight) - 1
        buckets = torch.minimum(positions, last + (positions - last) % _COPIES)
        others, shared = self.weight.split([last, 1])
        return nn.functional.embedding(buckets, torch.cat([others, shared.expand(_COPIES, -1)]))


class HSTUEncoder(nn.Module):
    """Raises embeddings to the hidden width, adds positions, and applies the layers."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.fused_norms = config.fused_norms
        self.raise_width = nn.Sequential(
            nn.Linear(config.embedding_dim, config.hidden), nn.SiLU(), nn.Linear(config.hidden, config.hidden)
        )
        self.positions = PositionEmbedding(config.position_buckets, config.hidden)
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=NORM_EPS)

    def forward(self, embeddings: Tensor, sequences: Sequences) -> Tensor:
        """Return the representation of each token.

        Args:
            embeddings: [tokens, embedding_dim].
            sequences: where the samples are.

        Returns:
            [tokens, hidden]; under autocast in the dtype of the linears if norms are fused, else in float32.
        """
        embeddings = embeddings.to(self.norm.weight.dtype)  # tables may be in another one
        tokens, update = self.positions(sequences), self.raise_width(embeddings)
        for layer in self.layers:
            tokens, update = layer(tokens, update, sequences)
        _, normed = pointwise_for(tokens, fused=self.fused_norms).norm(tokens, update, self.norm)
        return normed
