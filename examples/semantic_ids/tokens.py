"""From a batch to the tokens of its samples, and which token predicts which label.

    levels = 2     features   user_id u   semantic_id a1 a2 b1 b2   candidate_id c1 c2

    token           u   a1  a2  b1  b2  BOS  c1  c2
    predicts                b1  b2       c1  c2          (b1 and b2 in batches with labels of the history)

Each code is predicted at the token before it; only the target's first one is predicted at BOS, which stands for the end
of the history. All of it is integer arithmetic on whole batches, with sizes known on the host: no loop over samples, no
synchronization with the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader import SemanticIdBatch

BOS = "BOS"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Where the samples of a batch are in tensors [tokens, ...]."""

    offsets: Tensor
    """int64 [B + 1]: row b of the batch has the tokens offsets[b] .. offsets[b + 1] - 1; padding rows have BOS."""
    rows: Tensor
    """int64 [tokens]: row of each token."""
    positions: Tensor
    """int64 [tokens]: place of each token in its row, from 0."""
    max_length: int
    """A number of tokens that no row exceeds; on the host, so that nothing has to wait for the device."""

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row: int64 [B]."""
        return self.offsets.diff()

    def pad(self, values: Tensor) -> Tensor:
        """Return values [tokens, ...] as [B, max_length, ...], with zeros behind each row's tokens."""
        padded = values.new_zeros(len(self.offsets) - 1, self.max_length, *values.shape[1:])
        return padded.index_put((self.rows, self.positions), values)

    def unpad(self, padded: Tensor) -> Tensor:
        """Return the tokens of [B, max_length, ...]: [tokens, ...]."""
        return padded[self.rows, self.positions]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLayout:
    """Where the values of a batch's features are among its tokens."""

    sequences: Sequences
    """Where the samples are."""
    places: Mapping[str, Tensor]
    """Per feature, and for BOS, the token of each of its values: int64 [values]."""

    def arrange(self, embeddings: Mapping[str, Tensor]) -> Tensor:
        """Return all tokens in their order, [tokens, hidden], given those of each feature: [values, hidden]."""
        values = torch.cat([embeddings[name] for name in self.places])
        return torch.zeros_like(values).index_copy(0, torch.cat(list(self.places.values())), values)


def lay_out(batch: SemanticIdBatch, names: Sequence[str]) -> TokenLayout:
    """Lay out the tokens of a batch.

    Args:
        batch: with the lengths of its longest rows, as those of loaders and Balancers.
        names: the features whose values are a sample's tokens, and BOS, in this order.

    Raises:
        ConfigError: the batch lacks a feature, or the lengths of its longest rows.
    """
    if batch.max_lengths is None:
        raise ConfigError("the batch has no max_lengths; iterate over a loader of evenrank or a Balancer")
    known = batch.features.keys()
    lengths_of_keys = batch.features.lengths().view(len(known), -1).long()
    lengths = {BOS: torch.ones_like(lengths_of_keys[0])}
    counts, longest = {BOS: batch.batch_size}, {BOS: 1}
    for key, name in enumerate(known):
        lengths[name] = lengths_of_keys[key]
        counts[name], longest[name] = batch.features.length_per_key()[key], batch.max_lengths[name]
    for name in names:
        if name not in lengths:
            raise ConfigError(
                f"the model needs the feature {name!r}; batches have {', '.join(known)}; see contextual of the "
                "DecoderConfig, user_id and candidate_feature of the LoaderConfig"
            )
    offsets = offsets_of(torch.stack([lengths[name] for name in names]).sum(dim=0))
    rows, positions = _rows_and_index(offsets, sum(counts[name] for name in names))
    places, begins = {}, offsets[:-1]
    for name in names:
        rows_of_values, index = _rows_and_index(offsets_of(lengths[name]), counts[name])
        places[name] = begins[rows_of_values] + index
        begins = begins + lengths[name]
    max_length = sum(longest[name] for name in names)
    return TokenLayout(
        sequences=Sequences(offsets=offsets, rows=rows, positions=positions, max_length=max_length), places=places
    )


def predicting_tokens(batch: SemanticIdBatch, layout: TokenLayout, levels: int) -> Tensor:
    """Return the token at which each label is predicted: int64 [labels].

    The last `levels` labels of a sample are the target's codes, and those before them the last codes of the history.
    """
    num_labels = batch.labels.length_per_key()[0]
    label_offsets = offsets_of(batch.labels.lengths().long())
    rows, index = _rows_and_index(label_offsets, num_labels)
    from_target = index - (label_offsets.diff()[rows] - levels)  # 0 for the target's first code, negative before it
    bos = layout.places[BOS][rows]
    # The token before BOS predicts nothing, so the history's last code, -1, is predicted two tokens before BOS.
    return bos + from_target - (from_target < 0).long()


def offsets_of(lengths: Tensor) -> Tensor:
    """Return where each row begins, and where the last one ends: int64 [B + 1]."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _rows_and_index(offsets: Tensor, num_values: int) -> tuple[Tensor, Tensor]:
    """Return the row of each value of jagged rows, and its number in it: int64 [num_values] both."""
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    rows = rows.repeat_interleave(offsets.diff(), output_size=num_values)
    return rows, torch.arange(num_values, device=offsets.device) - offsets[rows]
