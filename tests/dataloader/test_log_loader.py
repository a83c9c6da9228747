"""What laws do not see of logs: files that others add, sources that break their contract, ends, ranks apart."""

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evenrank.core.errors import ConfigError, RankError
from evenrank.dataloader import LoaderConfig, StreamConfig, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.datasets import FolderLog, open_store
from evenrank.datasets.continuous_log import rows_of_table
from evenrank.training import LossAverage
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import ids_of
from tests.datasets.crafted import add_targets, change_table, copy_dataset
from tests.datasets.logs import MANIFEST, add_file, end_log, table_of
from tests.pages import ROOT
from tests.ranks import RankPool
from tests.s3_server import S3

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


def _loaders(source: Any, world_size: int, batch_size: int = 3, **options: Any) -> list[Any]:
    config = LoaderConfig(batch_size=batch_size, order="rows", **options)
    log = FolderLog(source, MANIFEST) if isinstance(source, Path | str) else source
    return [
        build_stream_loader(log, config, POLL, rank=rank, world_size=world_size, follow=True)
        for rank in range(world_size)
    ]


def _write(folder: Path, sizes: Sequence[int]) -> Path:
    first = 0
    for number, size in enumerate(sizes):
        add_file(folder, f"{number:05}.parquet", range(first, first + size))
        first += size
    end_log(folder)
    return folder


def test_a_rest_that_fills_no_step_comes_at_the_end_unless_it_is_dropped(tmp_path: Path) -> None:
    log = _write(tmp_path, [3, 4])
    assert [[ids_of(batch) for batch in loader] for loader in _loaders(log, 3, 2)] == [
        [[0, 1], []],
        [[2, 3], []],
        [[4, 5], [6]],
    ]
    dropped = _loaders(log, 3, 2, drop_last=True)
    assert [[ids_of(batch) for batch in loader] for loader in dropped] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    loader, later = (_loaders(log, 1, 7)[0] for _ in range(2))
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
    with Balancer(_loaders(folder, world_size)[rank], BalanceConfig(cost=COST)) as balancer:
        if state is not None:
            balancer.load_state_dict(state)
        batches = [batch for batch, _ in zip(balancer, range(num_steps + 1), strict=False)][:num_steps]
        return [ids_of(batch) for batch in batches], balancer.state_dict(after=batches[-1])


def test_files_that_another_process_adds_are_read_and_a_balancer_resumes_on_other_ranks(
    tmp_path: Path, ranks: RankPool, caplog: pytest.LogCaptureFixture
) -> None:
    loader, *_ = _loaders(tmp_path, 2)
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
    waiting, looks = _loaders(tmp_path, 1)[0], []

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
    for batch in _loaders(folder / str(rank), world_size)[rank]:
        average.update(torch.tensor(1.0), batch)
    with pytest.raises(RankError, match="ranks have planned the steps of this average differently"):
        average.compute()
    trained: list[list[int]] = []
    fault = r"plan_hash is \d+ on rank 0, \d+ on rank 1; ranks have found other files of the log that they follow"
    balancer = Balancer(_loaders(folder / str(rank), world_size)[rank], BalanceConfig(cost=COST, lookahead=1))
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
    assert (
        batches[0].features.values().tolist()
        == loader.collate(batches[0].sample_ids[: batches[0].num_real].numpy()).features.values().tolist()
    )


def _rows(count: int) -> Any:
    return rows_of_table(table_of(range(count)), MANIFEST, "")


# A method of a log, how it changes what it returns, and the fault.
FAULTS: list[tuple[str, Callable[[Any], Any], str]] = [
    ("read", lambda store: _rows(2), r"read\(0, 3\) returned 2 records; ret"),
    ("read", lambda store: _rows(4), r"returned 4 records; return the 3 that"),
    ("read", lambda store: None, "returned None; return a SequenceStore, as rows_of_table does"),
    ("read", lambda store: table_of(range(3)), "returned a Table; return a SequenceStore"),
    (
        "read",
        lambda store: replace(store, columns={**store.columns, "item_id": store.columns["item_id"] / 1}),
        "returned item_id as float64, before as int64; return the same",
    ),
    ("read", lambda store: replace(store, columns={}), "returned user_id as None, before as int64"),
    ("end", lambda end: None, r"end\(\) returned None after position 0; return a LogEnd\(position, is_final\) whose"),
    ("end", tuple, r"returned \(20, True\) after position 0"),
    ("end", lambda end: end._replace(position=20.0), r"returned LogEnd\(position=20\.0, is_final"),
    ("end", lambda end: end._replace(position=-1), r"returned LogEnd\(position=-1, is_final=True\) after position 0"),
    ("mark", lambda mark: "two\nlines", r"mark\(3\) returned 'two\\nlines'; return text of one line, or a state"),
]


class _Faulty(FolderLog):
    """A log of which one method returns something else."""

    def __init__(self, folder: Path, method: str, change: Callable[[Any], Any]) -> None:
        super().__init__(folder, MANIFEST)
        kept = getattr(self, method)

        def changed(*arguments: int) -> Any:
            returned = kept(*arguments)
            return returned if arguments == (0, 0) and len(arguments) else change(returned)

        setattr(self, method, changed)


@pytest.mark.parametrize(("method", "change", "fault"), FAULTS)
def test_a_source_that_breaks_its_contract_is_named_with_what_it_returned(
    tmp_path: Path, method: str, change: Callable[[Any], Any], fault: str
) -> None:
    (loader,) = _loaders(_Faulty(_write(tmp_path, [20]), method, change), 1)
    with pytest.raises(ConfigError, match=rf"^_Faulty\..*{fault}"):
        next(iter(loader))
