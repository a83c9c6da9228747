"""HSTU (Zhai et al., 2024, "Actions Speak Louder than Words") as a ranking model.

lay_out       which value of a batch is which token, and which tokens see which
HSTUEncoder   the embeddings of tokens -> positions -> layers
HSTURanking   a logit per task for each label
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding
from torchrec import EmbeddingConfig
from torchrec.sparse.jagged_tensor import JaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader import SequenceBatch
from evenrank.datasets.schema import ACTION, ITEM_ID
from evenrank.training import label_bits
from hstu.layers import NORM_EPS, HSTUConfig, HSTULayer, Sequences, offsets_of, rows_and_index


def arrange(embeddings: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> Tensor:
    """Return the embeddings of all tokens in their order: [tokens, embedding_dim].

    `embeddings` has that of each value of each feature, [values, embedding_dim], and `places` its token.
    """
    values = torch.cat([embeddings[name] for name in places])
    # Every token is copied from exactly one value, so the backward pass is a selection of rows, without sums.
    return torch.zeros_like(values).index_copy(0, torch.cat(list(places.values())), values)


def tables(vocabulary_sizes: Mapping[str, int], config: HSTUConfig) -> list[EmbeddingConfig]:
    """Return a table for each feature that becomes tokens or a part of them, for `torchrec.EmbeddingCollection`.

    `vocabulary_sizes` has the rows of each table by feature, as a dataset's manifest.
    """
    features = (*config.features, *config.item_features)
    if missing := set(features) - vocabulary_sizes.keys():
        known = ", ".join(vocabulary_sizes)
        raise ConfigError(f"no vocabulary size of {min(missing)!r}; known are those of {known}")
    return [
        EmbeddingConfig(
            # A key of an nn.ModuleDict: without dots, and unlike its attributes, whatever the feature is called.
            name=f"table:{key}".replace(".", ":"),
            num_embeddings=vocabulary_sizes[key],
            embedding_dim=config.embedding_dim,
            feature_names=[key],
        )
        for key in features
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLayout:
    """Where the values of a batch's features are among its tokens."""

    sequences: Sequences
    places: Mapping[str, Tensor]
    """By feature, the token of each of its values: int64 [values]."""
    num_items: Tensor
    """int64 [B]: items of each sample, candidates included."""

    def last_items(self, counts: Tensor, num_values: int) -> Tensor:
        """Return which of the batch's items are the last `counts`, int64 [B], of their sample: int64 [num_values]."""
        rows, index = rows_and_index(counts, num_values)
        return (offsets_of(self.num_items)[1:] - counts)[rows] + index


def lay_out(batch: SequenceBatch, config: HSTUConfig, *, predicts_history: Tensor) -> TokenLayout:
    """Lay out the tokens of a batch, by integer arithmetic on the device, with sizes known on the host.

        features of a sample         user_id u    item_id a b c    action 1 2    num_candidates 1
        its tokens                   u   a   1   b   2   c

    The values of contextual features come first, then the items, each followed by its action if it has one; candidates
    are the last items.

    Args:
        batch: of a loader of evenrank or a Balancer, which know the lengths of the longest rows.
        config: says which features become tokens.
        predicts_history: bool [B]: samples whose history has loss tokens. There, contextual tokens see only those
            before them. If they saw the history, the next layer would show it its own future in them.

    Raises:
        ConfigError: the batch lacks a feature, or samples can have more than `max_length` tokens.
    """
    features, known = batch.features, batch.features.keys()
    if missing := [key for key in (*config.features, *config.item_features) if key not in known]:
        raise ConfigError(f"the model needs the feature {missing[0]!r}; batches have {', '.join(known)}")
    limits = batch.length_limits or {}
    if (longest := sum(limits.get(key, 0) for key in config.features)) > config.max_length:
        raise ConfigError(
            f"samples can have {longest} tokens by the batch's length_limits, but max_length is {config.max_length}; "
            "raise it, or cut histories"
        )
    assert batch.max_lengths is not None
    lengths = dict(zip(known, features.lengths().view(len(known), -1).long(), strict=True))
    sizes = dict(zip(known, features.length_per_key(), strict=True))
    num_items = lengths[ITEM_ID]
    num_actions = lengths[ACTION] if config.interleave_actions else torch.zeros_like(num_items)
    counts = torch.stack([lengths[key] for key in config.features])
    offsets = offsets_of(counts.sum(0))
    places, begins = {}, offsets[:-1]
    for key in config.contextual:
        rows, index = rows_and_index(lengths[key], sizes[key])
        places[key] = begins[rows] + index
        begins = begins + lengths[key]
    rows, index = rows_and_index(num_items, sizes[ITEM_ID])
    places[ITEM_ID] = begins[rows] + index + torch.minimum(index, num_actions[rows])
    if config.interleave_actions:
        rows, index = rows_and_index(num_actions, sizes[ACTION])
        places[ACTION] = begins[rows] + 2 * index + 1
    sequences = Sequences(
        offsets=offsets,
        num_contextual=(begins - offsets[:-1]).masked_fill(predicts_history, 0),
        # Actions are those of the first items: of the history alone, or of candidates as well.
        num_candidates=batch.num_candidates + (num_actions - (num_items - batch.num_candidates)).clamp(min=0),
        num_tokens=sum(sizes[key] for key in config.features),
        max_length=sum(batch.max_lengths[key] for key in config.features),
    )
    return TokenLayout(sequences=sequences, places=places, num_items=num_items)


