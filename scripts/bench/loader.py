"""Loading beside the usual ways: pandas rows of JSON lists, a bare NumPy gather, and worker processes.

    .venv/bin/python scripts/bench/loader.py [--users 138493] [--runs 5] [--dir DIR]

Makes a dataset of the size of ml-20m in DIR (kept for the next time), and prints one JSON line a row: the time to
open it, the memory of 8 processes on it, and samples per second of batches of 128 with histories of at most 512 events
and 10 candidates, medians over runs in which the ways take turns.
"""

import argparse
import json
import logging
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.utils.data import DataLoader, Dataset

from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.batch import keyed_jagged_tensor
from evenrank.datasets import SequenceStore, open_store
from evenrank.datasets.distributions import Lognormal, Zipf
from evenrank.datasets.order import permute
from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess

BATCH_SIZE, MAX_HISTORY_LENGTH, NUM_CANDIDATES = 128, 512, 10
_PANDAS_SAMPLES = 12_800  # it is slow: a part of the epoch is enough
_RANKS = 8
_OPEN = "import sys, time; from evenrank.datasets import open_store; begun = time.perf_counter(); "
_OPEN += "open_store(sys.argv[1]); print(time.perf_counter() - begun)"


def make_data(folder: Path, users: int) -> Path:
    """Write the dataset, if it is not there: lognormal histories with a median of 82 and a mean of 144 events."""
    path = folder / f"loader-{users}"
    if not path.exists():
        synthetic = SyntheticConfig(
            num_users=users,
            lengths=Lognormal(mean=144, std=204, low=20, high=12_000),
            items=Zipf(exponent=1.05, high=131_262),
        )
        preprocess(PreprocessConfig(dataset="synthetic", out=path, split="user:0", synthetic=synthetic))
    return path


class Users(Dataset[tuple[np.ndarray, np.ndarray]]):
    """The usual map-style dataset: one user's newest items and actions."""

    def __init__(self, path: Path) -> None:
        self.store = open_store(path)

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        end = int(self.store.offsets[row + 1])
        begin = max(int(self.store.offsets[row]), end - NUM_CANDIDATES - MAX_HISTORY_LENGTH)
        return self.store.events["item_id"][begin:end], self.store.events["action"][begin:end]


class JsonUsers(Users):
    """The same from a data frame with a row for each user, whose lists are JSON."""

    def __init__(self, path: Path, rows: int) -> None:
        super().__init__(path)
        spans = list(zip(self.store.offsets[:rows].tolist(), self.store.offsets[1 : rows + 1].tolist(), strict=True))
        self.frame = pd.DataFrame(
            {
                name: [json.dumps(self.store.events[name][a:b].tolist()) for a, b in spans]
                for name in ("item_id", "action")
            }
        )

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        user = self.frame.iloc[row]
        cut = -(NUM_CANDIDATES + MAX_HISTORY_LENGTH)
        return np.array(json.loads(user["item_id"])[cut:]), np.array(json.loads(user["action"])[cut:])


def collate(samples: list[tuple[np.ndarray, np.ndarray]]) -> SequenceBatch:
    """Make a batch of single samples."""
    lengths = np.array([len(items) for items, _ in samples])
    history = [actions[:-NUM_CANDIDATES] for _, actions in samples]
    labels = np.concatenate([actions[-NUM_CANDIDATES:] for _, actions in samples]).astype(np.int64)
    values = np.concatenate([*(items for items, _ in samples), *history]).astype(np.int64)
    of_keys = np.stack([lengths, lengths - NUM_CANDIDATES])
    candidates = np.full((1, len(samples)), NUM_CANDIDATES)
    return SequenceBatch(
        batch_size=len(samples),
        num_real=len(samples),
        features=keyed_jagged_tensor(["item_id", "action"], torch.from_numpy(values), of_keys),
        labels=keyed_jagged_tensor(["label"], torch.from_numpy(labels), candidates),
        num_candidates=torch.from_numpy(candidates[0]),
        sample_ids=torch.zeros(len(samples), dtype=torch.int64),
    )


