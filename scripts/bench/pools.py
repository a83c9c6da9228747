"""Compare the loader of long histories of kinds of events, as MLPerf's recommender has them, with a builder by sample.

    .venv/bin/python scripts/bench/pools.py [--users 1500] [--samples 40000] [--runs 3]

Users, events and items are drawn with the published statistics of Yambda-5b. A sample has a target, at most 4,086
earlier events (a third each of listens, likes and skips, within the newest 20,000) with item, artist, album, kind and
time, and seven crosses. Batches of 128, on 2 worker threads; rows take turns.

    by user, shuffled    build_loader, of samples in this order
    share of 8           what rank 0 of 8 reads of its share, shuffled, and what it reads balanced, with no exchange
    by sample            NumPy slices and xxhash, sample by sample, then joined into batches; a fraction of the samples

    samples_per_s; cpu_us of all threads, per sample; x_by_sample, samples_per_s relative to the builder's;
    x_unbalanced, the CPU time relative to that of an unbalanced share
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xxhash
from numpy.typing import NDArray

from evenrank.dataloader import Cross, LoaderConfig, Pools, build_loader
from evenrank.dataloader.balance import BalanceConfig, HSTUCost
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor
from evenrank.datasets import SequenceStore
from evenrank.datasets.schema import DataFile, Manifest, sha256_of
from evenrank.datasets.store import Slices
from report import Row, emit, machine, show

NUM_ITEMS, LISTENED, LIKED, SKIPPED = 9_390_000, 1, 2, 4
POOLS = Pools(values=(LISTENED, LIKED, SKIPPED))
CROSSES = {
    f"cross{number}": Cross(of=of, size=size, seed=number)
    for number, (of, size) in enumerate(
        [
            (("user_id", "artist_id"), 10_000_000),
            (("user_id", "album_id"), 10_000_000),
            (("user_id", "hour"), 5_000_000),
            (("artist_id", "hour"), 1_000_000),
            (("item_id", "hour"), 10_000_000),
            (("user_id", "is_organic"), 1_000_000),
            (("user_id", "artist_id", "hour"), 10_000_000),
        ]
    )
}
CONFIG = LoaderConfig(
    batch_size=128,
    max_history_length=4086,
    max_num_candidates=1,
    num_tasks=1,
    user_id=True,
    extra_events=("timestamp_ms",),
    pools=POOLS,
    item_features=("artist_id", "album_id"),
    target_features={"hour": "timestamp_ms // 3600000 % 24"},
    crosses=CROSSES,
    num_workers=2,
    prefetch=4,
)
BALANCE = BalanceConfig(cost=HSTUCost(hidden=512, heads=4, head_dim=128, layers=5, interleave_actions=False))


def make_store(folder: Path, users: int, samples: int) -> SequenceStore:
    """Return events of users with `samples` of their listens as targets, by user, and write the table of items."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(2695), 1.067, users), 5, 27_738).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    num_events = int(offsets[-1])
    played = np.where(rng.random(num_events) < 0.63, LISTENED, SKIPPED)
    kinds = np.where(rng.random(num_events) < 0.972, played, rng.choice([LIKED, 0], num_events, p=[0.67, 0.33]))
    columns: dict[str, NDArray[Any]] = {
        "user_id": rng.permutation(users),
        "item_id": np.minimum(NUM_ITEMS ** rng.random(num_events), NUM_ITEMS - 1).astype(np.int64),
        "action": kinds.astype(np.int32),
        "timestamp_ms": np.sort(rng.integers(0, 301 * 17_280, num_events)) * 5_000,
        "is_organic": rng.integers(0, 2, num_events),
    }
    features = {
        name: rng.integers(1, NUM_ITEMS // count, NUM_ITEMS) for name, count in (("artist_id", 7), ("album_id", 3))
    }
    pq.write_table(pa.table({"item_id": np.arange(NUM_ITEMS), **features}), folder / "items.parquet")
    manifest = Manifest(
        dataset="yambda",
        extra_events={"is_organic": "int64"},
        vocabulary_sizes={"item_id": NUM_ITEMS, "user_id": users, "action": 5},
        item_features=DataFile(path="items.parquet", rows=NUM_ITEMS, sha256=sha256_of(folder / "items.parquet")),
    )
    store = SequenceStore(manifest=manifest, split="train", offsets=offsets, columns=columns, source=folder)
    targets = np.flatnonzero((kinds == LISTENED) | (kinds == SKIPPED))
    targets = np.sort(rng.choice(targets, min(samples, len(targets)), replace=False))
    rows = np.searchsorted(offsets, targets, side="right") - 1
    return store.sliced(Slices(rows, offsets[rows], targets + 1), np.ones(len(targets), dtype=np.int32))


class BySample:
    """Makes batches as one would at first: sample by sample."""

    def __init__(self, store: SequenceStore, folder: Path) -> None:
        self._store = store
        table = pq.read_table(folder / "items.parquet")
        self._artists, self._albums = (table[name].to_numpy() for name in CONFIG.item_features)

    def sample(self, index: int) -> dict[str, NDArray[Any]]:
        """Return the features of a sample."""
        columns, begin, target = self._store.columns, int(self._store.begins[index]), int(self._store.ends[index]) - 1
        row = int(self._store.rows_of(np.array([index]))[0])
        first = max(begin, target - POOLS.within)
        kinds, share = columns["action"][first:target], CONFIG.max_history_length // len(POOLS.values)
        kept = np.sort(np.concatenate([np.flatnonzero(kinds == kind)[-share:] for kind in POOLS.values])) + first
        shown = np.append(kept, target)
        items, times = columns["item_id"][shown], columns["timestamp_ms"][shown]
        artists, albums = self._artists[items], self._albums[items]
        known = {"user_id": columns["user_id"][row], "item_id": items[-1], "artist_id": artists[-1]}
        known |= {"album_id": albums[-1], "hour": times[-1] // 3_600_000 % 24}
        known["is_organic"] = columns["is_organic"][target]
        made = {"user_id": known["user_id"], "hour": known["hour"]}
        for name, cross in CROSSES.items():
            words = np.array([known[each] for each in cross.of], dtype="<i8").tobytes()
            made[name] = xxhash.xxh64_intdigest(words, seed=cross.seed) % cross.size
        lists = {"item_id": items, "artist_id": artists, "album_id": albums, "action": columns["action"][kept]}
        return {name: np.array([value]) for name, value in made.items()} | lists | {"timestamp_ms": times}

    def batch(self, indices: Sequence[int]) -> Any:
        """Return the features of a batch."""
        samples = [self.sample(index) for index in indices]
        lists = [[sample[name] for sample in samples] for name in samples[0]]
        values = np.concatenate([np.concatenate(of_key) for of_key in lists]).astype(np.int64)
        lengths = np.array([[len(each) for each in of_key] for of_key in lists])
        return keyed_jagged_tensor([*samples[0]], torch.from_numpy(values), lengths)


def measure(store: SequenceStore, folder: Path, samples: int, runs: int) -> list[Row]:
    """Return the rows of all ways."""

    def ours(order: str, world_size: int = 1, balance: BalanceConfig | None = None) -> Callable[[], int]:
        loader = build_loader(store, replace(CONFIG, order=order), rank=0, world_size=world_size, balance=balance)
        return lambda: sum(batch.num_real for batch in loader)

    builder, few = BySample(store, folder), np.random.default_rng(1).permutation(len(store))[: samples // 50]

    def by_sample() -> int:
        for first in range(0, len(few), CONFIG.batch_size):
            builder.batch(few[first : first + CONFIG.batch_size].tolist())
        return len(few)

    check(store, builder, few[:128])
    ways = {"by user": ours("rows"), "shuffled": ours("shuffle"), "share of 8": ours("shuffle", 8)}
    ways |= {"share of 8, balanced": ours("shuffle", 8, BALANCE), "by sample": by_sample}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    cpu_us: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(runs + 1):
        for name, way in ways.items():
            begin, cpu = time.perf_counter(), time.process_time()
            count = way()
            if run:  # the first compiles, counts and reads what is not in memory
                rates[name].append(count / (time.perf_counter() - begin))
                cpu_us[name].append(1e6 * (time.process_time() - cpu) / count)
    rows: list[Row] = []
    for name, of_way in rates.items():
        ratios = [rate / plain for rate, plain in zip(of_way, rates["by sample"], strict=True)]
        rows.append({"loader": name, "samples_per_s": of_way, "cpu_us": cpu_us[name], "x_by_sample": ratios})
    both = zip(cpu_us["share of 8"], cpu_us["share of 8, balanced"], strict=True)
    rows[3]["x_unbalanced"] = [balanced / plain for plain, balanced in both]
    return rows


def check(store: SequenceStore, builder: BySample, indices: NDArray[np.int64]) -> None:
    """Raise an error unless both make the same features."""
    loader = build_loader(store, replace(CONFIG, order="rows"), rank=0, world_size=1)
    found, expected = loader.collate(indices).features, builder.batch(indices.tolist())
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    assert torch.equal(found.lengths(), expected.lengths())
    assert torch.equal(found.values(), expected.values())


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=1500, help="users, of 4,600 events each on average")
    parser.add_argument("--samples", type=int, default=40_000, help="samples of an epoch of all ranks")
    parser.add_argument("--runs", type=int, default=3, help="epochs that count, after one that does not")
    options = parser.parse_args()
    torch.set_num_threads(1)
    emit(machine())
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder), options.users, options.samples)
        show([emit(row) for row in measure(store, Path(folder), options.samples, options.runs)])


if __name__ == "__main__":
    main()
