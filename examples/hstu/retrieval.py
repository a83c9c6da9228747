"""`HSTURetrieval`: predicts each next item of the history among random ones."""

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, normalize
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader import SequenceBatch
from evenrank.datasets.schema import ITEM_ID
from hstu.config import NEGATIVE_ID, HSTUConfig
from hstu.encoder import HSTUEncoder, TokenLayout, check_embedded, lay_out, offsets_of, values_of


class HSTURetrieval(nn.Module):
    """A retrieval model, trained by a softmax over each next item and the negatives of the step.

    Every item but the first of a sample is predicted from the token in front of it: the action of the item before, or
    without interleaved actions that item. A score is the cosine of the angle between what is predicted and the
    embedding of an item, divided by the temperature.

    Args:
        embeddings: as for `HSTURanking`, with a feature `negative_id` in the table of the items; see `hstu.config`.
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
        if temperature <= 0:
            raise ConfigError(f"temperature must be positive, got {temperature}")
        self.num_items = num_items
        self.embeddings = embeddings
        self.negatives = UniformNegatives(num_items, num_negatives, seed)
        self.dense = RetrievalHead(config, temperature)

    def forward(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Return the sum of the loss over the batch's loss tokens, and the logarithms of the targets' probabilities.

        Returns:
            [1] and [batch.loss_tokens, 1], both at least float32.

        Raises:
            ConfigError: the batch has labels, so that its loss tokens are others, or it or the tables lack a feature.
        """
        features = self.negatives(batch)
        result: tuple[Tensor, Tensor] = self.dense(batch, features, self.embeddings(features))
        return result

    @torch.no_grad()
    def places_of_targets(self, batch: SequenceBatch, *, chunk: int = 16_384) -> Tensor:
        """Place the last item of each sample among all items, by what precedes it; for `RankingMetrics`.

        The last item may be a candidate. What precedes it is then the history, without other candidates.

        Collective if the embeddings are sharded: every rank must call this.

        Args:
            batch: with labels or without.
            chunk: items that are scored at a time.

        Returns:
            int64 [n], for the samples with an item before their last one that is no candidate, in order: 1 and how many
            other items have no lower score. Scores are compared in float32, also under autocast.
        """
        features = with_items(batch.features, batch.features.values()[:0])
        embeddings = values_of(self.embeddings(features))
        layout, tokens = self.dense.encode(batch, embeddings)
        sequences = layout.sequences
        rows = (layout.num_items > batch.num_candidates.clamp(min=1)).nonzero().squeeze(1)
        last = offsets_of(layout.num_items)[rows + 1] - 1
        ends = sequences.offsets[rows + 1] - sequences.num_candidates[rows]
        queries = self.dense.query(tokens[torch.minimum(layout.places[ITEM_ID][last], ends) - 1])
        targets = batch.features[ITEM_ID].values()[last]
        places = torch.ones_like(targets)
        with torch.autocast(targets.device.type, enabled=False):
            queries = queries.to(torch.promote_types(queries.dtype, torch.float32))
            target_scores = (queries * _unit(embeddings[ITEM_ID][last], queries.dtype)).sum(-1)
            for first in range(0, self.num_items, chunk):
                items = torch.arange(first, min(first + chunk, self.num_items), device=targets.device)
                found = values_of(self.embeddings(with_items(without_values(batch.features), items)))[NEGATIVE_ID]
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
        vectors = values_of(embeddings)
        check_embedded(NEGATIVE_ID, vectors)
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
        """Return the layout of a batch and the representations of its tokens [tokens, hidden].

        Args:
            batch: whose tokens they are.
            vectors: per feature, the embedding of each of its values: [values, embedding_dim].
        """
        layout = lay_out(batch, self.config, predicts_history=torch.ones_like(batch.num_candidates, dtype=torch.bool))
        return layout, self.encoder(layout.arrange(vectors), layout.sequences)

    def query(self, tokens: Tensor) -> Tensor:
        """Return what predicts the item after each token [n, hidden]: [n, embedding_dim] of length 1."""
        queries = self.lower_width(tokens)
        return _unit(queries, torch.promote_types(queries.dtype, torch.float32))


def _unit(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return vectors [n, width], in another dtype, divided by their lengths."""
    return normalize(vectors.to(dtype), dim=-1)


class UniformNegatives(nn.Module):
    """Draws the negatives of a step, and adds them to the batch's features.

    They depend on the seed and on where in the data the step is, which all ranks have in common. So a sample is trained
    against the same items on whichever rank, and a resumed job draws as if it had never stopped.

    They are rows of the table of the items: where a KeyMap has renumbered these, other items, just as uniform.

    It has no parameters: with `pipeline_postproc=True` TorchRec's pipelines run it ahead, with the lookup.

    Args:
        num_items: negatives are drawn from 0..num_items-1, uniformly and with repetition.
        count: negatives of a step.
        seed: of the draws; the same on all ranks.
    """

    def __init__(self, num_items: int, count: int, seed: int) -> None:
        super().__init__()
        for name, value in (("num_items", num_items), ("num_negatives", count)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self.num_items = num_items
        self.count = count
        self.seed = seed

    def forward(self, batch: SequenceBatch) -> KeyedJaggedTensor:
        """Return the features of the batch, and the negatives as `negative_id`."""
        device = batch.features.values().device
        entropy = np.random.SeedSequence((self.seed, batch.epoch, batch.position)).generate_state(1, np.uint64)
        generator = torch.Generator(device).manual_seed(int(entropy[0] >> 1))
        negatives = torch.randint(self.num_items, (self.count,), generator=generator, device=device)
        return with_items(batch.features, negatives)


def with_items(features: KeyedJaggedTensor, items: Tensor) -> KeyedJaggedTensor:
    """Return features and, as the values of a further key `negative_id`, items [n], all in the first row."""
    in_first_row = torch.zeros_like(features.lengths()[: features.stride()])
    in_first_row[:1] = len(items)
    length_per_key = [*features.length_per_key(), len(items)]
    return KeyedJaggedTensor(
        keys=[*features.keys(), NEGATIVE_ID],
        values=torch.cat([features.values(), items]),
        lengths=torch.cat([features.lengths(), in_first_row]),
        stride=features.stride(),
        length_per_key=length_per_key,
        offset_per_key=[0, *accumulate(length_per_key)],
    )


def without_values(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return features of the same keys whose rows are all empty."""
    num_keys = len(features.keys())
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values()[:0],
        lengths=torch.zeros_like(features.lengths()),
        stride=features.stride(),
        length_per_key=[0] * num_keys,
        offset_per_key=[0] * (num_keys + 1),
    )
