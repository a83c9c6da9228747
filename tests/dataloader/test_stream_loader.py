"""What streams read, from folders and object stores, and what they hold in memory; for their batches, see the laws."""

import gc
import itertools
import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from evenrank.core.errors import DataError, StateError
from evenrank.dataloader import LoaderConfig, StreamConfig, build_loader, build_stream_loader, random_codes
from evenrank.dataloader.sampling.steps import StepSampler
from evenrank.dataloader.state.resume_point import SkippedSamples
from evenrank.datasets import SequenceStore, open_store
from evenrank.datasets.lanes import Span
from evenrank.datasets.stream import StreamSource
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.batch_helpers import ids_of
from tests.datasets.crafted import write_in_parts
from tests.ranks import RankPool
from tests.s3_server import S3, Read

SMALL = StreamConfig(lanes=6, window_rows=2)


@pytest.fixture(scope="module")
def parts(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_in_parts(small_dataset, tmp_path_factory.mktemp("parts") / "data")


def _loaders(path: Path | str, world_size: int, stream: StreamConfig = SMALL, **options: Any) -> list[Any]:
    config = LoaderConfig(**{"batch_size": 8, **options})
    return [build_stream_loader(path, config, stream, rank=rank, world_size=world_size) for rank in range(world_size)]


def _ids(batches: Any) -> list[int]:
    return [sample for batch in batches for sample in ids_of(batch)]


def test_batches_of_semantic_ids_are_those_of_a_loader_and_mix_all_lanes(small_dataset: Path, parts: Path) -> None:
    codes = random_codes(501, levels=2, codebook_size=8)
    more: Any = {"codes": codes, "draw_alternatives": True, "history_labels": True}
    config = LoaderConfig(batch_size=8, max_history_length=10, user_id=True, **more)
    loader, rows = build_loader(small_dataset, config, rank=0, world_size=1), len(open_store(parts))
    for rank in range(2):
        stream: Any = build_stream_loader(parts, config, SMALL, rank=rank, world_size=2)
        for step, batch in enumerate(stream):
            sample_ids = batch.sample_ids[: batch.num_real].numpy()
            assert step > 2 or len({*(sample_ids * 6 // rows).tolist()}) > 1  # wherever the lanes begin
            of_loader: Any = loader.collate(sample_ids)
            assert bits_of(batch.slice(0, batch.num_real).replace(step=0, position=0)) == bits_of(of_loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pending_samples_of_a_window_of_steps_come_first(parts: Path, num_workers: int) -> None:
    loader = _loaders(parts, 2)[0]
    next(iter(loader))
    with pytest.MonkeyPatch.context() as patch:  # a Balancer has trained the even ones of positions 0..31
        patch.setattr(StepSampler, "skipped", lambda *_, **__: SkippedSamples(np.arange(1, 32, 2)))
        state = loader.state_dict()
    rows = loader._order.rows(np.arange(len(open_store(parts))), seed=0, epoch=0)
    rest = []
    for world_size, num_steps in ((3, 1), (2, 1), (5, None)):
        loaders = _loaders(parts, world_size, num_workers=num_workers, batch_size=2)
        for each in loaders:
            each.load_state_dict(state)
            rest.append(_ids(itertools.islice(each, num_steps)))
        state = loaders[0].state_dict()
    pending = list(itertools.chain(*rest[:5]))
    assert sorted(pending) == sorted(rows[np.arange(1, 2 * len(pending), 2)].tolist())
    assert sorted(itertools.chain(*rest)) == sorted([*rows[1:32:2], *rows[32:]])


def test_ranks_that_read_rows_often_are_warned_of_once(parts: Path, caplog: pytest.LogCaptureFixture) -> None:
    for lanes, window_rows, message in (
        (6, 2, "9 ranks share 6 lanes, and read rows 2.0 times; set lanes to a multi"),
        (99, 3, "9 ranks share 3 lanes, and read rows 3.0 times; lower window_rows"),
    ):
        stream = StreamConfig(lanes=lanes, window_rows=window_rows)
        _loaders(parts, 3, stream)
        assert not caplog.messages
        _loaders(parts, 9, stream)
        (warned,) = caplog.messages
        assert warned.startswith(message)
        caplog.clear()
    state = _loaders(parts, 1)[0].state_dict()
    for other in (StreamConfig(lanes=6, window_rows=1), StreamConfig(lanes=5, window_rows=2)):
        with pytest.raises(StateError, match="is of other data, codes or filters"):
            _loaders(parts, 1, other)[0].load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 3])
def test_only_two_windows_are_in_memory(parts: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most_alive, numbers, read = set[int](), 0, itertools.count(), StreamSource.read_spans

    def read_and_track(self: StreamSource, spans: list[Span], *arguments: Any) -> SequenceStore:
        store = read(self, spans, *arguments)
        assert len(store) <= 6 * 2
        number = next(numbers)
        alive.add(number)
        weakref.finalize(store.offsets, alive.discard, number)
        return store

    monkeypatch.setattr(StreamSource, "read_spans", read_and_track)
    (loader,) = _loaders(parts, 1, num_workers=num_workers)
    gc.freeze()  # collections then look at what the loader allocates, not at every object of every module
    try:
        for _ in loader:
            gc.collect()
            most_alive = max(most_alive, len(alive))
    finally:
        gc.unfreeze()
    # A window and, in as many parts as there are workers, the next one; that of the batch just yielded; no rows.
    assert 1 <= most_alive <= 3 * max(1, num_workers) + 1


def test_objects_that_are_overwritten_are_found_unless_they_are_equal(parts: Path, s3: S3) -> None:
    s3.put(parts, "copy")
    url = s3.url("copy")
    remote, copied = fs.FileSystem.from_uri(url)
    (loader,), local = _loaders(url, 1, num_workers=2), _loaders(parts, 1)[0]  # errors of threads reach the consumer
    assert [bits_of(batch) for batch in loader] == [bits_of(batch) for batch in local]
    content = (parts / "train" / "part-00000.parquet").read_bytes()
    for written in (content, content + b"more"):
        with remote.open_output_stream(f"{copied}/train/part-00000.parquet") as file:
            file.write(written)
        if written == content:
            assert _ids(loader) == _ids(local)
        else:
            with pytest.raises(DataError, match=r"copy/train/part-00000\.parquet was changed, replaced or deleted"):
                list(loader)


ROWS, ROWS_PER_FILE, ROWS_PER_GROUP = 4096, 256, 16
HOSTS, RANKS_PER_HOST = 4, 8
CONFIG = LoaderConfig(batch_size=16)


def _fetch(process: int, num_processes: int, s3: S3, home: Path) -> tuple[dict[str, list[int]], list[int]]:
    """Stream an epoch on the ranks of some hosts, and open the store; return samples by user, who is `HOST_RANK`."""
    samples = {}
    for host in range(process, HOSTS, num_processes):
        for rank in range(host * RANKS_PER_HOST, (host + 1) * RANKS_PER_HOST):
            url, world_size = s3.url("large", user=(user := f"{host}_{rank}")), HOSTS * RANKS_PER_HOST
            # A lane per rank, of 128 rows, which are 8 row groups and parts of two.
            stream = StreamConfig(lanes=world_size, window_rows=8)
            samples[user] = _ids(build_stream_loader(url, CONFIG, stream, rank=rank, world_size=world_size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        store = open_store(s3.url("store"))
    return samples, _ids(build_loader(store, CONFIG, rank=process, world_size=num_processes))


def test_hosts_fetch_the_row_groups_of_their_ranks_or_each_file_of_a_store_once(
    small_dataset: Path, tmp_path: Path, s3: S3, ranks: RankPool
) -> None:
    """According to the server."""
    sizes = {"num_rows": ROWS, "rows_per_file": ROWS_PER_FILE, "rows_per_group": ROWS_PER_GROUP}
    data = write_in_parts(small_dataset, tmp_path / "data", **sizes)
    for name in ("large", "store"):
        s3.put(data, name)
    (first, own), (second, others) = ranks.run(2, _fetch, s3, tmp_path)
    samples: dict[str, list[int]] = first | second
    assert sorted(itertools.chain(*samples.values())) == sorted([*own, *others]) == list(range(ROWS))
    file_sizes = {path.name: path.stat().st_size for path in sorted((data / "train").iterdir())}
    of_store = (Read("key", f"store/train/{name}", 0, size) for name, size in file_sizes.items())
    assert sorted(s3.reads("store/train")) == sorted(of_store)
    footers = [pq.read_metadata(data / "train" / name) for name in file_sizes]
    groups = [footer.row_group(index) for footer in footers for index in range(footer.num_row_groups)]
    group_sizes = [sum(group.column(i).total_compressed_size for i in range(group.num_columns)) for group in groups]
    reads: dict[bool, dict[str, list[Read]]] = {True: defaultdict(list), False: defaultdict(list)}
    for read in s3.reads("large/train"):
        reads[read.end == file_sizes[Path(read.key).name]][read.user].append(read)  # of footers, and of row groups
    for user, of_rank in samples.items():
        of_groups = {sample // ROWS_PER_GROUP for sample in of_rank}
        # A request per row group, one for a file's footer.
        assert len(reads[False][user]) == len(of_groups)
        assert len(reads[True][user]) == len({sample // ROWS_PER_FILE for sample in of_rank})
        assert sum(read.end - read.first for read in reads[False][user]) == sum(group_sizes[g] for g in of_groups)
        assert all(read.end - read.first <= 1 << 16 for read in reads[True][user])
    for host in range(HOSTS):
        of_ranks = [reads[False][f"{host}_{host * RANKS_PER_HOST + rank}"] for rank in range(RANKS_PER_HOST)]
        # Of 8 row groups, one is read by two ranks.
        assert sum(r.end - r.first for r in itertools.chain(*of_ranks)) < 1.2 * sum(group_sizes) / HOSTS
