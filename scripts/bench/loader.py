"""Compare `build_loader` with baselines: pandas rows of JSON lists, a bare NumPy gather, and worker processes.

    .venv/bin/python scripts/bench/loader.py [--users 138493] [--runs 5] [--dir DIR]

Writes a dataset of the size of ml-20m to DIR, unless it exists, and prints one JSON line per row: the time to open it,
the memory of 8 processes that read it, and the samples per second of each loader, in batches of 128 with histories of
at most 512 events and 10 candidates. Rates are medians over runs; each run times all loaders in turn.

    samples_per_second, lowest         median and minimum over runs
    x_pandas, x_numpy, x_one_worker    rate relative to "pandas rows", "numpy gather" and "ours, 1 worker"
    x_time_without                     of 16 negatives per sample: time relative to the same loader without

The last row is about states: the CPU time of the training thread to take a batch from a StatefulDataLoader with 2
workers, between steps of 20 ms, with a shuffled sampler and, in each worker, a state of 64 KiB. Medians over steps and
runs.

    bare_us                            the loader alone
    pulled_us                          as a Balancer pulls it, from an object that hides the states
    with_states_us                     as a Balancer pulls it
    states_percent                     (with_states_us - pulled_us) / 20 ms
"""

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from evenrank.dataloader import LoaderConfig, Negatives, SequenceBatch, build_loader
from evenrank.dataloader.balance.source import LoaderAdapter
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets import SequenceStore, open_store
from evenrank.datasets.distributions import Lognormal, Zipf
from evenrank.datasets.order import permute
from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess

BATCH_SIZE, MAX_HISTORY_LENGTH, NUM_CANDIDATES = 128, 512, 10
_NUM_NEGATIVES = 16
_PANDAS_SAMPLES = 12_800  # a tenth of the epoch, because this baseline is slow
_NUM_PROCESSES = 8
_STEP_SECONDS, _NUM_STEPS = 0.02, 200  # of training, in which workers collate
_AHEAD = 3  # batches that a Balancer pulls ahead by default
_OPEN = """
import sys, time
from evenrank.datasets import open_store
start = time.perf_counter()
open_store(sys.argv[1])
print(time.perf_counter() - start)
"""

Sample = tuple[NDArray[np.integer], NDArray[np.integer]]  # the newest items and actions of a user


def make_data(folder: Path, users: int) -> Path:
    """Write the dataset, unless it exists: lognormal histories with a median of 82 and a mean of 144 events."""
    path = folder / f"loader-{users}"
    if not path.exists():
        synthetic = SyntheticConfig(
            num_users=users,
            lengths=Lognormal(mean=144, std=204, low=20, high=12_000),
            items=Zipf(exponent=1.05, high=131_262),
        )
        preprocess(PreprocessConfig(dataset="synthetic", out=path, split="user:0", synthetic=synthetic))
    return path


class MappedUsers(Dataset[Sample]):
    """A map-style dataset over mapped columns: one sample per user."""

    def __init__(self, path: Path) -> None:
        self.store = open_store(path)

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, row: int) -> Sample:
        end = int(self.store.offsets[row + 1])
        begin = max(int(self.store.offsets[row]), end - NUM_CANDIDATES - MAX_HISTORY_LENGTH)
        return self.store.columns["item_id"][begin:end], self.store.columns["action"][begin:end]


class JsonUsers(Dataset[Sample]):
    """A map-style dataset over a data frame with one row per user, whose lists are JSON."""

    def __init__(self, path: Path, num_users: int) -> None:
        store = open_store(path)
        offsets = store.offsets[: num_users + 1].tolist()
        self.frame = pd.DataFrame(
            {
                name: [
                    json.dumps(store.columns[name][begin:end].tolist()) for begin, end in itertools.pairwise(offsets)
                ]
                for name in ("item_id", "action")
            }
        )

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, row: int) -> Sample:
        user = self.frame.iloc[row]
        newest = slice(-(NUM_CANDIDATES + MAX_HISTORY_LENGTH), None)
        return np.array(json.loads(user["item_id"])[newest]), np.array(json.loads(user["action"])[newest])


def collate(samples: list[Sample]) -> SequenceBatch:
    """Make a batch of single samples."""
    lengths = np.array([len(items) for items, _ in samples])
    history = [actions[:-NUM_CANDIDATES] for _, actions in samples]
    labels = np.concatenate([actions[-NUM_CANDIDATES:] for _, actions in samples]).astype(np.int64)
    values = np.concatenate([*(items for items, _ in samples), *history]).astype(np.int64)
    lengths_per_key = np.stack([lengths, lengths - NUM_CANDIDATES])
    candidates = np.full((1, len(samples)), NUM_CANDIDATES)
    return SequenceBatch(
        batch_size=len(samples),
        num_real=len(samples),
        features=keyed_jagged_tensor(["item_id", "action"], torch.from_numpy(values), lengths_per_key),
        labels=keyed_jagged_tensor(["label"], torch.from_numpy(labels), candidates),
        num_candidates=torch.from_numpy(candidates[0]),
        sample_ids=torch.zeros(len(samples), dtype=torch.int64),
    )


