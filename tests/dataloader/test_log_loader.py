import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError, RankError, StateError
from evenrank.dataloader import LoaderConfig, LogLoader, SequenceBatch, StreamConfig, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets import FolderLog, LogEnd, open_store
from evenrank.datasets.continuous_log import rows_of_table
from evenrank.training import LossAverage
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.dataloader.resuming import through_json
from tests.datasets.crafted import add_targets, change_table, copy_dataset
from tests.datasets.logs import MANIFEST, add_file, end_log, items_of, table_of
from tests.pages import ROOT
from tests.ranks import RankPool
from tests.s3_server import S3

Loader = LogLoader[SequenceBatch]
POLL = StreamConfig(poll_seconds=0.001)
# Adds files of 7 records to a log, one after the other as a loader reads, and ends it.
WRITER = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
from tests.datasets.logs import add_file, end_log
folder, num_files = Path(sys.argv[2]), int(sys.argv[3])
for number in range(num_files):
    add_file(folder, f"{number:05}.parquet", range(number * 7, number * 7 + 7))
end_log(folder)
"""


class _GrowingLog(FolderLog):
    """A log to which a file is added each time somebody looks for new records."""

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        super().__init__(folder, MANIFEST)
        self._folder = folder
        self._ends = np.cumsum([0, *sizes]).tolist()

    def end(self) -> LogEnd:
        number = len(list(self._folder.glob("*.parquet")))
        if number + 1 < len(self._ends):
            add_file(self._folder, f"{number:05}.parquet", range(*self._ends[number : number + 2]))
        else:
            end_log(self._folder)
        return super().end()


def _loaders(source: Any, world_size: int, batch_size: int = 3, **options: Any) -> list[Loader]:
    config = LoaderConfig(batch_size=batch_size, order="rows", **options)
    log = FolderLog(source, MANIFEST) if isinstance(source, Path | str) else source
    return [
        build_stream_loader(log, config, POLL, rank=rank, world_size=world_size, follow=True)
        for rank in range(world_size)
    ]


def _write(folder: Path, sizes: Sequence[int]) -> Path:
    first = 0
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        add_file(folder, f"{number:05}.parquet", range(first, first + size))
        first += size
    end_log(folder)
    return folder


SIZES_OF_FILES = st.lists(st.integers(0, 20), max_size=6)


@settings(max_examples=25)
@given(SIZES_OF_FILES, st.integers(1, 3), st.integers(1, 5))
def test_each_record_comes_once_and_the_same_whenever_a_rank_looked(
    sizes: list[int], world_size: int, batch_size: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        there = _loaders(_write(Path(folder, "there"), sizes), world_size, batch_size)
        batches = [[ids_of(batch) for batch in loader] for loader in there]
        Path(folder, "growing").mkdir()
        for rank in range(world_size):
            log = _GrowingLog(Path(folder, "growing"), sizes)
            assert [ids_of(batch) for batch in _loaders(log, world_size, batch_size)[rank]] == batches[rank]
    assert len({len(of_rank) for of_rank in batches}) == 1
    steps = [[record for batch in step for record in batch] for step in zip(*batches, strict=True)]
    assert [record for step in steps for record in step] == list(range(sum(sizes)))
    assert all(len(batch) == batch_size for of_rank in batches for batch in of_rank[:-1])


@settings(max_examples=25)
@given(SIZES_OF_FILES, st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(0, 4)), max_size=4))
def test_each_record_comes_once_over_resumptions_in_other_shapes(
    sizes: list[int], runs: list[tuple[int, int, int]]
) -> None:
    trained: list[int] = []
    state = None
    with tempfile.TemporaryDirectory() as folder:
        for world_size, batch_size, num_steps in [*runs, (2, 4, 1000)]:
            loaders = [
                _loaders(_GrowingLog(Path(folder), sizes), world_size, batch_size)[rank] for rank in range(world_size)
            ]
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(through_json(state))
            # One step is pulled ahead of the one that is trained.
            steps = [step for step, _ in zip(zip(*loaders, strict=True), range(num_steps + 1), strict=False)]
            trained += [record for step in steps[:num_steps] for batch in step for record in ids_of(batch)]
            if steps[:num_steps]:
                state, *others = (
                    loader.state_dict(after=batch) for loader, batch in zip(loaders, steps[:num_steps][-1], strict=True)
                )
                assert all(other == state for other in others)
    assert trained == list(range(sum(sizes)))


def test_batches_have_the_columns_of_the_log(tmp_path: Path) -> None:
    key_map = KeyMap(mode="roundrobin", num_embeddings=64, world_size=2)
    options: dict[str, Any] = {
        "extra_events": ("dwell",),
        "user_id": True,
        "max_num_candidates": 2,
        "max_history_length": 1,
    }
    (loader,) = _loaders(_write(tmp_path, [6, 5]), 1, 4, key_maps={"segment": key_map}, **options)
    batches = list(loader)
    assert [ids_of(batch) for batch in batches] == [[1, 2, 3], [5, 6, 7], [9, 10]]  # every fourth has one event
    assert loader.left_out == {"fewer events than 2 candidates": 3}
    assert [(batch.epoch, batch.step, batch.position) for batch in batches] == [(0, 0, 4), (0, 1, 8), (0, 2, 11)]
    for batch in batches:
        for row, record in enumerate(ids_of(batch)):
            assert rows_of(batch.features, "item_id")[row] == items_of(record)[-3:]
            assert rows_of(batch.features, "user_id")[row] == [record]
            assert rows_of(batch.features, "segment")[row] == key_map(np.array([record % 4])).tolist()
            assert rows_of(batch.float_features, "share")[row] == [record / 2]
            assert set(rows_of(batch.features, "dwell")[row]) <= {record}
            assert rows_of(batch.labels, "label")[row] == [record % 3] * 2


def test_a_rest_that_fills_no_step_comes_at_the_end_unless_it_is_dropped(tmp_path: Path) -> None:
    log = _write(tmp_path, [7])
    assert [[ids_of(batch) for batch in loader] for loader in _loaders(log, 3, 2)] == [
        [[0, 1], []],
        [[2, 3], []],
        [[4, 5], [6]],
    ]
    dropped = _loaders(log, 3, 2, drop_last=True)
    assert [[ids_of(batch) for batch in loader] for loader in dropped] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    (loader,) = _loaders(log, 1, 7)
    loader.load_state_dict(dropped[0].state_dict())
    assert [ids_of(batch) for batch in loader] == [[6]]
    add_file(log, "00001.parquet", range(7, 10))  # a log may go on after its end
    later = _loaders(log, 1, 7)[0]
    later.load_state_dict(loader.state_dict())
    assert [ids_of(batch) for batch in later] == [[7, 8, 9]]


def test_files_are_read_while_another_process_adds_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader, *_ = _loaders(tmp_path, 2)
    assert not list(tmp_path.iterdir())
    with caplog.at_level(logging.INFO, logger="evenrank"):
        writer = subprocess.Popen([sys.executable, "-P", "-c", WRITER, str(ROOT), str(tmp_path), "12"])
        batches = list(loader)
    assert writer.wait() == 0
    assert [ids_of(batch) for batch in batches] == [[*range(first, first + 3)] for first in range(0, 84, 6)]
    waits = [record.message for record in caplog.records if "waiting" in record.message]
    assert waits[0] == "waiting for records of the log from 0 on"
    assert len(waits) == len(set(waits))  # not one per look


def _balanced(rank: int, world_size: int, folder: Path, state: Any, num_steps: int) -> tuple[list[list[int]], Any]:
    with Balancer(_loaders(folder, world_size)[rank], BalanceConfig(cost=COST)) as balancer:
        if state is not None:
            balancer.load_state_dict(state)
        batches = [batch for batch, _ in zip(balancer, range(num_steps + 1), strict=False)][:num_steps]
        return [ids_of(batch) for batch in batches], balancer.state_dict(after=batches[-1])


def _follow_own_folder(rank: int, world_size: int, folder: Path) -> list[list[int]]:
    average = LossAverage()
    for batch in _loaders(folder / str(rank), world_size)[rank]:
        average.update(torch.tensor(1.0), batch)
    with pytest.raises(RankError, match="ranks have planned the steps of this average differently"):
        average.compute()
    trained: list[list[int]] = []
    fault = r"plan_hash is \d+ on rank 0, \d+ on rank 1; ranks have found other files of the log that they follow"
    balancer = Balancer(_loaders(folder / str(rank), world_size)[rank], BalanceConfig(cost=COST, lookahead=1))
    with balancer, pytest.raises(RankError, match=fault):
        trained.extend(map(ids_of, balancer))
    return trained


def test_ranks_that_number_records_differently_train_none_of_them(tmp_path: Path, ranks: RankPool) -> None:
    for rank, names in enumerate((("1", "2", "3"), ("1", "3", "2"))):  # a file came late, and one rank has seen it
        for name, first in zip(names, (0, 6, 12), strict=True):
            add_file(tmp_path / str(rank), f"{name}.parquet", range(first, first + 6))
        end_log(tmp_path / str(rank))
    assert [len(trained) <= 1 for trained in ranks.run(2, _follow_own_folder, tmp_path)] == [True, True]


def test_a_balancer_follows_a_log_and_resumes_on_other_ranks(tmp_path: Path, ranks: RankPool) -> None:
    writer = subprocess.Popen([sys.executable, "-P", "-c", WRITER, str(ROOT), str(tmp_path), "30"])
    (first, state), (other, same) = ranks.run(2, _balanced, tmp_path, None, 9)
    assert state == same
    assert state["position"] == 9 * 6
    assert [sorted(a + b) for a, b in zip(first, other, strict=True)] == [
        [*range(step * 6, step * 6 + 6)] for step in range(9)
    ]
    rest = ranks.run(3, _balanced, tmp_path, state, 1000)
    assert writer.wait() == 0
    assert len({len(batches) for batches, _ in rest}) == 1
    trained = [record for batches, _ in rest for batch in batches for record in batch]
    assert sorted(trained) == list(range(54, 210))


@pytest.mark.parametrize("at_url", [False, True])
def test_a_dataset_to_whose_split_files_are_added_is_followed(
    small_dataset: Path, tmp_path: Path, s3: S3, at_url: bool
) -> None:
    dataset = copy_dataset(small_dataset, tmp_path / "data")
    rows = len(open_store(dataset))
    names = [path.name for path in sorted((dataset / "train").iterdir())]
    shutil.copy(dataset / "train" / names[0], dataset / "train" / "part-99999.parquet")
    end_log(dataset / "train")
    place: Path | str = dataset
    if at_url:
        s3.put(dataset, "followed")
        place = s3.url("followed")
    config = LoaderConfig(batch_size=16, order="rows")
    (first, *_, last) = build_stream_loader(place, config, rank=0, world_size=1, follow=True)
    assert last.position > rows
    same = next(iter(build_loader(small_dataset, config, rank=0, world_size=1)))
    assert first.features.keys() == same.features.keys()
    assert first.features.values().tolist() == same.features.values().tolist()


def test_numbers_of_targets_limit_the_candidates_of_a_followed_dataset(small_dataset: Path, tmp_path: Path) -> None:
    dataset = copy_dataset(small_dataset, tmp_path / "data")
    change_table(dataset, lambda table: add_targets(table, table["length"].to_numpy() // 2))
    end_log(dataset / "train")
    options: dict[str, Any] = {"batch_size": 16, "order": "rows", "max_num_candidates": 3}
    followed = build_stream_loader(dataset, LoaderConfig(**options), rank=0, world_size=1, follow=True)
    counts = [batch.num_candidates[: batch.num_real].tolist() for batch in followed]
    loader = build_loader(dataset, LoaderConfig(**options), rank=0, world_size=1)
    expected = [batch.num_candidates[: batch.num_real].tolist() for batch in loader]
    assert [*chain.from_iterable(counts)] == [*chain.from_iterable(expected)]
    assert followed.left_out == loader.left_out


class _Faulty(FolderLog):
    """A log of which one method returns something else."""

    def __init__(self, folder: Path, method: str, change: Callable[[Any], Any]) -> None:
        super().__init__(folder, MANIFEST)
        kept = getattr(self, method)

        def changed(*arguments: int) -> Any:
            returned = kept(*arguments)
            return returned if arguments == (0, 0) and len(arguments) else change(returned)

        setattr(self, method, changed)


@pytest.mark.parametrize(
    ("method", "change", "fault"),
    [
        (
            "read",
            lambda store: rows_of_table(table_of(range(2)), MANIFEST, ""),
            r"read\(0, 3\) returned 2 records; ret",
        ),
        (
            "read",
            lambda store: rows_of_table(table_of(range(4)), MANIFEST, ""),
            r"returned 4 records; return the 3 that",
        ),
        ("read", lambda store: None, "returned None; return a SequenceStore, as rows_of_table does"),
        ("read", lambda store: table_of(range(3)), "returned a Table; return a SequenceStore"),
        (
            "read",
            lambda store: replace(store, columns={**store.columns, "item_id": store.columns["item_id"] / 1}),
            "returned item_id as float64, before as int64; return the same",
        ),
        ("read", lambda store: replace(store, columns={}), "returned user_id as None, before as int64"),
        (
            "end",
            lambda end: None,
            r"end\(\) returned None after position 0; return a LogEnd\(position, is_final\) whose",
        ),
        ("end", tuple, r"returned \(20, True\) after position 0"),
        ("end", lambda end: end._replace(position=float(end.position)), r"returned LogEnd\(position=20\.0, is_final"),
        (
            "end",
            lambda end: end._replace(position=-1),
            r"returned LogEnd\(position=-1, is_final=True\) after position 0",
        ),
        ("mark", lambda mark: "two\nlines", r"mark\(3\) returned 'two\\nlines'; return text of one line, or a state"),
    ],
)
def test_a_source_that_breaks_its_contract_is_named_with_what_it_returned(
    tmp_path: Path, method: str, change: Callable[[Any], Any], fault: str
) -> None:
    (loader,) = _loaders(_Faulty(_write(tmp_path, [20]), method, change), 1)
    with pytest.raises(ConfigError, match=rf"^_Faulty\..*{fault}"):
        next(iter(loader))


def test_loaders_of_logs_are_refused_with_the_reason(tmp_path: Path) -> None:
    log = FolderLog(_write(tmp_path, [20]), MANIFEST)
    build: Any = build_stream_loader
    with pytest.raises(ConfigError, match="a log is read in its order; order must be 'rows', got 'shuffle'"):
        build(log, LoaderConfig(batch_size=2), rank=0, world_size=1, follow=True)
    with pytest.raises(ConfigError, match="a log is read as it grows; pass follow=True"):
        build(log, LoaderConfig(batch_size=2, order="rows"), rank=0, world_size=1)
    with pytest.raises(ConfigError, match="StreamConfig: poll_seconds must be above 0 and finite, got 0"):
        StreamConfig(poll_seconds=0)
    with pytest.raises(ConfigError, match="nothing"):
        _loaders(log, 1, context=("nothing",))
    (loader,) = _loaders(log, 1)
    batch = next(iter(loader))
    with pytest.raises(ConfigError, match=r"a log is iterated over once; to go on, load_state_dict"):
        next(iter(loader))
    state = loader.state_dict(after=batch)
    loader.load_state_dict(state)
    assert ids_of(next(iter(loader))) == [3, 4, 5]
    for changes, fault in (
        ({"position": 9}, "is damaged"),
        ({"place": "[]"}, "is damaged"),
        ({"version": 2}, "has version 2, expected 6"),
    ):
        with pytest.raises(StateError, match=fault):
            loader.load_state_dict({**state, **changes})
    with pytest.raises(StateError, match="stores segment with routing"):
        _loaders(log, 1, key_maps={"segment": KeyMap(mode="roundrobin", num_embeddings=64, world_size=2)})[
            0
        ].load_state_dict(state)
