"""The numbers of a dataset's report: pure functions on stores, in bounded memory.

Columns of events are mapped files and are read a chunk at a time, so memory follows the number of items and of rows,
not that of events.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenrank.datasets.schema import ITEM_ID, TIMESTAMP_MS
from evenrank.datasets.store import SequenceStore

_CHUNK = 1 << 22  # elements
_LARGEST_TABLE = 1 << 25  # ids up to here are counted in a table, larger ones by sorting
_BINS_PER_DOUBLING = 3

DAY_MS = 86_400_000
_MOST_BINS = 120  # a phone shows that many bars apart
_BIN_WIDTHS: Mapping[str, int] = {
    "second": 1000,
    "minute": 60_000,
    "hour": 3_600_000,
    "day": DAY_MS,
    "week": 7 * DAY_MS,
    "4 weeks": 28 * DAY_MS,
    "13 weeks": 91 * DAY_MS,
    "52 weeks": 364 * DAY_MS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthHistogram:
    """How history lengths are distributed, on a logarithmic axis."""

    edges: NDArray[np.int64]  # [bins + 1]: bin i has lengths edges[i] to edges[i + 1] - 1
    density: Mapping[str, NDArray[np.float64]]  # per split, [bins]: share of its rows per doubling of the length
    empty: Mapping[str, int]  # per split: rows without events, which a logarithmic axis cannot show


@dataclass(frozen=True, kw_only=True, slots=True)
class Popularity:
    """How often each item occurs."""

    counts: NDArray[np.int64]  # [items that occur], most frequent first

    def top(self, share_of_items: float) -> tuple[int, float]:
        """Return how many items this share of them is, rounded up, and the share of events that they have."""
        number = int(np.ceil(share_of_items * len(self.counts)))
        events = int(self.counts.sum())
        return number, int(self.counts[:number].sum()) / events if events else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """How many events there are in each stretch of time."""

    start_ms: int
    width_ms: int
    unit: str  # the width in words
    counts: NDArray[np.int64]  # [bins]


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextValues:
    """The values of a contextual feature, most frequent first."""

    feature: str
    rows: int
    values: tuple[tuple[str | None, int], ...]  # label (None for missing) and number of rows
    other_values: int  # how many values come behind those
    other_rows: int  # and how many rows have one of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """What balancing would do to the steps of so many ranks."""

    ranks: int
    repeated: bool  # the split has fewer rows than a step needs, so rows were drawn with replacement
    ratios: Mapping[str, float]  # per strategy: the heaviest rank's load to the lower bound, mean over steps
    speedups: Mapping[str, float]  # per strategy: heaviest loads as dealt to heaviest loads after, over all steps


def length_histogram(stores: Mapping[str, SequenceStore]) -> LengthHistogram:
    """Count rows by length, in bins whose width grows with the length."""
    lengths = {name: store.lengths for name, store in stores.items()}
    longest = max((int(values.max(initial=0)) for values in lengths.values()), default=0)
    doublings = np.log2(longest + 1) if longest else 0.0
    powers = np.arange(np.ceil(doublings * _BINS_PER_DOUBLING) + 1) / _BINS_PER_DOUBLING
    edges = np.unique(np.round(2.0**powers).astype(np.int64))
    density = {}
    for name, values in lengths.items():
        counts = np.histogram(values, bins=edges)[0] if len(edges) > 1 else np.zeros(0, dtype=np.int64)
        # By the width on the axis: bins of the shortest lengths are wider than the others.
        density[name] = counts / max(len(values), 1) / np.diff(np.log2(edges))
    empty = {name: int(np.count_nonzero(values == 0)) for name, values in lengths.items()}
    return LengthHistogram(edges=edges, density=density, empty=empty)


def item_popularity(stores: Mapping[str, SequenceStore]) -> Popularity:
    """Count the events of each item over all splits."""
    counts = count_values([store.events[ITEM_ID] for store in stores.values()])[1]
    return Popularity(counts=np.sort(counts)[::-1])


def timeline(stores: Mapping[str, SequenceStore]) -> Timeline | None:
    """Count the events of all splits over time; None without events."""
    columns = [store.events[TIMESTAMP_MS] for store in stores.values()]
    if (found := _range(columns)) is None:
        return None
    first, last = found
    widest = -(-(last - first + 1) // (_MOST_BINS - 1))
    unit, width = next(
        ((unit, width) for unit, width in _BIN_WIDTHS.items() if last // width - first // width < _MOST_BINS),
        (f"{widest / DAY_MS / 365.25:,.1f} years", widest),
    )
    start = first // width * width
    counts = np.zeros((last - start) // width + 1, dtype=np.int64)
    for chunk in _chunks(columns):
        counts += np.bincount((chunk - start) // width, minlength=len(counts))
    return Timeline(start_ms=start, width_ms=width, unit=unit, counts=counts)


def context_values(stores: Mapping[str, SequenceStore], feature: str, *, most: int = 10) -> ContextValues:
    """Count the rows of all splits by the value of a contextual feature; ties in the order of the ids."""
    ids, counts = count_values([store.rows[feature] for store in stores.values()])
    order = np.argsort(-counts, kind="stable")
    labels = next((store.manifest.context_labels.get(feature, ()) for store in stores.values()), ())
    return ContextValues(
        feature=feature,
        rows=int(counts.sum()),
        values=tuple((_label(labels, int(ids[i])), int(counts[i])) for i in order[:most]),
        other_values=max(len(ids) - most, 0),
        other_rows=int(counts[order[most:]].sum()),
    )


def balancing_gain(
    lengths: NDArray[np.int64],
    *,
    ranks: Sequence[int] = (8, 64, 256, 1024),
    batch_size: int = 32,
    steps: int = 4,
    most_events: int = 2048,
    seed: int = 0,
) -> tuple[Gain, ...]:
    """Draw steps of real lengths and deal them with each strategy, at the cost of an HSTU model.

    Args:
        lengths: int64 [rows]: of the split that is trained on; none gives no result.
        ranks: for each of these numbers.
        batch_size: samples of a rank in a step.
        steps: how many steps to draw.
        most_events: longer histories are cut to this length.
        seed: of the draws.

    Raises:
        ModuleNotFoundError: there is no torch here, which the planner's package needs.

    """
    # Not above: the package imports torch, which the rest of the report and the other commands do without.
    from evenrank.cli.simulation import Source, simulate
    from evenrank.dataloader.balance.cost import HSTUCost
    from evenrank.dataloader.balance.partition.strategies import STRATEGIES

    if len(lengths) == 0:
        return ()
    # The model of the published balancing results.
    cost = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8)
    source = Source(lengths=np.minimum(lengths, most_events))
    gains = []
    for world_size in ranks:
        found = {
            strategy: simulate(
                source, cost, world_size, batch_size=batch_size, strategy=strategy, steps=steps, seed=seed
            )
            for strategy in STRATEGIES
        }
        gains.append(
            Gain(
                ranks=world_size,
                repeated=source.is_repeated(world_size * batch_size),
                ratios={strategy: summary.ratio_after for strategy, summary in found.items()},
                speedups={strategy: summary.speedup for strategy, summary in found.items()},
            )
        )
    return tuple(gains)


def count_values(columns: Sequence[NDArray[np.integer]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the values that occur in the columns, ascending, and how often each does: int64 [values] twice."""
    lowest, highest = _range(columns) or (0, 0)
    if lowest >= 0 and highest < _LARGEST_TABLE:
        table = np.zeros(highest + 1, dtype=np.int64)
        for chunk in _chunks(columns):
            part = np.bincount(chunk)
            table[: len(part)] += part
        values = np.flatnonzero(table)
        return values, table[values]
    # Ids of any size, as hashes are: memory for those that occur, and for the chunk that is being sorted.
    values, counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for chunk in _chunks(columns):
        chunk_values, chunk_counts = np.unique(chunk, return_counts=True)
        merged, place = np.unique(np.concatenate([values, chunk_values]), return_inverse=True)
        total = np.zeros(len(merged), dtype=np.int64)
        total[place[: len(values)]] = counts
        total[place[len(values) :]] += chunk_counts
        values, counts = merged, total
    return values, counts


def _range(columns: Sequence[NDArray[np.integer]]) -> tuple[int, int] | None:
    ranges = [(int(chunk.min()), int(chunk.max())) for chunk in _chunks(columns)]
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


def _chunks(columns: Sequence[NDArray[np.integer]]) -> Iterator[NDArray[np.integer]]:
    for column in columns:
        for start in range(0, len(column), _CHUNK):
            yield column[start : start + _CHUNK]


def _label(labels: Sequence[str | None], value: int) -> str | None:
    if value == 0:
        return None
    label = labels[value] if value < len(labels) else None
    return str(value) if label is None else label
