"""`HSTURetrieval`: predicts each next item of the history among random ones."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, normalize
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader import SequenceBatch
from evenrank.datasets.schema import ITEM_ID
from hstu.config import HSTUConfig
from hstu.encoder import HSTUEncoder
from hstu.negatives import UniformNegatives, with_items, without_values
from hstu.tables import NEGATIVE_ID
from hstu.tokens import TokenLayout, check_embedded, lay_out, offsets_of, values_of


class HSTURetrieval(nn.Module):
    """A retrieval model, trained by a softmax over each next item and the negatives of the step.

    Every item but the first of a sample is predicted from the token in front of it: the action of the item before, or
    without interleaved actions that item. A score is the cosine of the angle between what is predicted and the
    embedding of an item, divided by the temperature.

    Args:
        embeddings: as for `HSTURanking`, with a feature `negative_id` in the table of the items; see `hstu.tables`.
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
