"""Compare `build_stream_loader` with `build_loader` and with a plain loop over Parquet files with a shuffle buffer.

    .venv/bin/python scripts/bench/streams.py [--users 138493] [--runs 5] [--dir DIR]

Reads the dataset of loader.py, in batches of 128 with histories of at most 512 events and 10 candidates. Each loader
has a process of its own, and they take turns, an epoch each. Prints one JSON line per loader:

    stored           build_loader, from columns that were unpacked before
    stream           build_stream_loader, and the same with 2 worker threads
    plain            a loop with pyarrow: files in random order, record batches of 512 rows, of which the newest items
                     and actions of each row are put into a buffer of 8,192 rows; a batch takes random ones

    samples_per_cpu_second, samples_per_second     of all threads; medians over runs
    peak_MiB               most memory of the process beyond that before it opens the data, with mapped pages
    x_stored, x_plain      samples per CPU second relative to these loaders: medians of the ratios of each run
    x_peak_plain           peak_MiB relative to the plain loop
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import random
import re
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader, build_stream_loader
from loader import BATCH_SIZE, MAX_HISTORY_LENGTH, NUM_CANDIDATES, Sample, collate, count_samples, make_data

_BUFFER_ROWS, _RECORD_BATCH_ROWS = 8192, 512


class _Epoch(NamedTuple):
    cpu_rate: float
    rate: float
    peak_mib: int


class _PlainLoop:
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
                for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
                    newest = slice(max(begin, end - MAX_HISTORY_LENGTH - NUM_CANDIDATES), end)
                    yield items[newest].copy(), actions[newest].copy()  # not all rows of the record batch


def _peak_mib() -> int:
    return int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) >> 10


def _run_epochs(name: str, path: Path, pipe: Connection) -> None:
    before, num_workers = _peak_mib(), 2 if name.endswith("workers") else 0
    config = LoaderConfig(batch_size=BATCH_SIZE, max_history_length=MAX_HISTORY_LENGTH, num_workers=num_workers)
    config = dataclasses.replace(config, max_num_candidates=NUM_CANDIDATES)
    build = build_loader if name == "stored" else build_stream_loader
    loader = _PlainLoop(path) if name == "plain" else build(path, config, rank=0, world_size=1)
    while pipe.recv():
        cpu, start = time.process_time(), time.perf_counter()
        samples = count_samples(loader)
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - start
        pipe.send(_Epoch(samples / cpu, samples / seconds, _peak_mib() - before))


def measure(path: Path, runs: int) -> dict[str, list[_Epoch]]:
    """Return the epochs of each loader, without the first one, in which it compiles and touches pages."""
    context, pipes = multiprocessing.get_context("spawn"), dict[str, Connection]()
    for name in ("stored", "stream", "stream, 2 workers", "plain"):
        pipes[name], child_end = context.Pipe()
        context.Process(target=_run_epochs, args=(name, path, child_end)).start()
    epochs: dict[str, list[_Epoch]] = {name: [] for name in pipes}
    for goes_on in [True] * (runs + 1) + [False]:
        for name, pipe in pipes.items():
            pipe.send(goes_on)
            epochs[name] += [pipe.recv()] if goes_on else []
    return {name: of_name[1:] for name, of_name in epochs.items()}


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=138_493)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("out/bench"))
    arguments = parser.parse_args()
    epochs = measure(make_data(arguments.dir.absolute(), arguments.users), arguments.runs)

    for name, of_name in epochs.items():
        row: dict[str, str | float] = {
            "loader": name,
            "samples_per_cpu_second": round(statistics.median(epoch.cpu_rate for epoch in of_name)),
            "samples_per_second": round(statistics.median(epoch.rate for epoch in of_name)),
            "peak_MiB": of_name[-1].peak_mib,
            "x_peak_plain": round(of_name[-1].peak_mib / epochs["plain"][-1].peak_mib, 2),
        }
        for other in ("stored", "plain"):
            pairs = zip(of_name, epochs[other], strict=True)
            row[f"x_{other}"] = round(
                statistics.median(epoch.cpu_rate / of_other.cpu_rate for epoch, of_other in pairs), 2
            )
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
