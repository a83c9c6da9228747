import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import fs

from evenrank.core.errors import ConfigError, DataError, StateError
from evenrank.dataloader import (
    LoaderConfig,
    SequenceBatch,
    StreamConfig,
    StreamLoader,
    build_loader,
    build_stream_loader,
)
from evenrank.dataloader.sampling.steps import StepSampler
from evenrank.dataloader.state.resume_point import SkippedSamples
from evenrank.datasets import SequenceStore, open_store
from evenrank.datasets.lanes import Span
from evenrank.datasets.stream import StreamSource
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.datasets.crafted import write_in_parts
from tests.s3_server import S3

Loader = StreamLoader[SequenceBatch]
SMALL = StreamConfig(lanes=6, window_rows=2)


@pytest.fixture(scope="module")
def parts(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_in_parts(small_dataset, tmp_path_factory.mktemp("parts") / "data")


def _loaders(path: Path | str, world_size: int, stream: StreamConfig = SMALL, **options: Any) -> list[Loader]:
    config = LoaderConfig(**{"batch_size": 8, **options})
    return [build_stream_loader(path, config, stream, rank=rank, world_size=world_size) for rank in range(world_size)]


def _epoch(loader: Loader) -> list[list[int]]:
    return [ids_of(batch) for batch in loader]


@pytest.mark.parametrize("world_size", [1, 3, 9])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_comes_once_per_epoch(parts: Path, world_size: int, num_workers: int) -> None:
    loaders, same = (_loaders(parts, world_size, num_workers=num_workers) for _ in range(2))
    epochs = [[_epoch(loader) for loader in loaders] for _ in range(2)]
    rows = len(open_store(parts))
    for epoch in epochs:
        assert sorted(sample for batches in epoch for batch in batches for sample in batch) == list(range(rows))
        assert {len(batches) for batches in epoch} == {-(-rows // (8 * world_size))} == {len(loaders[0])}
    assert epochs[0] != epochs[1]
    assert [[_epoch(loader) for loader in same] for _ in range(2)] == epochs
    assert [_epoch(loader) for loader in _loaders(parts, world_size, seed=1)] != epochs[0]
    if world_size == 1:  # a batch takes samples from all lanes, wherever these begin
        assert all(len({sample * 6 // rows for sample in batch}) > 3 for batch in epochs[0][0][:3])
    with pytest.raises(ConfigError, match="streams are always shuffled; order must be 'shuffle', got 'rows'"):
        _loaders(parts, 1, order="rows")


def test_batches_contain_the_events_of_their_users(parts: Path) -> None:
    store = open_store(parts)
    (loader,) = _loaders(parts, 1, max_history_length=10, max_num_candidates=2, user_id=True)
    seen = 0
    for step, batch in enumerate(loader):
        items = rows_of(batch.features, "item_id")
        for row, sample in enumerate(ids_of(batch)):
            span = slice(store.offsets[sample], store.offsets[sample + 1])
            assert items[row] == store.columns["item_id"][span][-12:].tolist()
            for name in ("user_id", "segment"):
                assert batch.features[name].values()[row] == store.columns[name][sample]
        assert (batch.step, batch.position, batch.batch_size) == (step, min(8 * step + 8, len(store)), 8)
        seen += batch.num_real
    assert seen == (store.lengths >= 2).sum()
    assert loader.left_out == {"fewer events than 2 candidates": (store.lengths < 2).sum()}


def test_columns_of_every_kind_are_those_of_a_loader(rich_dataset: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"extra_events": ("price",), "label": ("dwell", "price"), "weight": "share"}
    config = LoaderConfig(batch_size=8, max_history_length=10, **options)
    loader = build_loader(rich_dataset, config, rank=0, world_size=1)
    stream = build_stream_loader(write_in_parts(rich_dataset, tmp_path / "parts"), config, SMALL, rank=0, world_size=1)
    for batch in stream:
        same = loader.collate(batch.sample_ids[: batch.num_real].numpy())
        for name in ("features", "float_features", "labels", "float_labels", "weights"):
            streamed, collated = (getattr(each, name) for each in (batch.slice(0, batch.num_real), same))
            assert streamed.keys() == collated.keys()
            assert streamed.lengths().tolist() == collated.lengths().tolist()
            assert streamed.values().tolist() == collated.values().tolist()
    assert same.features.keys() == ["segment", "tags", "item_id", "action"]
    assert same.float_features is not None
    assert same.float_features.keys() == ["share", "price"]


def test_the_state_of_any_rank_resumes_all(parts: Path) -> None:
    whole = [_epoch(loader) for loader in _loaders(parts, 2)]
    for stop in range(1, 9):
        states = []
        for loader in _loaders(parts, 2):
            batches = list(itertools.islice(loader, stop + 2))  # two batches are pulled ahead
            states.append(loader.state_dict(after=batches[stop - 1]))
        assert states[0] == states[1]
        for loader, batches_of_rank in zip(_loaders(parts, 2, num_workers=1), whole, strict=True):
            loader.load_state_dict(states[0])
            assert (len(loader), loader.remaining_batches()) == (len(batches_of_rank), len(batches_of_rank) - stop)
            rest = list(loader)
            assert [ids_of(batch) for batch in rest] == batches_of_rank[stop:]
            assert rest[0].position == 16 * (stop + 1)


@pytest.mark.parametrize("ranks_of_jobs", [(1, 100, 3), (100, 7, 64), (24, 1, 99)])
def test_jobs_on_1_to_100_ranks_read_each_row_once(parts: Path, ranks_of_jobs: tuple[int, ...]) -> None:
    state, seen = None, list[int]()
    for number, world_size in enumerate(ranks_of_jobs):
        loaders = _loaders(parts, world_size, batch_size=1 + 40 // world_size)
        of_ranks = []
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            of_ranks.append([*itertools.islice(loader, None if number == 2 else 1)])
        seen += [sample for batches in of_ranks for batch in batches for sample in ids_of(batch)]
        state = loaders[-1].state_dict()
        assert all(loader.state_dict() == state for loader in loaders)
    assert sorted(seen) == list(range(len(open_store(parts))))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pending_samples_of_a_window_of_steps_come_first(
    parts: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = _loaders(parts, 2)[0]
    next(iter(loader))
    with monkeypatch.context() as patch:  # a Balancer has trained the even ones of positions 0..31
        patch.setattr(StepSampler, "skipped", lambda *_, **__: SkippedSamples(np.arange(1, 32, 2)))
        state = loader.state_dict()
    rows = loader._order.rows(np.arange(len(open_store(parts))), seed=0, epoch=0)
    rest = []
    for world_size, num_steps in ((3, 1), (2, 1), (5, None)):
        loaders = _loaders(parts, world_size, num_workers=num_workers, batch_size=2)
        for each in loaders:
            each.load_state_dict(state)
            rest.append([sample for batch in itertools.islice(each, num_steps) for sample in ids_of(batch)])
        state = loaders[0].state_dict()
    pending = list(itertools.chain(*rest[:5]))
    assert sorted(pending) == sorted(rows[np.arange(1, 2 * len(pending), 2)].tolist())
    assert sorted(itertools.chain(*rest)) == sorted([*rows[1:32:2], *rows[32:]])


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (StreamConfig(lanes=6, window_rows=2), "9 ranks share 6 lanes, and read rows 2.0 times; set lanes to a multi"),
        (StreamConfig(lanes=99, window_rows=3), "9 ranks share 3 lanes, and read rows 3.0 times; lower window_rows"),
    ],
)
def test_ranks_that_read_rows_often_are_warned_of_once(
    parts: Path, stream: StreamConfig, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    _loaders(parts, 3, stream)
    assert not caplog.messages
    _loaders(parts, 9, stream)
    (warned,) = caplog.messages
    assert warned.startswith(message)


@pytest.fixture
def read_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows that were read."""
    numbers: list[int] = []
    read = StreamSource.read_spans

    def read_and_count(self: StreamSource, spans: list[Span], *arguments: Any) -> SequenceStore:
        store = read(self, spans, *arguments)
        numbers.append(len(store))
        return store

    monkeypatch.setattr(StreamSource, "read_spans", read_and_count)
    return numbers


@pytest.mark.parametrize("world_size", [1, 7, 8, 23, 24])
def test_up_to_24_ranks_read_few_rows_more_than_once(
    small_dataset: Path, tmp_path: Path, world_size: int, read_rows: list[int]
) -> None:
    data = write_in_parts(small_dataset, tmp_path / "large", num_rows=4096, rows_per_file=1024, rows_per_group=256)
    loaders = _loaders(data, world_size, StreamConfig(window_rows=2))
    seen = [sample for loader in loaders for batch in loader for sample in ids_of(batch)]
    assert sorted(seen) == list(range(4096))
    assert sum(read_rows) <= (1 if world_size in (1, 8) else 1.25) * 4096


@pytest.mark.parametrize("num_workers", [0, 3])
def test_only_two_windows_are_in_memory(parts: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: set[int] = set()
    most_alive = 0
    numbers = itertools.count()
    read = StreamSource.read_spans

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


def test_states_that_cannot_be_loaded_are_refused_with_the_reason(parts: Path) -> None:
    (loader,) = _loaders(parts, 1)
    state = loader.state_dict(after=next(iter(loader)))
    for changed in (
        {"max_num_candidates": 1},
        {"stream": StreamConfig(lanes=6, window_rows=1)},
        {"stream": StreamConfig(lanes=5, window_rows=2)},
    ):
        with pytest.raises(StateError, match="is of other data, codes or filters"):
            _loaders(parts, 1, **changed)[0].load_state_dict(state)


@pytest.fixture(scope="module")
def bucket(parts: Path, s3: S3) -> str:
    """URL of the dataset in an object store, as a folder that was copied there."""
    s3.put(parts, "data")
    return s3.url("data")


def test_an_object_store_gives_the_same_batches_as_a_folder(parts: Path, bucket: str) -> None:
    remote, local = (_loaders(path, 2, num_workers=2) for path in (bucket, parts))
    for remote_batches, local_batches in zip(remote, local, strict=True):
        for batch, expected in zip(remote_batches, local_batches, strict=True):
            assert batch.sample_ids.tolist() == expected.sample_ids.tolist()
            assert batch.features.values().tolist() == expected.features.values().tolist()
    with pytest.raises(DataError, match="histories/nothing is not a dataset: it contains no manifest") as raised:
        _loaders(bucket.replace("histories/data", "histories/nothing"), 1)
    assert "\n" not in str(raised.value)


def test_objects_that_are_overwritten_are_found_unless_they_are_equal(parts: Path, bucket: str) -> None:
    remote, root = fs.FileSystem.from_uri(bucket)
    copy = bucket.replace("/data?", "/copy?")
    copied = root.replace("/data", "/copy")
    fs.copy_files(root, copied, source_filesystem=remote, destination_filesystem=remote)
    (loader,) = _loaders(copy, 1, num_workers=2)  # errors while reading ahead reach the consumer
    first = _epoch(loader)
    content = (parts / "train" / "part-00000.parquet").read_bytes()
    for written in (content, content + b"more"):
        with remote.open_output_stream(f"{copied}/train/part-00000.parquet") as file:
            file.write(written)
        if written == content:
            assert sorted(itertools.chain(*_epoch(loader))) == sorted(itertools.chain(*first))
        else:
            with pytest.raises(DataError, match=r"copy/train/part-00000\.parquet was changed, replaced or deleted"):
                list(loader)


@pytest.mark.parametrize("world_size", [1, 3])
def test_stream_that_drops_the_last_batch_goes_on_with_the_next_epoch(parts: Path, world_size: int) -> None:
    loaders = _loaders(parts, world_size, drop_last=True)
    epochs = [[_epoch(loader) for loader in loaders] for _ in range(2)]
    assert sum(len(batch) for batches in epochs[0] for batch in batches) < len(open_store(parts))
    stopped = _loaders(parts, world_size, drop_last=True)
    last = [list(loader)[-1] for loader in stopped]
    states = [loader.state_dict(after=batch) for loader, batch in zip(stopped, last, strict=True)]
    resumed = _loaders(parts, world_size, drop_last=True)
    for loader in resumed:
        loader.load_state_dict(states[0])
    assert [_epoch(loader) for loader in resumed] == epochs[1]
