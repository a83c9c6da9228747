"""HSTU attention over jagged sequences: which tokens see which, and the padded reference.

    out_i = sum over the tokens j that i sees of SiLU(q_i · k_j / sqrt(head_dim)) / scale_length * v_j

There is no softmax: weights do not compete, and a token that sees nothing gets 0 (Zhai et al., 2024, equation 2).
A sample's tokens are its contextual ones, its history and its candidates. With 1, 3 and 2 of them, row i sees:

    contextual   x x x x
    history      x x
                 x x x
                 x x x x
    candidates   x x x x x
                 x x x x   x
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import silu


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Where the samples of a batch are in tensors [tokens, ...], and what their tokens are."""

    offsets: Tensor
    """int64 [B + 1]: sample b has the tokens offsets[b] .. offsets[b + 1] - 1."""
    num_contextual: Tensor
    """int64 [B]: how many of a sample's first tokens are contextual."""
    num_candidates: Tensor
    """int64 [B]: how many of a sample's last tokens are candidates."""
    num_tokens: int
    """Of the batch; on the host, so that nothing has to wait for the device."""
    max_length: int
    """A number of tokens that no sample of the batch exceeds; the closer, the less is launched for nothing."""

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sample: int64 [B]."""
        return self.offsets.diff()

    @cached_property
    def longest_first(self) -> Tensor:
        """The samples by descending length: int64 [B]."""
        return self.lengths.argsort(descending=True)

    @cached_property
    def rows(self) -> Tensor:
        """The sample of each token: int64 [tokens]."""
        samples = torch.arange(len(self.offsets) - 1, device=self.offsets.device)
        return samples.repeat_interleave(self.lengths, output_size=self.num_tokens)

    def positions(self) -> Tensor:
        """Return each token's place in its sample, from 0: int64 [tokens]."""
        tokens = torch.arange(self.num_tokens, device=self.offsets.device)
        return tokens - self.offsets[self.rows]

    def pad(self, values: Tensor) -> Tensor:
        """Return values [tokens, ...] as [B, max_length, ...], with zeros behind each sample's tokens."""
        padded = values.new_zeros(len(self.offsets) - 1, self.max_length, *values.shape[1:])
        return padded.index_put((self.rows, self.positions()), values)

    def unpad(self, padded: Tensor) -> Tensor:
        """Return the tokens of [B, max_length, ...]: [tokens, ...]."""
        return padded[self.rows, self.positions()]

    def mask(self) -> Tensor:
        """Return which tokens see which: bool [B, max_length, max_length], False wherever there is no token."""
        places = torch.arange(self.max_length, device=self.offsets.device)
        query, key = places[:, None], places[None, :]
        lengths, contextual, candidates = (
            counts[:, None, None] for counts in (self.lengths, self.num_contextual, self.num_candidates)
        )
        history = lengths - candidates  # contextual tokens included
        sees_history = (key < history) & ((key <= query) | (query < contextual))
        mask: Tensor = (query < lengths) & (sees_history | ((query == key) & (key < lengths)))
        return mask


def padded_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, *, scale_length: int) -> Tensor:
    """Attend by padding all samples to the longest: the reference, in plain PyTorch, for every device and dtype.

    Args:
        query: [tokens, heads, head_dim].
        key: like `query`.
        value: like `query`.
        sequences: where the samples are.
        scale_length: what weights are divided by: the longest that a sample can be, which is the same for all batches.

    Returns:
        [tokens, heads, head_dim], in the dtype of `value`.
    """
    queries, keys, values = (sequences.pad(tensor).transpose(1, 2) for tensor in (query, key, value))
    scores = queries @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])
    weights = silu(scores) * sequences.mask()[:, None] / scale_length
    return sequences.unpad((weights @ values).transpose(1, 2))
