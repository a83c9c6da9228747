"""`SemanticIdModel`: predicts the codes of the next item one after the other (Rajput et al., TIGER, 2023)."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from evenrank.core.errors import ConfigError
from evenrank.dataloader import SemanticIdBatch
from evenrank.dataloader.codes import CANDIDATE_ID, SEMANTIC_ID
from semantic_ids.attention import causal_attention
from semantic_ids.config import DecoderConfig
from semantic_ids.decoder import Decoder
from semantic_ids.tokens import BOS, TokenLayout, lay_out, predicting_tokens


class SemanticIdModel(nn.Module):
    """A causal decoder over [contextual tokens, codes of the history, BOS, codes of the candidate].

    Batches need `candidate_feature=True` in their LoaderConfig; `history_labels` may be set or not, and
    `label_offsets` must not be.
    """

    level_offsets: Tensor  # int64 [levels]: the first token of each level

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.code_embedding = nn.Embedding(sum(config.codebook_sizes), config.hidden)
        self.bos = nn.Parameter(torch.empty(1, config.hidden))
        self.contextual = nn.ModuleList(nn.Embedding(size, config.hidden) for size in config.contextual.values())
        self.register_buffer("level_offsets", torch.tensor(config.level_offsets), persistent=False)
        self.decoder = Decoder(config)
        self.heads = nn.ModuleList(nn.Linear(config.hidden, size, bias=False) for size in config.codebook_sizes)
        for table in (self.code_embedding.weight, self.bos, *self.contextual.parameters()):
            nn.init.normal_(table, std=0.02)

    def forward(self, batch: SemanticIdBatch) -> tuple[Tensor, list[Tensor]]:
        """Return the sum of each level's loss over the batch's labels, and the logits of the levels.

        Every level has the same number of labels. So the mean of a level is its sum divided by
        `batch.loss_tokens / levels`, and what `scale_loss` returns for it is a `levels`-th of it: their sum is the
        mean over all labels.

        Returns:
            Loss sums [levels]; per level, logits [labeled events, codebook size]. All at least float32.

        Raises:
            ConfigError: the batch lacks a feature, or has another number of codes per item.
        """
        levels = self.config.levels
        layout = lay_out(batch, (*self.config.contextual, SEMANTIC_ID, BOS, CANDIDATE_ID))
        assert batch.max_lengths is not None  # as `lay_out` has checked
        if batch.num_real and (num_codes := batch.max_lengths[CANDIDATE_ID]) != levels:
            raise ConfigError(
                f"the batch has {num_codes} codes per item, codebook_sizes {levels} levels; create the DecoderConfig "
                "with the codebook_sizes of the batches' CodeTable"
            )
        attend = partial(causal_attention, sequences=layout.sequences)
        tokens = self.embed(batch, layout)
        outputs = self.decoder(tokens, layout.sequences.positions, [attend] * self.config.layers)
        at_labels = outputs[predicting_tokens(batch, layout, levels)].view(-1, levels, self.config.hidden)
        logits = [self.logits(at_labels[:, level], level) for level in range(levels)]
        labels = batch.labels.values().view(-1, levels)
        losses = [cross_entropy(logits[level], labels[:, level], reduction="sum") for level in range(levels)]
        return torch.stack(losses), logits

    def embed(self, batch: SemanticIdBatch, layout: TokenLayout) -> Tensor:
        """Return the embeddings of all tokens: [tokens, hidden]."""
        tables = dict(zip(self.config.contextual, self.contextual, strict=True))
        embeddings = {
            name: tables.get(name, self.code_embedding)(batch.features[name].values())
            for name in layout.places
            if name != BOS
        }
        return layout.arrange({**embeddings, BOS: self.bos.expand(batch.batch_size, -1)})

    def logits(self, outputs: Tensor, level: int) -> Tensor:
        """Return the logits of a level, [..., codebook size], at least float32, given outputs [..., hidden]."""
        logits: Tensor = self.heads[level](outputs)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