def gather(store: SequenceStore, samples: int) -> int:
    """Gather the items and actions of each batch with NumPy, and make no batches of them."""
    rows = permute(np.arange(samples), len(store), seed=0, epoch=0)
    for first in range(0, samples, BATCH_SIZE):
        ids = rows[first : first + BATCH_SIZE]
        ends = store.offsets[ids + 1]
        begins = np.maximum(store.offsets[ids], ends - NUM_CANDIDATES - MAX_HISTORY_LENGTH)
        lengths = ends - begins
        places = np.repeat(begins - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        store.events["item_id"].take(places)
        store.events["action"].take(places)
    return samples


def count(batches: Iterable[SequenceBatch]) -> int:
    """Take all batches; return the number of samples."""
    return sum(batch.num_real for batch in batches)


def ways(path: Path, users: int) -> dict[str, Callable[[], int]]:
    """Return what is measured: each call takes an epoch, or a part of it, and returns the number of samples."""
    store = open_store(path)

    def of_pandas() -> int:
        return count(DataLoader(json_users, batch_size=BATCH_SIZE, sampler=sampled, collate_fn=collate))

    def by_processes(num_workers: int) -> Callable[[], int]:
        loader = DataLoader(
            Users(path), batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate, num_workers=num_workers,
            persistent_workers=True,
        )  # fmt: skip
        return lambda: count(loader)

    def ours(num_workers: int) -> Callable[[], int]:
        config = LoaderConfig(
            batch_size=BATCH_SIZE,
            max_history_length=MAX_HISTORY_LENGTH,
            max_num_candidates=NUM_CANDIDATES,
            num_workers=num_workers,
            persistent_workers=True,
        )
        loader = build_loader(path, config, rank=0, world_size=1)
        return lambda: count(loader)

    rows = min(_PANDAS_SAMPLES, users)
    json_users = JsonUsers(path, rows)
    sampled = permute(np.arange(rows), rows, seed=0, epoch=0).tolist()
    return {
        "ours": ours(0),
        "ours, 1 worker": ours(1),
        "ours, 2 workers": ours(2),
        "numpy gather": lambda: gather(store, len(store)),
        "worker processes, 1": by_processes(1),
        "worker processes, 2": by_processes(2),
        "pandas rows": of_pandas,
    }


def measure_rates(path: Path, users: int, runs: int) -> None:
    """Print the samples per second of each way."""
    rates: dict[str, list[float]] = {}
    measured = ways(path, users)
    for run in range(runs + 1):
        for name, way in measured.items():
            begun = time.perf_counter()
            samples = way()
            if run:  # the first is for compiling, starting workers and touching pages
                rates.setdefault(name, []).append(samples / (time.perf_counter() - begun))
    medians = {name: statistics.median(of_way) for name, of_way in rates.items()}
    for name, rate in medians.items():
        row = {"way": name, "samples_per_second": round(rate), "lowest": round(min(rates[name]))}
        row |= {
            "x_pandas": round(rate / medians["pandas rows"], 2),
            "x_numpy": round(rate / medians["numpy gather"], 2),
        }
        row |= {"x_one_worker": round(rate / medians["ours, 1 worker"], 2)} if name.startswith("ours") else {}
        print(json.dumps(row), flush=True)


def measure_opening(path: Path) -> None:
    """Print how long a process takes to open the dataset for the first time, and later."""
    shutil.rmtree(path / ".cache", ignore_errors=True)
    seconds = [float(subprocess.check_output([sys.executable, "-c", _OPEN, str(path)])) for _ in range(4)]
    row = {"way": "opening", "first_seconds": round(seconds[0], 3), "later_seconds": round(max(seconds[1:]), 4)}
    print(json.dumps(row), flush=True)


def _iterate(path: Path, pipe: Connection) -> None:
    config = LoaderConfig(batch_size=BATCH_SIZE, max_history_length=MAX_HISTORY_LENGTH)
    loader = build_loader(path, config, rank=0, world_size=1)  # everything, so that each touches all pages
    count(loader)
    pipe.send(os.getpid())
    pipe.recv()  # stay until all are measured


def measure_memory(path: Path) -> None:
    """Print what the mapped files take in the memory of 8 processes, each by itself and together."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    for _ in range(_RANKS):
        ours, theirs = context.Pipe()
        context.Process(target=_iterate, args=(path, theirs)).start()
        theirs.close()
        pipes.append(ours)
    processes = [pipe.recv() for pipe in pipes]  # all have touched all pages
    mapped = [_mapped_kib(process) for process in processes]
    for pipe in pipes:
        pipe.send(None)
    files = sum(file.stat().st_size for file in (path / ".cache").glob("*/*.npy"))
    row = {
        "way": f"memory of {_RANKS} processes",
        "files_MiB": round(files / 2**20),
        "each_MiB": round(statistics.median(rss for rss, _ in mapped) / 2**10),
        "together_MiB": round(sum(pss for _, pss in mapped) / 2**10),
    }
    print(json.dumps(row), flush=True)


def _mapped_kib(process: int) -> tuple[int, int]:
    """Add up Rss and Pss (shared pages divided by their users) of a process's mappings of `.npy` files."""
    rss = pss = 0
    is_ours = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            is_ours = line.endswith(".npy")
        elif is_ours and name in ("Rss:", "Pss:"):
            rss, pss = (rss + int(values[0]), pss) if name == "Rss:" else (rss, pss + int(values[0]))
    return rss, pss


def main() -> None:
    """Measure it all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=138_493)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("out/bench"))
    arguments = parser.parse_args()
    # Since 2.13 PyTorch warns of what torchrec calls whenever it builds a KeyedJaggedTensor.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    path = make_data(arguments.dir.absolute(), arguments.users)
    measure_opening(path)
    measure_memory(path)
    measure_rates(path, arguments.users, arguments.runs)


if __name__ == "__main__":
    main()
