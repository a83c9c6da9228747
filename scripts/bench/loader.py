"""Compare loaders with baselines: pandas rows of JSON lists, a NumPy gather, a plain loop over Parquet files.

    .venv/bin/python scripts/bench/loader.py [--users 138493] [--runs 5] [--dir DIR]

Writes a dataset of the size of ml-20m to DIR, unless it exists: lognormal histories with a median of 82 and a mean of
144 events. Batches of 128 with histories of at most 512 events and 10 candidates; the loaders take turns.

    ours ...            build_loader, on the caller's thread or 1 or 2 workers; with 16 negatives per sample; with the
                        plans of 8 and 64 ranks, of which one reads its share
    stream ...          build_stream_loader, from Parquet
    numpy gather        items and actions of each batch gathered from mapped columns, without making batches
    pandas rows         PyTorch's DataLoader over a data frame whose rows have JSON lists; a tenth of an epoch
    plain loop          pyarrow: files in random order, the newest events of each row into a buffer of 8,192 rows

    samples_per_s              for each run; per_cpu_s: of the CPU time of all threads of the process
    x_pandas, x_gather, x_ours samples_per_s relative to those loaders, for each run
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from evenrank.dataloader import LoaderConfig, Negatives, SequenceBatch, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, HSTUCost
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor
from evenrank.datasets import SequenceStore, open_store
from evenrank.datasets.distributions import Lognormal, Zipf
from evenrank.datasets.order import permute
from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess
from report import emit, machine, show

BATCH_SIZE, MAX_HISTORY_LENGTH, NUM_CANDIDATES, NUM_NEGATIVES = 128, 512, 10, 16
BALANCE = BalanceConfig(cost=HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=True))
_PANDAS_SAMPLES = 12_800
_BUFFER_ROWS, _RECORD_BATCH_ROWS = 8192, 512

Sample = tuple[NDArray[np.integer], NDArray[np.integer]]  # the newest items and actions of a user
Epoch = Callable[[], int]  # loads an epoch, or part of one, and returns the number of samples


def make_data(folder: Path, users: int) -> Path:
    """Write the dataset, unless it exists."""
    path = folder / f"loader-{users}"
    if not path.exists():
        lengths = Lognormal(mean=144, std=204, low=20, high=12_000)
        synthetic = SyntheticConfig(num_users=users, lengths=lengths, items=Zipf(exponent=1.05, high=131_262))
        preprocess(PreprocessConfig(dataset="synthetic", out=path, split="user:0", synthetic=synthetic))
    return path


class JsonUsers(Dataset[Sample]):
    """One sample per user, from a data frame whose lists are JSON."""

    def __init__(self, store: SequenceStore, num_users: int) -> None:
        spans = [*itertools.pairwise(store.offsets[: num_users + 1].tolist())]
        lists = {
            name: [json.dumps(store.columns[name][a:b].tolist()) for a, b in spans] for name in ("item_id", "action")
        }
        self.frame = pd.DataFrame(lists)

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, row: int) -> Sample:
        user, newest = self.frame.iloc[row], slice(-(NUM_CANDIDATES + MAX_HISTORY_LENGTH), None)
        return np.array(json.loads(user["item_id"])[newest]), np.array(json.loads(user["action"])[newest])


class PlainLoop:
    """Batches from Parquet files, of rows that are drawn from a buffer."""

    def __init__(self, path: Path) -> None:
        self._files = sorted((path / "train").glob("*.parquet"))
        self._random = random.Random(0)

    def __iter__(self) -> Iterator[SequenceBatch]:
        samples = self._samples()
        buffer = [*itertools.islice(samples, _BUFFER_ROWS)]
        while buffer:
            for last in range(-1, -1 - min(BATCH_SIZE, len(buffer)), -1):
                index = self._random.randrange(len(buffer) + 1 + last)
                buffer[index], buffer[last] = buffer[last], buffer[index]
            yield collate(buffer[-BATCH_SIZE:])
            del buffer[-BATCH_SIZE:]
            buffer += itertools.islice(samples, BATCH_SIZE)

    def _samples(self) -> Iterator[Sample]:
        for path in self._random.sample(self._files, len(self._files)):
            for rows in pq.ParquetFile(path).iter_batches(_RECORD_BATCH_ROWS, columns=["item_id", "action"]):
                items, actions = (rows.column(index).flatten().to_numpy() for index in range(2))
                offsets = rows.column(0).offsets.to_numpy() - rows.column(0).offsets[0].as_py()
                for begin, end in itertools.pairwise(offsets.tolist()):
                    newest = slice(max(begin, end - MAX_HISTORY_LENGTH - NUM_CANDIDATES), end)
                    yield items[newest].copy(), actions[newest].copy()  # not all rows of the record batch


def collate(samples: list[Sample]) -> SequenceBatch:
    """Make a batch of single samples."""
    lengths = np.array([len(items) for items, _ in samples])
    history = [actions[:-NUM_CANDIDATES] for _, actions in samples]
    labels = np.concatenate([actions[-NUM_CANDIDATES:] for _, actions in samples]).astype(np.int64)
    values = np.concatenate([*(items for items, _ in samples), *history]).astype(np.int64)
    features = torch.from_numpy(values), np.stack([lengths, lengths - NUM_CANDIDATES])
    candidates = np.full((1, len(samples)), NUM_CANDIDATES)
    return SequenceBatch(
        batch_size=len(samples),
        num_real=len(samples),
        features=keyed_jagged_tensor(["item_id", "action"], *features),
        labels=keyed_jagged_tensor(["label"], torch.from_numpy(labels), candidates),
        num_candidates=torch.from_numpy(candidates[0]),
        sample_ids=torch.zeros(len(samples), dtype=torch.int64),
    )


def gather(store: SequenceStore) -> int:
    """Gather the items and actions of an epoch's batches with NumPy."""
    rows = permute(np.arange(len(store)), len(store), seed=0, epoch=0)
    for first in range(0, len(store), BATCH_SIZE):
        ids = rows[first : first + BATCH_SIZE]
        ends = store.offsets[ids + 1]
        begins = np.maximum(store.offsets[ids], ends - NUM_CANDIDATES - MAX_HISTORY_LENGTH)
        lengths = ends - begins
        indices = np.repeat(begins - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        store.columns["item_id"].take(indices)
        store.columns["action"].take(indices)
    return len(store)


def make_loaders(path: Path) -> dict[str, Epoch]:
    """Return what is timed."""
    store = open_store(path)
    some = min(_PANDAS_SAMPLES, len(store))
    users, rows = JsonUsers(store, some), permute(np.arange(some), some, seed=0, epoch=0).tolist()

    def epoch(batches: Iterable[SequenceBatch]) -> Epoch:
        return lambda: sum(batch.num_real for batch in batches)

    def ours(num_workers: int, by: Any = None, *, world_size: int = 1, build: Any = build_loader) -> Epoch:
        config = LoaderConfig(
            batch_size=BATCH_SIZE,
            max_history_length=MAX_HISTORY_LENGTH,
            max_num_candidates=NUM_CANDIDATES,
            num_workers=num_workers,
            persistent_workers=build is build_loader,
            negatives=Negatives(count=NUM_NEGATIVES, by=by) if by else None,
        )
        balance = {"balance": BALANCE} if world_size > 1 else {}
        return epoch(build(path, config, rank=0, world_size=world_size, **balance))

    return {
        "ours": ours(0),
        "ours, 1 worker": ours(1),
        "ours, 2 workers": ours(2),
        "ours, uniform negatives": ours(0, "uniform"),
        "ours, popular negatives": ours(0, "popularity"),
        "ours, balanced for 8 ranks": ours(0, world_size=8),
        "ours, balanced for 64 ranks": ours(0, world_size=64),
        "stream": ours(0, build=build_stream_loader),
        "stream, 2 workers": ours(2, build=build_stream_loader),
        "numpy gather": lambda: gather(store),
        "pandas rows": epoch(DataLoader(users, batch_size=BATCH_SIZE, sampler=rows, collate_fn=collate)),
        "plain loop": epoch(PlainLoop(path)),
    }


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=138_493)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    emit(machine())
    path = make_data(options.dir.absolute(), options.users)
    loaders = make_loaders(path)
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    cpu_rates: dict[str, list[float]] = {name: [] for name in loaders}
    for run in range(options.runs + 1):
        for name, load in loaders.items():
            start, cpu = time.perf_counter(), time.process_time()
            samples = load()
            if run:  # the first run compiles, starts workers and loads pages
                rates[name].append(samples / (time.perf_counter() - start))
                cpu_rates[name].append(samples / (time.process_time() - cpu))
    rows = []
    for name in loaders:
        row = {"loader": name, "samples_per_s": rates[name], "per_cpu_s": cpu_rates[name]}
        for column, other in (("x_pandas", "pandas rows"), ("x_gather", "numpy gather"), ("x_ours", "ours")):
            row[column] = [round(own / of, 3) for own, of in zip(rates[name], rates[other], strict=True)]
        rows.append(emit(row))
    show(rows)


if __name__ == "__main__":
    main()
