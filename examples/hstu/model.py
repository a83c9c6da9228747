"""HSTU (Zhai et al., 2024, "Actions Speak Louder than Words") as a ranking and as a retrieval model.

lay_out         which value of a batch is which token, and which tokens see which
HSTUEncoder     the embeddings of tokens -> positions -> layers
HSTURanking     a logit per task for each label
HSTURetrieval   the next item among random ones, and its place among all
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding, log_softmax, normalize
from torchrec import EmbeddingConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader import SequenceBatch
from evenrank.datasets.schema import ACTION, ITEM_ID
from evenrank.training import label_bits
from hstu.layers import NORM_EPS, HSTUConfig, HSTULayer, Sequences, offsets_of, rows_and_index

NEGATIVE_ID = "negative_id"


def arrange(embeddings: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> Tensor:
    """Return the embeddings of all tokens in their order: [tokens, embedding_dim].

    Args:
        embeddings: by feature, the embedding of each of its values: [values, embedding_dim].
        places: by feature, the token of each of its values: int64 [values].
    """
    values = torch.cat([embeddings[name] for name in places])
    # Every token is copied from exactly one value, so the backward pass is a selection of rows, without sums.
    return torch.zeros_like(values).index_copy(0, torch.cat(list(places.values())), values)


def tables(
    vocabulary_sizes: Mapping[str, int], config: HSTUConfig, *, retrieval: bool = False
) -> list[EmbeddingConfig]:
    """Return a table for each feature that becomes tokens, for `torchrec.EmbeddingCollection`.

    Args:
        vocabulary_sizes: rows of each table by feature, as in a dataset's manifest.
        config: says which features become tokens.
        retrieval: negatives are looked up in the table of the items too.
    """
    if missing := set(config.features) - vocabulary_sizes.keys():
        known = ", ".join(vocabulary_sizes)
        raise ConfigError(f"no vocabulary size of {min(missing)!r}; known are those of {known}")
    return [
        EmbeddingConfig(
            # A key of an nn.ModuleDict: without dots, and unlike its attributes, whatever the feature is called.
            name=f"table:{key}".replace(".", ":"),
            num_embeddings=vocabulary_sizes[key],
            embedding_dim=config.embedding_dim,
            feature_names=[ITEM_ID, NEGATIVE_ID] if key == ITEM_ID and retrieval else [key],
        )
        for key in config.features
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
        """Return which of the batch's items are among the last of their sample: int64 [num_values], in order.

        Args:
            counts: int64 [B]: how many of them.
            num_values: their sum, on the host.
        """
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
    if missing := [key for key in config.features if key not in known]:
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
        embeddings: from a KeyedJaggedTensor to a JaggedTensor [values, embedding_dim] per feature, as
            `torchrec.EmbeddingCollection`; see `tables`.
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
        tokens = self.encoder(arrange(_values(embeddings), layout.places), layout.sequences)
        # Labels are those of the last items: of the candidates, or of all.
        labeled = layout.last_items(num_labels, batch.labels.length_per_key()[0])
        logits = self.tasks(tokens.index_select(0, layout.places[ITEM_ID][labeled]))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets = self.targets(batch.labels.values()).to(logits.dtype)
        return binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(0), logits


def at_least(threshold: int) -> Callable[[Tensor], Tensor]:
    """Return the `targets` of one binary task: whether the action, such as a rating, is at least a threshold."""
    return lambda labels: (labels >= threshold).float().unsqueeze(-1)


def _values(embeddings: Mapping[str, JaggedTensor]) -> dict[str, Tensor]:
    """Return the embedding of each value of each feature: [values, embedding_dim]."""
    # What a sharded module returns has arrived as soon as one of its methods has been called. It has no [].
    return {name: jagged.values() for name, jagged in embeddings.items()}


class HSTURetrieval(nn.Module):
    """Predicts each next item of the history, by a softmax over it and the negatives of the step.

    Every item but the first of a sample is predicted from the token in front of it: the action of the item before, or
    without interleaved actions that item. A score is the cosine of the angle between what is predicted and the
    embedding of an item, divided by the temperature.

    Args:
        embeddings: as for `HSTURanking`, with a feature `negative_id` in the table of the items; see `tables`.
        config: the shape of the encoder.
        num_items: of the table of the items.
        num_negatives: of each step, for all its samples on all ranks.
        temperature: of the softmax.
        seed: of the negatives.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        config: HSTUConfig,
        *,
        num_items: int,
        num_negatives: int = 128,
        temperature: float = 0.05,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.num_items = num_items
        self.embeddings = embeddings
        self.negatives = UniformNegatives(num_items, num_negatives, seed)
        self.dense = RetrievalHead(config, temperature)

    def forward(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Return the sum of the loss over the batch's loss tokens, and the logarithms of the targets' probabilities.

        Returns:
            [1] and [batch.loss_tokens, 1], both at least float32.
        """
        features = self.negatives(batch)
        result: tuple[Tensor, Tensor] = self.dense(batch, features, self.embeddings(features))
        return result

    @torch.no_grad()
    def places_of_targets(self, batch: SequenceBatch, *, chunk: int = 16_384) -> Tensor:
        """Place the last item of each sample among all items, by what precedes it; for `RankingMetrics`.

        The last item may be a candidate. What precedes it is then the history, without other candidates.
        Collective if the embeddings are sharded.

        Args:
            batch: with labels or without.
            chunk: items that are scored at a time.

        Returns:
            int64 [n], for the samples with an item before their last one that is no candidate, in order: 1 and how many
            other items have no lower score. Scores are compared in float32, also under autocast.
        """
        vectors = _values(self.embeddings(with_items(batch.features, batch.features.values()[:0])))
        layout, tokens = self.dense.encode(batch, vectors)
        sequences = layout.sequences
        rows = (layout.num_items > batch.num_candidates.clamp(min=1)).nonzero().squeeze(1)
        last = offsets_of(layout.num_items)[rows + 1] - 1
        ends = sequences.offsets[rows + 1] - sequences.num_candidates[rows]
        queries = self.dense.query(tokens[torch.minimum(layout.places[ITEM_ID][last], ends) - 1])
        targets = batch.features[ITEM_ID].values()[last]
        places = torch.ones_like(targets)
        with torch.autocast(targets.device.type, enabled=False):
            queries = queries.to(torch.promote_types(queries.dtype, torch.float32))
            target_scores = (queries * _unit(vectors[ITEM_ID][last], queries.dtype)).sum(-1)
            for first in range(0, self.num_items, chunk):
                items = torch.arange(first, min(first + chunk, self.num_items), device=targets.device)
                found = _values(self.embeddings(with_items(batch.features, items, are_alone=True)))[NEGATIVE_ID]
                is_lower = queries @ _unit(found, queries.dtype).T < target_scores[:, None]  # nothing is lower than NaN
                places += (~is_lower & (items != targets[:, None])).sum(1)
        return places


class RetrievalHead(nn.Module):
    """Everything of an HSTURetrieval but its embedding tables and its negatives."""

    def __init__(self, config: HSTUConfig, temperature: float) -> None:
        super().__init__()
        self.config = config
        self.temperature = temperature
        self.encoder = HSTUEncoder(config)
        self.lower_width = nn.Linear(config.hidden, config.embedding_dim)

    def forward(
        self, batch: SequenceBatch, features: KeyedJaggedTensor, embeddings: Mapping[str, JaggedTensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the loss sum and the logarithms of the targets' probabilities; see `HSTURetrieval.forward`."""
        if batch.labels is not None:
            raise ConfigError("the batch has labels; set max_num_candidates=0 and num_tasks=0 to train retrieval")
        vectors = _values(embeddings)
        layout, tokens = self.encode(batch, vectors)
        targets = layout.last_items((layout.num_items - 1).clamp(min=0), batch.loss_tokens)
        queries = self.query(tokens[layout.places[ITEM_ID][targets] - 1])
        positives = (queries * _unit(vectors[ITEM_ID][targets], queries.dtype)).sum(-1, keepdim=True)
        negatives = queries @ _unit(vectors[NEGATIVE_ID], queries.dtype).T
        is_target = features[NEGATIVE_ID].values() == features[ITEM_ID].values()[targets, None]
        scores = torch.cat([positives, negatives.masked_fill(is_target, -torch.inf)], dim=1) / self.temperature
        log_probabilities = log_softmax(scores, dim=1)[:, :1]
        return -log_probabilities.sum(0), log_probabilities

    def encode(self, batch: SequenceBatch, vectors: Mapping[str, Tensor]) -> tuple[TokenLayout, Tensor]:
        """Return the layout of a batch and the representations of its tokens [tokens, hidden]."""
        layout = lay_out(batch, self.config, predicts_history=torch.ones_like(batch.num_candidates, dtype=torch.bool))
        return layout, self.encoder(arrange(vectors, layout.places), layout.sequences)

    def query(self, tokens: Tensor) -> Tensor:
        """Return what predicts the item after each token [n, hidden]: [n, embedding_dim] of length 1."""
        queries = self.lower_width(tokens)
        return _unit(queries, torch.promote_types(queries.dtype, torch.float32))


def _unit(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return vectors [n, width], in another dtype, divided by their lengths."""
    return normalize(vectors.to(dtype), dim=-1)


class UniformNegatives(nn.Module):
    """Draws the negatives of a step uniformly from 0..num_items-1, and adds them to the batch's features.

    They depend on the seed and on where in the data the step is, which all ranks have in common. So a sample is trained
    against the same items on whichever rank, and a resumed job draws as if it had never stopped. They are rows of the
    table: where a KeyMap has renumbered these, other items, just as uniform.

    It has no parameters: with `pipeline_postproc=True` TorchRec's pipelines run it ahead, with the lookup.
    """

    def __init__(self, num_items: int, count: int, seed: int) -> None:
        super().__init__()
        self.num_items, self.count, self.seed = num_items, count, seed

    def forward(self, batch: SequenceBatch) -> KeyedJaggedTensor:
        """Return the features of the batch, and the negatives as `negative_id`."""
        device = batch.features.values().device
        entropy = np.random.SeedSequence((self.seed, batch.epoch, batch.position)).generate_state(1, np.uint64)
        generator = torch.Generator(device).manual_seed(int(entropy[0] >> 1))
        return with_items(
            batch.features, torch.randint(self.num_items, (self.count,), generator=generator, device=device)
        )


def with_items(features: KeyedJaggedTensor, items: Tensor, *, are_alone: bool = False) -> KeyedJaggedTensor:
    """Return features and, as the values of a further key `negative_id`, items [n], all in the first row.

    If these are to be alone, the rows of all other keys are empty.
    """
    values, lengths, counts = features.values(), features.lengths(), features.length_per_key()
    if are_alone:
        values, lengths, counts = values[:0], torch.zeros_like(lengths), [0] * len(counts)
    in_first_row = torch.zeros_like(lengths[: features.stride()])
    in_first_row[:1] = len(items)
    length_per_key = [*counts, len(items)]
    return KeyedJaggedTensor(
        keys=[*features.keys(), NEGATIVE_ID],
        values=torch.cat([values, items]),
        lengths=torch.cat([lengths, in_first_row]),
        stride=features.stride(),
        length_per_key=length_per_key,
        offset_per_key=[0, *accumulate(length_per_key)],
    )
