"""Streams: every sample once an epoch, whatever the ranks, shards and places they are read from."""

import gc
import itertools
import os
import socket
import subprocess
import sys
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import fs

from evenrank.core.errors import ConfigError, DataError, StateError
from evenrank.dataloader import (
    LoaderConfig,
    SequenceBatch,
    StreamConfig,
    StreamLoader,
    build_stream_loader,
    merge_stream_states,
)
from evenrank.dataloader.balance import Balancer, HSTUCost
from evenrank.datasets import SequenceStore, open_store
from evenrank.datasets.stream import StreamSource
from tests.datasets.in_parts import write_in_parts
from tests.ranks import RankPool

SMALL = StreamConfig(num_shards=6, buffer_rows=8, open_shards=2)


@pytest.fixture(scope="module")
def parts(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_in_parts(small_dataset, tmp_path_factory.mktemp("parts") / "data")


def _loaders(
    path: Path | str, world_size: int, stream: StreamConfig = SMALL, **options: Any
) -> list[StreamLoader[SequenceBatch]]:
    config = LoaderConfig(**{"batch_size": 8, **options})
    return [build_stream_loader(path, config, stream, rank=rank, world_size=world_size) for rank in range(world_size)]


def _ids(batch: SequenceBatch) -> list[int]:
    ids: list[int] = batch.sample_ids[: batch.num_real].tolist()
    return ids


def _epoch(loader: StreamLoader[SequenceBatch]) -> list[list[int]]:
    return [_ids(batch) for batch in loader]


@pytest.mark.parametrize("world_size", [1, 2, 5, 9])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_comes_once_an_epoch(parts: Path, world_size: int, num_workers: int) -> None:
    loaders = _loaders(parts, world_size, num_workers=num_workers)
    ids = [sample for loader in loaders for batch in _epoch(loader) for sample in batch]
    assert sorted(ids) == list(range(len(open_store(parts))))
    if world_size == 9:  # more ranks than shards
        assert [len(_epoch(loader)) > 0 for loader in loaders] == [True] * 6 + [False] * 3


def test_batches_hold_the_users_own_events(parts: Path) -> None:
    store = open_store(parts)
    (loader,) = _loaders(parts, 1, max_history_length=10, max_num_candidates=2)
    seen = 0
    for step, batch in enumerate(loader):
        items = torch.split(batch.features["item_id"].values(), batch.features["item_id"].lengths().tolist())
        for row, sample in enumerate(_ids(batch)):
            span = slice(store.offsets[sample], store.offsets[sample + 1])
            assert items[row].tolist() == store.events["item_id"][span][-12:].tolist()
            assert batch.features["segment"].values()[row] == store.rows["segment"][sample]
        assert (batch.step, batch.position, batch.batch_size) == (step, step + 1, 8)
        seen += batch.num_real
    assert seen == (store.lengths >= 2).sum()
    assert loader.left_out == {"fewer events than 2 candidates": (store.lengths < 2).sum()}


def test_samples_are_shuffled_anew_each_epoch_and_alike_for_a_seed(parts: Path) -> None:
    (one,), (same,), (other) = _loaders(parts, 1), _loaders(parts, 1), _loaders(parts, 1, seed=1)[0]
    first, second = _epoch(one), _epoch(one)
    assert first != second
    assert [_epoch(same), _epoch(same)] == [first, second]
    assert _epoch(other) != first
    # A batch has samples of both open shards.
    rows = len(open_store(parts))
    assert all(len({sample * 6 // rows for sample in batch}) >= 2 for batch in first[:3])


def test_a_loop_that_goes_on_in_the_same_shape_yields_the_same_batches(parts: Path) -> None:
    whole = [_epoch(loader) for loader in _loaders(parts, 2)]
    for stop in range(1, 9):
        loaders = _loaders(parts, 2)
        states = []
        for loader in loaders:
            batches = list(itertools.islice(loader, stop + 2))  # pulled ahead
            states.append(loader.state_dict(after=batches[stop - 1]))
        others = _loaders(parts, 2, num_workers=1)
        for loader in others:
            loader.load_state_dict(merge_stream_states(states))
        rest = [list(loader) for loader in others]
        assert [[_ids(batch) for batch in of_rank] for of_rank in rest] == [of_rank[stop:] for of_rank in whole]
        assert rest[0][0].position == stop + 1


@pytest.mark.parametrize("num_workers", [0, 3])
def test_only_windows_of_open_shards_are_in_memory(
    parts: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: set[int] = set()
    most = 0
    numbers = itertools.count()
    read = StreamSource.read

    def counted(self: StreamSource, first: int, end: int) -> SequenceStore:
        store = read(self, first, end)
        assert len(store) <= 8
        number = next(numbers)
        held.add(number)
        weakref.finalize(store.offsets, held.discard, number)
        return store

    monkeypatch.setattr(StreamSource, "read", counted)
    (loader,) = _loaders(parts, 1, num_workers=num_workers)
    for _ in loader:
        gc.collect()
        most = max(most, len(held))
    assert 1 <= most <= 2 * (2 if num_workers else 1) + 2  # open shards, twice with reading ahead; those just used


def _balanced(rank: int, world_size: int, path: Path) -> list[list[int]]:
    (loader,) = _loaders(path, world_size, StreamConfig(num_shards=4, buffer_rows=16))[rank : rank + 1]
    with Balancer(loader, cost=HSTUCost(hidden=8, heads=1, head_dim=8, layers=1)) as balancer:
        return [_ids(batch) for batch in balancer]


def test_ranks_that_end_at_different_steps_go_through_a_balancer(parts: Path, ranks: RankPool) -> None:
    alone = [len(_epoch(one)) for one in _loaders(parts, 3, StreamConfig(num_shards=4, buffer_rows=16))]
    assert len(set(alone)) > 1
    seen = ranks.run(3, _balanced, parts)
    assert [len(of_rank) for of_rank in seen] == [max(alone)] * 3
    ids = [sample for of_rank in seen for batch in of_rank for sample in batch]
    assert sorted(ids) == list(range(len(open_store(parts))))


def test_states_that_cannot_be_loaded_say_why(parts: Path) -> None:
    loaders = _loaders(parts, 2)
    states = [loader.state_dict(after=next(iter(loader))) for loader in loaders]
    with pytest.raises(StateError, match=r"lacks 3 of 6 shards, .*merge the states of all ranks"):
        loaders[0].load_state_dict(states[0])
    with pytest.raises(StateError, match="lacks 3 of 6 shards"):
        merge_stream_states(states[:1])
    with pytest.raises(StateError, match="cannot be merged: position is 1 and 2"):
        merge_stream_states([states[0], {**states[1], "position": 2}])
    merged = merge_stream_states(states)
    for changed in (
        {"max_num_candidates": 1},
        {"stream": StreamConfig(num_shards=6, buffer_rows=9)},
        {"stream": StreamConfig(num_shards=5, buffer_rows=8)},
    ):
        with pytest.raises(StateError, match="belongs to other data, filters or shards"):
            _loaders(parts, 1, **changed)[0].load_state_dict(merged)
    batch = next(iter(loaders[0]))
    batch.epoch = 7
    with pytest.raises(StateError, match="no longer known"):
        loaders[0].state_dict(after=batch)


def test_other_orders_and_ranks_are_refused(parts: Path) -> None:
    with pytest.raises(ConfigError, match="streams are always shuffled; order must be 'shuffle', got 'time'"):
        _loaders(parts, 1, order="time")
    with pytest.raises(ConfigError, match="got rank 1 of 1"):
        build_stream_loader(parts, LoaderConfig(batch_size=2), rank=1, world_size=1)


def test_an_error_while_reading_ahead_reaches_the_caller(small_dataset: Path, tmp_path: Path) -> None:
    data = write_in_parts(small_dataset, tmp_path / "data")
    (loader,) = _loaders(data, 1, num_workers=2)
    path = data / "train" / "part-00001.parquet"
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(DataError, match=r"part-00001.parquet cannot be read as Parquet"):
        list(loader)


@pytest.fixture(scope="module")
def bucket(parts: Path) -> Iterator[str]:
    """The dataset in a bucket of a server that speaks the protocol of S3."""
    pytest.importorskip("moto", reason="needs moto, of the dev dependencies")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    try:
        _wait_for(f"http://127.0.0.1:{port}/", server)
        options = f"scheme=http&endpoint_override=127.0.0.1:{port}&region=us-east-1&allow_bucket_creation=true"
        url = f"s3://key:secret@histories/data?{options}"
        remote, root = fs.FileSystem.from_uri(url)
        remote.create_dir("histories")
        fs.copy_files(str(parts), root, source_filesystem=fs.LocalFileSystem(), destination_filesystem=remote)
        yield url
    finally:
        server.kill()
        server.wait()


def _wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(100_000):
        assert server.poll() is None, "the server has ended"
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            continue
        return
    raise AssertionError("the server does not answer")


def test_an_object_store_gives_the_same_batches_as_a_folder(parts: Path, bucket: str) -> None:
    remote, local = (_loaders(path, 2, num_workers=2) for path in (bucket, parts))
    for one, other in zip(remote, local, strict=True):
        for batch, expected in zip(one, other, strict=True):
            assert batch.sample_ids.tolist() == expected.sample_ids.tolist()
            assert batch.features.values().tolist() == expected.features.values().tolist()
    with pytest.raises(DataError, match="is not a dataset that can be read") as raised:
        _loaders(bucket.replace("histories/data", "histories/nothing"), 1)
    assert "\n" not in str(raised.value)
