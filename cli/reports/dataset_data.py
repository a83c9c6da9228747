"""The numbers and tables of a dataset's report: of stores, in memory that grows with items and rows, not with events.

Routing is counted for a table that stock TorchRec shards by rows, so that each rank has a range of them: the rank of an
id is the one that has its row after a `KeyMap` of the mode has renumbered the rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evenrank.cli import console
from evenrank.cli.options import BATCH_SIZE, MIN_STEPS, RANKS, CostOptions, make_cost
from evenrank.cli.reports.gains import Gain
from evenrank.cli.reports.simulation import Draws, LengthSource
from evenrank.core.value_counts import ValueCounts
from evenrank.dataloader.balance import BalanceConfig
from evenrank.dataloader.routing import MODES, KeyMap
from evenrank.dataloader.routing.key_map import rows_per_rank
from evenrank.datasets.schema import MAX_HISTORY_LENGTH, Manifest
from evenrank.datasets.store import SequenceStore

if TYPE_CHECKING:
    from rich.table import Table

_MAX_LABELS = 8  # shown of a contextual feature
_CHUNK = 1 << 22  # elements
_BINS_PER_DOUBLING = 3
_MAX_DRAWN, _FEWEST_STEPS = 1 << 19, 24  # samples of all steps; steps, whose means then differ by about 1 %
_ROUTING_RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)  # of routing
_MAX_ROWS = 1 << 62  # of a KeyMap
STRATEGY = "lpt-swap"
# Of the same layers: one computes no padding, the other pads the samples of a rank to its longest.
MODELS = {"jagged HSTU": CostOptions(), "padded": CostOptions(cost="padded")}


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthHistogram:
    """The distribution of history lengths, on a logarithmic axis."""

    edges: NDArray[np.int64]  # [bins + 1]: bin i counts lengths edges[i] to edges[i + 1] - 1
    density: Mapping[str, NDArray[np.float64]]  # per split, [bins]: share of its rows per doubling of the length
    empty: Mapping[str, int]  # per split: rows without events, which a logarithmic axis cannot show


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextValues:
    """The values of a contextual feature."""

    feature: str
    rows: int  # of all splits
    values: tuple[tuple[str | None, int], ...]  # label (None for missing) and rows of each, most frequent first
    other_values: int  # number of further values
    other_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingLoads:
    """The load of the busiest rank over the mean of all ranks, for each of `ranks`, the numbers of ranks."""

    num_embeddings: int
    ranks: Sequence[int]
    ids: Mapping[str, Sequence[float]]  # per mode, where load is the number of distinct ids that occur
    lookups: Mapping[str, Sequence[float]]  # per mode, where load is the number of events
    most_frequent: Sequence[float]  # events of the most frequent id over the mean of the ranks, a bound of `lookups`


def length_histogram(stores: Mapping[str, SequenceStore]) -> LengthHistogram:
    """Count rows by length, in bins whose width grows with the length."""
    longest = max((int(store.lengths.max(initial=0)) for store in stores.values()), default=0)
    powers = np.arange(np.ceil(np.log2(longest + 1) * _BINS_PER_DOUBLING) + 1) / _BINS_PER_DOUBLING
    edges = np.unique(np.round(2.0**powers).astype(np.int64))
    density, empty = {}, {}
    for name, store in stores.items():
        lengths = store.lengths
        counts = np.histogram(lengths, bins=edges)[0] if len(edges) > 1 else np.zeros(0, dtype=np.int64)
        # Divided by the width on the axis: bins of the shortest lengths are wider than the others.
        density[name] = counts / max(len(lengths), 1) / np.diff(np.log2(edges))
        empty[name] = int(np.count_nonzero(lengths == 0))
    return LengthHistogram(edges=edges, density=density, empty=empty)


def context_values(stores: Mapping[str, SequenceStore], feature: str, *, max_values: int = 10) -> ContextValues:
    """Count the rows of all splits by the value of a contextual feature; ties are in the order of the ids."""
    ids, counts = count_values([store.columns[feature] for store in stores.values()])
    order = np.argsort(-counts, kind="stable")
    labels = next((store.manifest.context_labels.get(feature, ()) for store in stores.values()), ())
    return ContextValues(
        feature=feature,
        rows=int(counts.sum()),
        values=tuple((_label(labels, int(ids[place])), int(counts[place])) for place in order[:max_values]),
        other_values=max(len(ids) - max_values, 0),
        other_rows=int(counts[order[max_values:]].sum()),
    )


def balancing_gains(
    lengths: NDArray[np.int64], *, ranks: Sequence[int] = RANKS, batch_size: int = BATCH_SIZE
) -> tuple[Gain, ...]:
    """Draw steps from the lengths [rows] of a split and balance them, for each model, on ranks whose steps it fills.

    Where the rows fill no step of `ranks`, steps are of the most ranks that they fill; on one rank nothing is to gain.
    """
    most = len(lengths) // batch_size
    fillable = [world_size for world_size in ranks if world_size <= most] or [most] * (most > 1)
    source, gains = LengthSource(lengths=lengths, max_length=MAX_HISTORY_LENGTH), []
    for world_size, (model, options) in product(fillable, MODELS.items()):
        steps = min(max(_MAX_DRAWN // (world_size * batch_size), _FEWEST_STEPS), MIN_STEPS)
        drawn = Draws(source=source, batch_size=batch_size, steps=steps)
        gain = drawn.gain(world_size, BalanceConfig(cost=make_cost(options), strategy=STRATEGY))
        gains.append(gain._replace(label=model))
    return tuple(gains)


def describe_gains(num_rows: int, place: str) -> str:
    """Return for which steps, models and numbers of ranks gains are shown, in sentences."""
    model = CostOptions()
    return (
        f"Predicted gain from balancing by {STRATEGY}, for steps of {BATCH_SIZE} samples per rank whose histories have "
        f"at most {MAX_HISTORY_LENGTH} events, drawn from the {num_rows:,} rows of train, which fill a step of up to "
        f"{num_rows // BATCH_SIZE:,} ranks. A jagged HSTU ({model.layers} layers of width {model.hidden}, "
        f"{model.heads} heads) computes no padding. A padded model of that size pads all samples of a rank to the "
        f"longest; it gains if steps are planned together (--cost padded --window 8). For your own model, run "
        f"evenrank simulate {place} with its --cost, --hidden, --heads and --layers."
    )


def routing_loads(
    ids: NDArray[np.int64],
    counts: NDArray[np.int64],
    num_embeddings: int,
    *,
    ranks: Sequence[int] | None = None,
    on_ranks: Callable[[int], None] = lambda world_size: None,
) -> RoutingLoads | None:
    """Count the distinct ids and the events of each rank, in each mode.

    `ids` [n] are distinct, with `counts` [n] events each; `on_ranks` is called with each number of ranks before
    counting; without `ranks`, these are powers of two up to 1,024 that have a row for each rank. None if there are no
    ids, or more than 2^62 embeddings: ids that are hashes index no table.
    """
    if not len(ids) or num_embeddings > _MAX_ROWS:
        return None
    ranks = ranks or [each for each in _ROUTING_RANKS if each <= num_embeddings] or _ROUTING_RANKS[:1]
    id_ratios: dict[str, list[float]] = {mode: [] for mode in MODES}
    lookup_ratios: dict[str, list[float]] = {mode: [] for mode in MODES}
    for world_size in ranks:
        on_ranks(world_size)
        for mode in MODES:
            loads = _loads(ids, counts, KeyMap(num_embeddings=num_embeddings, world_size=world_size, mode=mode))
            for ratios, load in zip((id_ratios, lookup_ratios), loads, strict=True):
                ratios[mode].append(float(load.max() / load.mean()))
    largest_share = int(counts.max()) / int(counts.sum())
    return RoutingLoads(
        num_embeddings=num_embeddings,
        ranks=ranks,
        ids=id_ratios,
        lookups=lookup_ratios,
        most_frequent=[largest_share * world_size for world_size in ranks],
    )


def _loads(ids: NDArray[np.int64], counts: NDArray[np.int64], key_map: KeyMap) -> NDArray[np.float64]:
    """Return the distinct ids of each rank, and its events: [2, world size]."""
    range_rows = rows_per_rank(key_map.num_embeddings, key_map.world_size)
    loads = np.zeros((2, key_map.world_size))
    for keys, events in zip(_chunks([ids]), _chunks([counts]), strict=True):
        owners = key_map(keys) // range_rows
        loads[0] += np.bincount(owners, minlength=key_map.world_size)
        loads[1] += np.bincount(owners, weights=events, minlength=key_map.world_size)
    return loads


def count_values(columns: Sequence[NDArray[np.integer]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the values that occur in the columns, ascending, and how often each does: int64 [values] twice."""
    counts = ValueCounts()
    for chunk in _chunks(columns):
        counts.add(chunk)
    return counts.result()