def gather(store: SequenceStore) -> int:
    """Gather the items and actions of an epoch's batches with NumPy, without making batches."""
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


def count_samples(batches: Iterable[SequenceBatch]) -> int:
    """Iterate over all batches and return the number of samples."""
    return sum(batch.num_real for batch in batches)


def make_loaders(path: Path, users: int) -> dict[str, Callable[[], int]]:
    """Return the functions to time: each iterates over an epoch, or part of one, and returns the number of samples."""
    store = open_store(path)
    num_json_users = min(_PANDAS_SAMPLES, users)
    json_users = JsonUsers(path, num_json_users)
    json_rows = permute(np.arange(num_json_users), num_json_users, seed=0, epoch=0).tolist()

    def pandas_rows() -> int:
        return count_samples(DataLoader(json_users, batch_size=BATCH_SIZE, sampler=json_rows, collate_fn=collate))

    def worker_processes(num_workers: int) -> Callable[[], int]:
        loader = DataLoader(
            MappedUsers(path),
            batch_size=BATCH_SIZE,
            shuffle=True,
            collate_fn=collate,
            num_workers=num_workers,
            persistent_workers=True,
        )
        return lambda: count_samples(loader)

    items = KeyMap(
        num_embeddings=store.manifest.vocabulary_sizes["item_id"], world_size=_NUM_PROCESSES, mode="hash_roundrobin"
    )

    def ours(num_workers: int, key_maps: Mapping[str, KeyMap] | None = None, by: Any = None) -> Callable[[], int]:
        config = LoaderConfig(
            batch_size=BATCH_SIZE,
            max_history_length=MAX_HISTORY_LENGTH,
            max_num_candidates=NUM_CANDIDATES,
            num_workers=num_workers,
            persistent_workers=True,
            key_maps=key_maps or {},
            negatives=Negatives(count=_NUM_NEGATIVES, by=by) if by else None,
        )
        loader = build_loader(path, config, rank=0, world_size=1)
        return lambda: count_samples(loader)

    return {
        "ours": ours(0),
        "ours, mapped items": ours(0, {"item_id": items}),
        "ours, uniform negatives": ours(0, by="uniform"),
        "ours, popular negatives": ours(0, by="popularity"),
        "ours, 1 worker": ours(1),
        "ours, 2 workers": ours(2),
        "ours, 2 workers, popular negatives": ours(2, by="popularity"),
        "numpy gather": lambda: gather(store),
        "worker processes, 1": worker_processes(1),
        "worker processes, 2": worker_processes(2),
        "pandas rows": pandas_rows,
    }


def measure_rates(path: Path, users: int, runs: int) -> None:
    """Print the samples per second of each loader."""
    loaders = make_loaders(path, users)
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for run in range(runs + 1):
        for name, load_epoch in loaders.items():
            start = time.perf_counter()
            num_samples = load_epoch()
            if run:  # the first run compiles, starts workers and loads pages
                rates[name].append(num_samples / (time.perf_counter() - start))
    medians = {name: statistics.median(rates_of_loader) for name, rates_of_loader in rates.items()}
    for name, rate in medians.items():
        row: dict[str, str | float] = {
            "loader": name,
            "samples_per_second": round(rate),
            "lowest": round(min(rates[name])),
            "x_pandas": round(rate / medians["pandas rows"], 2),
            "x_numpy": round(rate / medians["numpy gather"], 2),
        }
        if name.startswith("ours"):
            row["x_one_worker"] = round(rate / medians["ours, 1 worker"], 2)
        if name.endswith("negatives"):
            without = rates[name.rpartition(", ")[0]]
            row["x_time_without"] = round(
                statistics.median(plain / drawn for plain, drawn in zip(without, rates[name], strict=True)), 2
            )
        print(json.dumps(row), flush=True)


def measure_opening(path: Path) -> None:
    """Print how long a process takes to open the dataset, the first time and later."""
    shutil.rmtree(path / ".cache", ignore_errors=True)
    seconds = [float(subprocess.check_output([sys.executable, "-P", "-c", _OPEN, str(path)])) for _ in range(4)]
    row = {"measurement": "opening", "first_seconds": round(seconds[0], 3), "later_seconds": round(max(seconds[1:]), 4)}
    print(json.dumps(row), flush=True)


