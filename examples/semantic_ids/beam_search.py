"""The most probable items after each history: beam search over the levels of their codes."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader import SemanticIdBatch
from evenrank.dataloader.codes import SEMANTIC_ID, CodeTable
from hstu.layers import offsets_of
from semantic_ids.model import BOS, Attend, SemanticIdModel, causal_attention, lay_out


class Catalogue:
    """The prefixes of the codes of all items, as sorted numbers: 8 bytes per prefix.

    The prefixes of a level are numbered in lexicographic order. The one that continues prefix p of the level before
    with code c has the key p * (codebook size) + c, so its number is the place of this key among the sorted keys.

    Args:
        table: the codes of the items.
        device: that of the model.

    Raises:
        ConfigError: no item has a code.
    """

    def __init__(self, table: CodeTable, device: torch.device | str = "cpu") -> None:
        items, codes = table.all_codes()
        if not len(items):
            raise ConfigError(f"none of the {len(table.codes)} items of the table has a code; pass the data's table")
        prefixes = np.zeros(len(items), dtype=np.int64)  # of each item; before the first level all are the empty one
        self.codebook_sizes = table.codebook_sizes
        self._keys = []
        firsts = np.zeros(0, dtype=np.int64)
        for level, size in enumerate(table.codebook_sizes):
            keys = prefixes * size + codes[:, level]
            unique, firsts, prefixes = np.unique(keys, return_index=True, return_inverse=True)
            self._keys.append(torch.from_numpy(unique).to(device))
        self._items: Tensor = torch.from_numpy(items[firsts]).to(device)
        # Of items with several codes, by which each counts once: [items, levels].
        self._first_codes = None if table.alternatives is None else torch.from_numpy(table.codes).long().to(device)

    def continuations(self, prefixes: Tensor, level: int) -> Tensor:
        """Return the prefixes of a level that continue others by each code, -1 if no item does: [..., codebook size].

        `prefixes`, int64 [...], are those of the level before, or -1; for the first level 0.
        """
        size, keys = self.codebook_sizes[level], self._keys[level]
        wanted = prefixes[..., None] * size + torch.arange(size, device=prefixes.device)
        found = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        return torch.where((keys[found] == wanted) & (prefixes[..., None] >= 0), found, -1)

    def items(self, prefixes: Tensor) -> Tensor:
        """Return the items with these codes of all levels, the lowest if several have the same; -1 for -1."""
        return torch.where(prefixes >= 0, self._items[prefixes.clamp(min=0)], -1)

    def merge(self, beams: "Beams") -> "Beams":
        """Return beams with each item once: with its first code, and the probability of all that were found."""
        if self._first_codes is None:
            return beams
        same = beams.items[:, :, None] == beams.items[:, None, :]
        totals = torch.where(same, beams.log_probabilities[:, None, :], -torch.inf).logsumexp(dim=-1)
        is_again = same.tril(-1).any(dim=-1)
        totals, order = totals.masked_fill(is_again, -torch.inf).sort(dim=-1, descending=True, stable=True)
        items = beams.items.gather(1, order).masked_fill(totals.isneginf(), -1)
        return Beams(items=items, codes=self._first_codes[items.clamp(min=0)], log_probabilities=totals)


@dataclass(frozen=True, kw_only=True, slots=True)
class Beams:
    """The most probable items after each history, best first. Items with the same codes count as one, and so do several
    codes of an item.
    """

    items: Tensor
    """int64 [B, K]; -1 where the search found fewer."""
    codes: Tensor
    """int64 [B, K, levels]: the first of each item; meaningless where `items` is -1."""
    log_probabilities: Tensor
    """[B, K]; -inf where `items` is -1. Those of all tuples of codes add up to 1, also of tuples that no item has."""

    def places_of_targets(self, batch: SemanticIdBatch) -> Tensor:
        """Return the place of each sample's target, for `RankingMetrics`: int64 [num_real]; 0 if it was not found."""
        levels = self.codes.shape[-1]
        ends = offsets_of(batch.labels.lengths().long())[1 : batch.num_real + 1]
        last = torch.arange(-levels, 0, device=ends.device)
        targets = batch.labels.values()[ends[:, None] + last]  # the target's codes are a sample's last labels
        is_target = (self.codes[: batch.num_real] == targets[:, None]).all(dim=-1) & (self.items[: batch.num_real] >= 0)
        places = torch.arange(1, is_target.shape[1] + 1, device=ends.device)
        place: Tensor = (is_target * places).sum(dim=-1)  # tuples of codes differ, so at most one is the target
        return place


