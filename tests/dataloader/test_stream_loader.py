"""What streams read, from folders, logs that grow and object stores, and what they hold in memory.

The laws have their batches and states.
"""

import gc
import itertools
import logging
import shutil
import subprocess
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import fs

from evenrank.core.errors import ConfigError, DataError, RankError, StateError
from evenrank.dataloader import LoaderConfig, StreamConfig, build_loader, build_stream_loader, random_codes
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.sampling.steps import StepSampler
from evenrank.dataloader.state.resume_point import SkippedSamples
from evenrank.datasets import FolderLog, SequenceStore, open_store
from evenrank.datasets.continuous_log import rows_of_table
from evenrank.datasets.lanes import Span
from evenrank.datasets.stream import StreamSource
from evenrank.training import LossAverage
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import all_ids, ids_of
from tests.datasets.crafted import add_targets, change_table, copy_dataset, write_in_parts
from tests.datasets.logs import MANIFEST, add_file, end_log, table_of
from tests.pages import ROOT
from tests.ranks import RankPool
from tests.s3_server import S3, Read

SMALL = StreamConfig(lanes=6, window_rows=2)


@pytest.fixture(scope="module")
def parts(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_in_parts(small_dataset, tmp_path_factory.mktemp("parts") / "data")


def _loaders(path: Path | str, world_size: int, stream: StreamConfig = SMALL, **options: Any) -> list[Any]:
    config = LoaderConfig(**{"batch_size": 8, **options})
    return [build_stream_loader(path, config, stream, rank=rank, world_size=world_size) for rank in range(world_size)]


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
            rest.append(all_ids(itertools.islice(each, num_steps)))
        state = loaders[0].state_dict()
    pending = list(itertools.chain(*rest[:5]))
    assert sorted(pending) == sorted(rows[np.arange(1, 2 * len(pending), 2)].tolist())
    assert sorted(itertools.chain(*rest)) == sorted([*rows[1:32:2], *rows[32:]])


def test_ranks_that_read_rows_often_are_warned_of_once(parts: Path, caplog: pytest.LogCaptureFixture) -> None:
    for lanes, window_rows, message in (
        (6, 2, "9 ranks share 6 lanes, and read rows 2.0 times; set lanes to a multi"),
        (99, 3, "9 ranks share 3 lanes, and read rows 3.0 times; lower window_rows"),
    ):
        caplog.clear()
        for world_size in (3, 9):
            _loaders(parts, world_size, StreamConfig(lanes=lanes, window_rows=window_rows))
        (warned,) = caplog.messages
        assert warned.startswith(message)
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
            assert all_ids(loader) == all_ids(local)
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
            samples[user] = all_ids(build_stream_loader(url, CONFIG, stream, rank=rank, world_size=world_size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        store = open_store(s3.url("store"))
    return samples, all_ids(build_loader(store, CONFIG, rank=process, world_size=num_processes))


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


def _logs(source: Any, world_size: int, batch_size: int = 3, **options: Any) -> list[Any]:
    config = LoaderConfig(batch_size=batch_size, order="rows", **options)
    log = FolderLog(source, MANIFEST) if isinstance(source, Path) else source
    ranks = [{"rank": rank, "world_size": world_size} for rank in range(world_size)]
    return [build_stream_loader(log, config, POLL, follow=True, **rank) for rank in ranks]  # type: ignore[call-overload]


def _write(folder: Path, sizes: Sequence[int]) -> Path:
    first = 0
    for number, size in enumerate(sizes):
        add_file(folder, f"{number:05}.parquet", range(first, first + size))
        first += size
    end_log(folder)
    return folder


def test_a_rest_that_fills_no_step_comes_at_the_end_unless_it_is_dropped(tmp_path: Path) -> None:
    log = _write(tmp_path, [3, 4])
    whole, dropped = _logs(log, 3, 2), _logs(log, 3, 2, drop_last=True)
    assert [[*map(ids_of, loader)] for loader in whole] == [[[0, 1], []], [[2, 3], []], [[4, 5], [6]]]
    assert [[*map(ids_of, loader)] for loader in dropped] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    loader, later = (_logs(log, 1, 7)[0] for _ in range(2))
    loader.load_state_dict(dropped[0].state_dict())
    assert [ids_of(batch) for batch in loader] == [[6]]
    add_file(log, "00002.parquet", range(7, 10))  # a log may go on after its end
    later.load_state_dict(loader.state_dict())
    batch = next(iter(later))
    assert ids_of(batch) == [7, 8, 9]
    with pytest.raises(ConfigError, match=r"a log is iterated over once; to go on, load_state_dict"):
        next(iter(later))
    later.load_state_dict(later.state_dict(after=batch))
    assert list(later) == []


def _balanced(rank: int, world_size: int, folder: Path, state: Any, num_steps: int) -> tuple[list[list[int]], Any]:
    with Balancer(_logs(folder, world_size)[rank], BalanceConfig(cost=COST)) as balancer:
        if state is not None:
            balancer.load_state_dict(state)
        batches = [batch for batch, _ in zip(balancer, range(num_steps + 1), strict=False)][:num_steps]
        return [ids_of(batch) for batch in batches], balancer.state_dict(after=batches[-1])


def test_files_that_another_process_adds_are_read_and_a_balancer_resumes_on_other_ranks(
    tmp_path: Path, ranks: RankPool, caplog: pytest.LogCaptureFixture
) -> None:
    loader, *_ = _logs(tmp_path, 2)
    writer = subprocess.Popen([sys.executable, "-P", "-c", WRITER, str(ROOT), str(tmp_path), "30"])
    (first, state), (other, same) = ranks.run(2, _balanced, tmp_path, None, 9)
    assert (state, state["position"]) == (same, 9 * 6)
    steps = [sorted(a + b) for a, b in zip(first, other, strict=True)]
    assert steps == [[*range(step * 6, step * 6 + 6)] for step in range(9)]
    rest = ranks.run(3, _balanced, tmp_path, state, 1000)
    assert len({len(batches) for batches, _ in rest}) == 1
    assert sorted(record for batches, _ in rest for batch in batches for record in batch) == list(range(54, 210))
    assert writer.wait() == 0
    assert [ids_of(batch) for batch in loader] == [[*range(first, first + 3)] for first in range(0, 210, 6)]
    # Who waits says so, but not once per look.
    (tmp_path / "_END").unlink()
    waiting, looks = _logs(tmp_path, 1)[0], []

    def end_after_some_looks(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 5:
            end_log(tmp_path)

    with caplog.at_level(logging.INFO, logger="evenrank"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", end_after_some_looks)
        assert sum(batch.num_real for batch in waiting) == 210
    waits = [message for message in caplog.messages if "waiting" in message]
    assert (waits, len(looks)) == (["waiting for records of the log from 210 on"], 5)


def _follow_own_folder(rank: int, world_size: int, folder: Path) -> int:
    average = LossAverage()
    for batch in _logs(folder / str(rank), world_size)[rank]:
        average.update(torch.tensor(1.0), batch)
    with pytest.raises(RankError, match="ranks have planned the steps of this average differently"):
        average.compute()
    trained: list[list[int]] = []
    fault = r"plan_hash is \d+ on rank 0, \d+ on rank 1; ranks have found other files of the log that they follow"
    balancer = Balancer(_logs(folder / str(rank), world_size)[rank], BalanceConfig(cost=COST, lookahead=1))
    with balancer, pytest.raises(RankError, match=fault):
        trained.extend(map(ids_of, balancer))
    return len(trained)


def test_ranks_that_number_records_differently_train_none_of_them(tmp_path: Path, ranks: RankPool) -> None:
    for rank, names in enumerate((("1", "2", "3"), ("1", "3", "2"))):  # a file came late, and one rank has seen it
        for name, first in zip(names, (0, 6, 12), strict=True):
            add_file(tmp_path / str(rank), f"{name}.parquet", range(first, first + 6))
        end_log(tmp_path / str(rank))
    assert max(ranks.run(2, _follow_own_folder, tmp_path)) <= 1


@pytest.mark.parametrize("at_url", [False, True])
def test_a_dataset_to_whose_split_files_are_added_is_followed(
    small_dataset: Path, tmp_path: Path, s3: S3, at_url: bool
) -> None:
    dataset = copy_dataset(small_dataset, tmp_path / "data")
    change_table(dataset, lambda table: add_targets(table, table["length"].to_numpy() // 2))
    rows, config = len(open_store(dataset)), LoaderConfig(batch_size=16, order="rows", max_num_candidates=3)
    loader: Any = build_loader(dataset, config, rank=0, world_size=1)
    expected = [count for batch in loader for count in batch.num_candidates[: batch.num_real].tolist()]
    names = [path.name for path in sorted((dataset / "train").iterdir())]
    shutil.copy(dataset / "train" / names[0], dataset / "train" / "part-99999.parquet")
    end_log(dataset / "train")
    place: Path | str = dataset
    if at_url:
        s3.put(dataset, "followed")
        place = s3.url("followed")
    followed = build_stream_loader(place, config, rank=0, world_size=1, follow=True)
    batches: list[Any] = list(followed)
    # Numbers of targets limit the candidates, and decide which rows are samples.
    counts = [count for batch in batches for count in batch.num_candidates[: batch.num_real].tolist()]
    assert counts == 2 * expected
    assert followed.left_out == {reason: 2 * count for reason, count in loader.left_out.items()}
    assert batches[-1].position == 2 * rows
    of_first = loader.collate(batches[0].sample_ids[: batches[0].num_real].numpy())
    assert batches[0].features.values().tolist() == of_first.features.values().tolist()


def _rows(count: int) -> Any:
    return rows_of_table(table_of(range(count)), MANIFEST, "")


def _with_floats(store: Any) -> Any:
    return replace(store, columns={**store.columns, "item_id": store.columns["item_id"] / 1})


# A method of a log, how it changes what it returns, and the fault.
FAULTS: list[tuple[str, Callable[[Any], Any], str]] = [
    ("read", lambda store: _rows(2), r"read\(0, 3\) returned 2 records; ret"),
    ("read", lambda store: _rows(4), r"returned 4 records; return the 3 that"),
    ("read", lambda store: table_of(range(3)), "returned a Table; return a SequenceStore, as rows_of_table does"),
    ("read", _with_floats, "returned item_id as float64, before as int64; return the same"),
    ("read", lambda store: replace(store, columns={}), "returned user_id as None, before as int64"),
    ("end", lambda end: None, r"end\(\) returned None after position 0; return a LogEnd\(position, is_final\) whose"),
    ("end", tuple, r"returned \(20, True\) after position 0"),
    ("end", lambda end: end._replace(position=20.0), r"returned LogEnd\(position=20\.0, is_final"),
    ("end", lambda end: end._replace(position=-1), r"returned LogEnd\(position=-1, is_final=True\) after position 0"),
    ("mark", lambda mark: "two\nlines", r"mark\(3\) returned 'two\\nlines'; return text of one line, or a state"),
]


@pytest.mark.parametrize(("method", "change", "fault"), FAULTS)
def test_a_source_that_breaks_its_contract_is_named_with_what_it_returned(
    tmp_path: Path, method: str, change: Callable[[Any], Any], fault: str
) -> None:
    log = FolderLog(_write(tmp_path, [20]), MANIFEST)
    kept, (loader,) = getattr(log, method), _logs(log, 1)

    def changed(*arguments: int) -> Any:
        return kept(*arguments) if arguments == (0, 0) else change(kept(*arguments))

    setattr(log, method, changed)
    with pytest.raises(ConfigError, match=rf"^FolderLog\..*{fault}"):
        next(iter(loader))
