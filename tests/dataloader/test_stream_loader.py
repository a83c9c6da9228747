import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

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
    merge_stream_states,
)
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.stream_loader import FORMAT
from evenrank.datasets import SequenceStore, open_store
from evenrank.datasets.stream import StreamSource
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.dataloader.resuming import with_changes
from tests.datasets.crafted import write_in_parts
from tests.ranks import RankPool
from tests.s3_server import S3

Loader = StreamLoader[SequenceBatch]
SMALL = StreamConfig(num_shards=6, buffer_rows=8, open_shards=2)
UNEVEN = StreamConfig(num_shards=4, buffer_rows=16)


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
        if world_size == 9:  # more ranks than shards
            assert [len(batches) > 0 for batches in epoch] == [True] * 6 + [False] * 3
    assert epochs[0] != epochs[1]
    assert [[_epoch(loader) for loader in same] for _ in range(2)] == epochs
    assert [_epoch(loader) for loader in _loaders(parts, world_size, seed=1)] != epochs[0]
    if world_size == 1:  # a batch takes samples from both open shards
        assert all(len({sample * 6 // rows for sample in batch}) >= 2 for batch in epochs[0][0][:3])
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
        assert (batch.step, batch.position, batch.batch_size) == (step, step + 1, 8)
        seen += batch.num_real
    assert seen == (store.lengths >= 2).sum()
    assert loader.left_out == {"fewer events than 2 candidates": (store.lengths < 2).sum()}


def test_columns_of_every_kind_are_those_of_a_loader(rich_dataset: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"extra_events": ("price",), "label": "dwell", "target": "price", "weight": "share"}
    config = LoaderConfig(batch_size=8, max_history_length=10, **options)
    loader = build_loader(rich_dataset, config, rank=0, world_size=1)
    stream = build_stream_loader(write_in_parts(rich_dataset, tmp_path / "parts"), config, SMALL, rank=0, world_size=1)
    for batch in stream:
        same = loader.collate(batch.sample_ids[: batch.num_real].numpy())
        for name in ("features", "float_features", "labels", "targets", "weights"):
            streamed, collated = (getattr(each, name) for each in (batch.slice(0, batch.num_real), same))
            assert streamed.keys() == collated.keys()
            assert streamed.lengths().tolist() == collated.lengths().tolist()
            assert streamed.values().tolist() == collated.values().tolist()
    assert same.features.keys() == ["segment", "tags", "item_id", "action"]
    assert same.float_features is not None
    assert same.float_features.keys() == ["share", "price"]


def test_resuming_in_the_same_shape_yields_the_same_batches(parts: Path) -> None:
    whole = [_epoch(loader) for loader in _loaders(parts, 2)]
    for stop in range(1, 9):
        states = []
        for loader in _loaders(parts, 2):
            batches = list(itertools.islice(loader, stop + 2))  # two batches are pulled ahead
            states.append(loader.state_dict(after=batches[stop - 1]))
        # Each of as many ranks may load the state that it saved.
        for of_rank in ([merge_stream_states(states)] * 2, states):
            for loader, state, batches_of_rank in zip(_loaders(parts, 2, num_workers=1), of_rank, whole, strict=True):
                loader.load_state_dict(state)
                rest = list(loader)
                assert [ids_of(batch) for batch in rest] == batches_of_rank[stop:]
                assert rest[0].position == stop + 1


def test_ranks_that_have_loaded_their_own_states_save_what_can_be_merged(parts: Path) -> None:
    stopped, resumed = _loaders(parts, 2), _loaders(parts, 2)
    batches = [next(iter(loader)) for loader in stopped]
    states = [loader.state_dict() for loader in stopped]
    for loader, state in zip(resumed, states, strict=True):
        loader.load_state_dict(state)
    assert [loader.state_dict() for loader in resumed] == states
    (alone,) = _loaders(parts, 1)
    alone.load_state_dict(merge_stream_states([loader.state_dict() for loader in resumed]))
    rest = itertools.takewhile(lambda batch: batch.epoch == 0, alone)
    assert sorted(i for batch in [*batches, *rest] for i in ids_of(batch)) == list(range(len(open_store(parts))))


@pytest.mark.parametrize("num_workers", [0, 3])
def test_only_open_windows_are_in_memory(parts: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: set[int] = set()
    most_alive = 0
    numbers = itertools.count()
    read = StreamSource.read

    def read_and_track(self: StreamSource, first: int, end: int) -> SequenceStore:
        store = read(self, first, end)
        assert len(store) <= 8
        number = next(numbers)
        alive.add(number)
        weakref.finalize(store.offsets, alive.discard, number)
        return store

    monkeypatch.setattr(StreamSource, "read", read_and_track)
    (loader,) = _loaders(parts, 1, num_workers=num_workers)
    gc.freeze()  # collections then look at what the loader allocates, not at every object of every module
    try:
        for _ in loader:
            gc.collect()
            most_alive = max(most_alive, len(alive))
    finally:
        gc.unfreeze()
    # A window for each of 2 open shards, twice with reading ahead, and the windows of the batch just yielded.
    assert 1 <= most_alive <= 2 * (2 if num_workers else 1) + 2


def _balanced(rank: int, world_size: int, path: Path) -> list[list[int]]:
    loader = _loaders(path, world_size, UNEVEN)[rank]
    with Balancer(loader, BalanceConfig(cost=COST)) as balancer:
        return [ids_of(batch) for batch in balancer]


def test_a_balancer_accepts_ranks_that_end_at_different_steps(parts: Path, ranks: RankPool) -> None:
    num_steps = [len(_epoch(loader)) for loader in _loaders(parts, 3, UNEVEN)]
    assert len(set(num_steps)) > 1
    balanced = ranks.run(3, _balanced, parts)
    assert [len(batches) for batches in balanced] == [max(num_steps)] * 3
    ids = [sample for batches in balanced for batch in batches for sample in batch]
    assert sorted(ids) == list(range(len(open_store(parts))))


def test_states_that_cannot_be_loaded_are_refused_with_the_reason(parts: Path) -> None:
    loaders = _loaders(parts, 2)
    states = [loader.state_dict(after=next(iter(loader))) for loader in loaders]
    with pytest.raises(StateError, match=r"lacks 3 of 6 shards, .*merge the states of all ranks"):
        loaders[1].load_state_dict(states[0])
    with pytest.raises(StateError, match="lacks 3 of 6 shards"):
        merge_stream_states(states[:1])
    with pytest.raises(StateError, match="cannot be merged: position is 1 and 2"):
        merge_stream_states([states[0], with_changes(FORMAT, states[1], position=2)])
    merged = merge_stream_states(states)
    for changed in (
        {"max_num_candidates": 1},
        {"stream": StreamConfig(num_shards=6, buffer_rows=9)},
        {"stream": StreamConfig(num_shards=5, buffer_rows=8)},
    ):
        with pytest.raises(StateError, match="is of other data, codes, filters or shards"):
            _loaders(parts, 1, **changed)[0].load_state_dict(merged)
    batch = next(iter(loaders[0]))
    batch.epoch = 7
    with pytest.raises(StateError, match="position 1 of epoch 7 is no longer known; call state_dict within 256 steps"):
        loaders[0].state_dict(after=batch)


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
    step = max(batch.position for batch in last)
    states = [loader.state_dict(after=max(last, key=lambda batch: batch.position)) for loader in stopped]
    assert {state["position"] for state in states} == {step}
    resumed = _loaders(parts, world_size, drop_last=True)
    for loader in resumed:
        loader.load_state_dict(merge_stream_states(states))
    assert [_epoch(loader) for loader in resumed] == epochs[1]