@torch.no_grad()
def beam_search(model: SemanticIdModel, batch: SemanticIdBatch, catalogue: Catalogue, *, beams: int) -> Beams:
    """Return the most probable items after each history of a batch.

    It reads each history once. At each level it keeps the `beams` most probable prefixes that an item continues, so it
    is exhaustive if `beams` is at least the number of prefixes of every level. A feature `candidate_id`, and labels,
    are not read.

    Args:
        model: in evaluation mode.
        batch: its padding rows have items too, which mean nothing.
        catalogue: of the items to choose from.
        beams: how many items to search, the K of `Beams`, unless there are fewer.

    Raises:
        ConfigError: `beams` is below 1, or the catalogue has other codebooks than the model.
        DataError: the model's outputs are NaN, of which any order would be some ranking.
    """
    if beams < 1:
        raise ConfigError(f"beams must be at least 1, got {beams}")
    if tuple(catalogue.codebook_sizes) != tuple(model.config.codebook_sizes):
        raise ConfigError(
            f"the catalogue has codebooks of {list(catalogue.codebook_sizes)}, the model of "
            f"{list(model.config.codebook_sizes)}; create both from the same CodeTable"
        )
    history = _read(model, batch)
    rows = batch.batch_size
    codes = torch.empty(rows, 1, 0, dtype=torch.int64, device=history.ends.device)
    prefixes = codes.new_zeros(rows, 1)
    totals = history.ends.new_zeros(rows, 1, dtype=torch.float32)
    for level, size in enumerate(model.config.codebook_sizes):
        outputs = history.ends[:, None] if level == 0 else _continue(model, history, codes)
        continued = catalogue.continuations(prefixes, level)
        log_probabilities = model.logits(outputs, level).log_softmax(dim=-1)
        scores = (totals[..., None] + log_probabilities).masked_fill(continued < 0, -torch.inf).flatten(1)
        totals, best = scores.topk(min(beams, scores.shape[1]))
        prefixes = continued.flatten(1).gather(1, best)
        kept = codes.gather(1, (best // size)[..., None].expand(-1, -1, level))
        codes = torch.cat([kept, (best % size)[..., None]], dim=-1)
    if totals.isnan().any():
        raise DataError("the scores of the model are NaN; load an earlier checkpoint, and train with a FiniteCheck")
    return catalogue.merge(Beams(items=catalogue.items(prefixes), codes=codes, log_probabilities=totals))


@dataclass(frozen=True, kw_only=True, slots=True)
class _History:
    """What later tokens need to know of the tokens up to BOS."""

    lengths: Tensor  # int64 [B]: tokens of each row
    ends: Tensor  # [B, hidden]: outputs at BOS
    keys_and_values: list[tuple[Tensor, Tensor]]  # of each layer, [B, heads, max_length, head_dim] both


def _read(model: SemanticIdModel, batch: SemanticIdBatch) -> _History:
    sequences, places = lay_out(batch, (*model.config.contextual, SEMANTIC_ID, BOS))
    kept: list[tuple[Tensor, Tensor]] = []

    def attend_and_keep(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kept.append((sequences.pad(key).transpose(1, 2), sequences.pad(value).transpose(1, 2)))
        return causal_attention(query, key, value, sequences)

    outputs = model.decode(model.embed(batch, places), sequences.positions, [attend_and_keep] * model.config.layers)
    return _History(lengths=sequences.lengths, ends=outputs[places[BOS]], keys_and_values=kept)


def _continue(model: SemanticIdModel, history: _History, codes: Tensor) -> Tensor:
    """Return the outputs at the last codes of all beams: [B, K, hidden], given codes [B, K, levels so far]."""
    rows, beams, depth = codes.shape
    # The few codes of a beam are read again at every level, which needs no cache of theirs to be reordered.
    tokens = model.code_embedding((codes + model.level_offsets[:depth]).flatten())
    positions = history.lengths[:, None, None] + torch.arange(depth, device=codes.device).expand(rows, beams, -1)
    attends: list[Attend] = [
        partial(_beam_attention, history=of_layer, lengths=history.lengths, beams=beams)
        for of_layer in history.keys_and_values
    ]
    outputs: Tensor = model.decode(tokens, positions.flatten(), attends)
    return outputs.view(rows, beams, depth, -1)[:, :, -1]


def _beam_attention(
    query: Tensor, key: Tensor, value: Tensor, *, history: tuple[Tensor, Tensor], lengths: Tensor, beams: int
) -> Tensor:
    """Attend from each code of a beam to the whole history, and to the codes of the beam up to itself.

    Query, key, value and the result are [B * beams * codes, heads, head_dim], the keys and values of histories [B,
    heads, max_length, head_dim], and `lengths` the tokens of each history, BOS included: int64 [B].
    """
    own_query, own_key, own_value = (
        tensor.view(len(lengths), -1, *query.shape[1:]).transpose(1, 2) for tensor in (query, key, value)
    )
    token = torch.arange(own_query.shape[2], device=query.device)
    beam = token // max(len(token) // beams, 1)
    sees_own = (beam[:, None] == beam[None, :]) & (token[:, None] >= token[None, :])
    sees_history = torch.arange(history[0].shape[2], device=query.device) < lengths[:, None]
    mask = torch.cat([sees_history[:, None].expand(-1, len(token), -1), sees_own.expand(len(lengths), -1, -1)], dim=-1)
    keys, values = torch.cat([history[0], own_key], dim=2), torch.cat([history[1], own_value], dim=2)
    attended = scaled_dot_product_attention(own_query, keys, values, attn_mask=mask[:, None])
    return attended.transpose(1, 2).reshape(query.shape)
