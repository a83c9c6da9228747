"""`PositionEmbedding`: what a token learns from its place in the sample."""

import torch
from torch import Tensor, nn

from hstu.attention import Sequences


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
        buckets = torch.minimum(sequences.positions(), history).clamp(max=len(self.weight) - 1)
        return nn.functional.embedding(buckets, self.weight)
