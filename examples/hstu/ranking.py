"""`HSTURanking`: predicts the actions of candidates or, in batches without candidates, those of the history."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.sparse.jagged_tensor import JaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader import SequenceBatch
from evenrank.datasets.schema import ITEM_ID
from evenrank.training import label_bits
from hstu.config import HSTUConfig
from hstu.encoder import HSTUEncoder, lay_out, values_of


class HSTURanking(nn.Module):
    """A ranking model with a binary task per bit of the action, or other tasks.

    The label of an item is predicted at the item's own token, which sees the history before it and not its action.

    Args:
        embeddings: from a KeyedJaggedTensor to a JaggedTensor [values, embedding_dim] per feature, as
            `torchrec.EmbeddingCollection`; see `hstu.config`.
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
        if num_tasks < 1:
            raise ConfigError(f"num_tasks must be at least 1, got {num_tasks}")
        self.embeddings = embeddings
        self.dense = RankingHead(config, num_tasks, targets or partial(label_bits, num_tasks=num_tasks))

    def forward(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Return the sum of each task's loss over the batch's labels, and the logits.

        TorchRec's pipelines trace this method as far as `embeddings`, and call `dense` as it is.

        Returns:
            Loss sums [num_tasks]; logits [labels, num_tasks], in the order of `batch.labels`. Both at least float32.

        Raises:
            ConfigError: the batch has no labels, or it or the tables lack a feature.
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
        tokens = self.encoder(layout.arrange(values_of(embeddings)), layout.sequences)
        # Labels are those of the last items: of the candidates, or of all.
        labeled = layout.last_items(num_labels, batch.labels.length_per_key()[0])
        logits = self.tasks(tokens.index_select(0, layout.places[ITEM_ID][labeled]))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets = self.targets(batch.labels.values()).to(logits.dtype)
        if targets.shape != logits.shape:
            raise ConfigError(
                f"targets returned {list(targets.shape)} for {len(logits)} labels; it must return "
                f"[n, {logits.shape[1]}], a column for each of num_tasks"
            )
        return binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(0), logits


def at_least(threshold: int) -> Callable[[Tensor], Tensor]:
    """Return the `targets` of one binary task: whether the action, such as a rating, is at least a threshold."""
    return partial(_reaches, threshold=threshold)


def _reaches(labels: Tensor, threshold: int) -> Tensor:
    return (labels >= threshold).float().unsqueeze(-1)