def _read_epoch(path: Path, pipe: Connection) -> None:
    config = LoaderConfig(batch_size=BATCH_SIZE, max_history_length=MAX_HISTORY_LENGTH)
    loader = build_loader(path, config, rank=0, world_size=1)  # in a variable, because it keeps the files mapped
    count_samples(loader)  # the whole epoch, to touch all pages
    pipe.send(os.getpid())
    pipe.recv()  # all processes are measured


def measure_memory(path: Path) -> None:
    """Print how much memory the mapped files take in 8 processes, per process and in total."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    for _ in range(_NUM_PROCESSES):
        parent_end, child_end = context.Pipe()
        context.Process(target=_read_epoch, args=(path, child_end)).start()
        child_end.close()
        pipes.append(parent_end)
    process_ids = [pipe.recv() for pipe in pipes]  # returns when all processes have touched all pages
    mapped = [_mapped_kib(process_id) for process_id in process_ids]
    for pipe in pipes:
        pipe.send(None)
    files = sum(file.stat().st_size for file in (path / ".cache").glob("*/*.npy"))
    row = {
        "measurement": f"memory of {_NUM_PROCESSES} processes",
        "files_MiB": round(files / 2**20),
        "each_MiB": round(statistics.median(rss for rss, _ in mapped) / 2**10),
        "together_MiB": round(sum(pss for _, pss in mapped) / 2**10),
    }
    print(json.dumps(row), flush=True)


def _mapped_kib(process_id: int) -> tuple[int, int]:
    """Return the sums of Rss and Pss (shared pages divided by their users) of a process's mapped `.npy` files."""
    rss = pss = 0
    is_column = False
    for line in Path(f"/proc/{process_id}/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            is_column = line.endswith(".npy")
        elif is_column and name in ("Rss:", "Pss:"):
            rss, pss = (rss + int(values[0]), pss) if name == "Rss:" else (rss, pss + int(values[0]))
    return rss, pss


class StatefulUsers(MappedUsers):
    """A dataset whose workers have a state of 64 KiB, such as the contents of a shuffle buffer."""

    def state_dict(self) -> dict[str, bytes]:
        """Return the state of a worker."""
        return {"buffer": bytes(1 << 16)}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Continue at a state."""


class WithoutState:
    """The batches of a loader, whose states nobody can ask for."""

    def __init__(self, loader: Iterable[SequenceBatch]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[SequenceBatch]:
        return iter(self._loader)


def measure_states(path: Path, runs: int) -> None:
    """Print the training thread's CPU time for a batch of a StatefulDataLoader, with and without the state after it."""

    def loader() -> Any:
        users = StatefulUsers(path)
        return StatefulDataLoader(users, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate, num_workers=2)

    loaders: dict[str, Iterable[SequenceBatch]] = {
        "bare": loader(),
        "pulled": LoaderAdapter(WithoutState(loader()), rank=0, world_size=1, ahead=_AHEAD),
        "with_states": LoaderAdapter(loader(), rank=0, world_size=1, ahead=_AHEAD),
    }
    medians: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(runs):
        for name, batches in loaders.items():
            medians[name].append(statistics.median(_seconds_of_batches(iter(batches))))
    us = {name: 1e6 * statistics.median(of_runs) for name, of_runs in medians.items()}
    row: dict[str, str | float] = {"measurement": "states of a StatefulDataLoader, 2 workers"}
    row |= {f"{name}_us": round(value, 1) for name, value in us.items()}
    row["states_percent"] = round((us["with_states"] - us["pulled"]) / (1e4 * _STEP_SECONDS), 2)
    print(json.dumps(row), flush=True)


def _seconds_of_batches(batches: Iterator[SequenceBatch]) -> list[float]:
    """Return this thread's CPU time for each batch, between steps of training that keep a core busy."""
    next(batches)  # starts the workers
    seconds = []
    for _ in range(_NUM_STEPS):
        trained = time.perf_counter() + _STEP_SECONDS
        while time.perf_counter() < trained:
            pass
        start = time.thread_time()  # not the time that it waits, which depends on the workers
        next(batches)
        seconds.append(time.thread_time() - start)
    return seconds


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=138_493)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("out/bench"))
    arguments = parser.parse_args()
    path = make_data(arguments.dir.absolute(), arguments.users)
    measure_opening(path)
    measure_memory(path)
    measure_rates(path, arguments.users, arguments.runs)
    measure_states(path, arguments.runs)


if __name__ == "__main__":
    main()
