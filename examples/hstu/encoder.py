"""`HSTUEncoder`: embeddings of the tokens of a batch -> their representations."""

from torch import Tensor, nn

from hstu.attention import Sequences
from hstu.config import HSTUConfig
from hstu.layer import NORM_EPS, HSTULayer
from hstu.pointwise import pointwise_for
from hstu.positions import PositionEmbedding


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