def _chunks(columns: Sequence[NDArray[np.integer]]) -> Iterator[NDArray[np.integer]]:
    for column in columns:
        for start in range(0, len(column), _CHUNK):
            yield column[start : start + _CHUNK]


def tables_of(manifest: Manifest, num_events: int) -> "tuple[Table, Table, Table]":
    """Return tables of the splits, whose sum has `num_events`, of their lengths, and of vocabularies.

    Those are percentiles of the events per row in each split, and each feature's vocabulary size, which is the number
    of rows its embedding table needs.
    """
    splits = console.new_table("split", "rows", "events", "files", left=["split"])
    counts = {name: (split.rows, split.interactions, len(split.files)) for name, split in manifest.splits.items()}
    for name, of_split in counts.items():
        splits.add_row(name, *(f"{count:,}" for count in of_split))
    splits.add_section()
    rows, _, files = map(sum, zip(*counts.values(), strict=True))
    splits.add_row("all, each event once", f"{rows:,}", f"{num_events:,}", f"{files:,}")
    lengths = console.new_table("events per row", *manifest.splits, left=["events per row"])
    of_splits = [split.lengths for split in manifest.splits.values()]
    for name in dict.fromkeys(chain.from_iterable(of_splits)):
        lengths.add_row(name, *(f"{one[name]:,}" if name in one else "-" for one in of_splits))
    vocabulary = console.new_table("feature", "largest id + 1", "labels", left=["feature", "labels"])
    for name, size in manifest.vocabulary_sizes.items():
        labels = [label for label in manifest.context_labels.get(name, ()) if label is not None]
        shown = ", ".join(labels[:_MAX_LABELS]) + (", ..." if len(labels) > _MAX_LABELS else "")
        vocabulary.add_row(name, f"{size:,}", shown)
    return splits, lengths, vocabulary


def routing_tables(loads: RoutingLoads) -> list["Table"]:
    """Return tables of the busiest rank's distinct ids and lookups over the mean, per mode and number of ranks."""
    lookups = {**loads.lookups, "most frequent": loads.most_frequent}
    tables = []
    for name, ratios in (("distinct ids", loads.ids), ("lookups", lookups)):
        table = console.new_table(name, *(f"{ranks:,}" for ranks in loads.ranks), left=[name], narrow=True)
        for label, values in ratios.items():
            table.add_row(label, *map(_format_ratio, values))
        tables.append(table)
    return tables


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


def _label(labels: Sequence[str | None], value: int) -> str | None:
    if value == 0:
        return None
    label = labels[value] if value < len(labels) else None
    return str(value) if label is None else label
