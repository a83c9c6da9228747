"""Which position a token has."""

import torch

from hstu.attention import Sequences
from hstu.encoder import PositionEmbedding


def test_positions_count_from_the_first_token_and_candidates_share_the_next_one() -> None:
    positions = PositionEmbedding(4, 1)
    with torch.no_grad():
        positions.weight.copy_(torch.arange(4.0)[:, None])
    sequences = Sequences(
        offsets=torch.tensor([0, 5, 5, 11]),
        num_contextual=torch.tensor([2, 0, 0]),
        num_candidates=torch.tensor([3, 0, 0]),
        num_tokens=11,
        max_length=6,
    )
    # The second sample has no tokens; the third is longer than there are buckets.
    assert positions(sequences).flatten().tolist() == [0, 1, 2, 2, 2, 0, 1, 2, 3, 3, 3]