_COPIES = 64  # of the last bucket, for its gradient


class PositionEmbedding(nn.Module):
    """An embedding of each token's position, counted from the first token of its sample.

    Candidates all have the position of the token that would come next, because they are alternatives, not a sequence.
    Positions from `buckets` - 1 on share the last embedding.
    """

    def __init__(self, buckets: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(buckets, hidden))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, sequences: Sequences) -> Tensor:
        """Return the embedding of each token's position: [tokens, hidden]."""
        history = (sequences.lengths - sequences.num_candidates)[sequences.rows]
        positions = torch.minimum(sequences.positions, history)
        # A GPU adds up the gradients of a bucket in one thread per column, which takes long for the last one, with most
        # tokens of long samples. So these are spread over copies of it.
        last = len(self.weight) - 1
        buckets = torch.minimum(positions, last + (positions - last) % _COPIES)
        others, shared = self.weight.split([last, 1])
        return embedding(buckets, torch.cat([others, shared.expand(_COPIES, -1)]))


class HSTUEncoder(nn.Module):
    """Raises embeddings to the hidden width, adds positions, and applies the layers."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.raise_width = nn.Sequential(
            nn.Linear(config.embedding_dim, config.hidden), nn.SiLU(), nn.Linear(config.hidden, config.hidden)
        )
        self.positions = PositionEmbedding(config.position_buckets, config.hidden)
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=NORM_EPS)

    def forward(self, embeddings: Tensor, sequences: Sequences) -> Tensor:
        """Return the representation of each token, [tokens, hidden], given its embedding, [tokens, embedding_dim]."""
        embeddings = embeddings.to(self.norm.weight.dtype)  # tables may be in another one
        tokens, update = self.positions(sequences), self.raise_width(embeddings)
        for layer in self.layers:
            tokens, update = layer(tokens, update, sequences)
        normed: Tensor = self.norm(tokens + update)
        return normed


class HSTURanking(nn.Module):
    """Predicts the actions of candidates or, in batches without candidates, those of the history.

    There is a binary task for each low bit of the action, or other tasks. The label of an item is predicted at the
    item's own token, which sees the history before it and not its action.

    Args:
        embeddings: as `torchrec.EmbeddingCollection`; see `tables`.
        config: the shape of the encoder.
        num_tasks: logits per label.
        targets: from labels int64 [n] to what the tasks should predict, 0 to 1 [n, num_tasks]; None: the action's bits.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        config: HSTUConfig,
        *,
        num_tasks: int = 1,
        targets: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.dense = RankingHead(config, num_tasks, targets or partial(label_bits, num_tasks=num_tasks))

    def forward(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Return the sum of each task's loss over the batch's labels, and the logits.

        TorchRec's pipelines trace this method as far as `embeddings`, and call `dense` as it is.

        Returns:
            Loss sums [num_tasks]; logits [labels, num_tasks], in the order of `batch.labels`. Both at least float32.
        """
        result: tuple[Tensor, Tensor] = self.dense(batch, self.embeddings(batch.features))
        return result


class RankingHead(nn.Module):
    """Everything of an HSTURanking but its embedding tables."""

    def __init__(self, config: HSTUConfig, num_tasks: int, targets: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.config = config
        self.targets = targets
        self.encoder = HSTUEncoder(config)
        self.tasks = nn.Sequential(
            nn.Linear(config.hidden, config.hidden), nn.SiLU(), nn.Linear(config.hidden, num_tasks)
        )

    def forward(self, batch: SequenceBatch, embeddings: Mapping[str, JaggedTensor]) -> tuple[Tensor, Tensor]:
        """Return the loss sums and the logits; see `HSTURanking.forward`."""
        if batch.labels is None:
            raise ConfigError("the batch has no labels; set max_num_candidates or num_tasks of its LoaderConfig")
        num_labels = batch.labels.lengths().long()
        layout = lay_out(batch, self.config, predicts_history=num_labels > batch.num_candidates)
        # What a sharded module returns has arrived as soon as one of its methods has been called. It has no [].
        vectors = {name: jagged.values() for name, jagged in embeddings.items()}
        vectors[ITEM_ID] = sum((vectors[name] for name in self.config.item_features), vectors[ITEM_ID])
        tokens = self.encoder(arrange(vectors, layout.places), layout.sequences)
        # Labels are those of the last items: of the candidates, or of all.
        labeled = layout.last_items(num_labels, batch.labels.length_per_key()[0])
        logits = self.tasks(tokens.index_select(0, layout.places[ITEM_ID][labeled]))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets = self.targets(batch.labels.values()).to(logits.dtype)
        return binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(0), logits


def at_least(threshold: int) -> Callable[[Tensor], Tensor]:
    """Return the `targets` of one binary task: whether the action, such as a rating, is at least a threshold."""
    return lambda labels: (labels >= threshold).float().unsqueeze(-1)
