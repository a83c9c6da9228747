"""What hosts fetch of a dataset in an object store, according to the server."""

from collections import defaultdict
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.stream_loader import StreamConfig, build_stream_loader
from evenrank.datasets import open_store
from tests.dataloader.batch_helpers import ids_of
from tests.datasets.crafted import write_in_parts
from tests.ranks import RankPool
from tests.s3_server import S3, Read

ROWS, ROWS_PER_FILE, ROWS_PER_GROUP = 8192, 512, 16
HOSTS, RANKS_PER_HOST = 8, 8
CONFIG = LoaderConfig(batch_size=16)
# A lane per rank, of 128 rows, which are 8 row groups and parts of two.
STREAM = StreamConfig(lanes=HOSTS * RANKS_PER_HOST, window_rows=8)


@pytest.fixture(scope="module")
def data(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("large") / "data"
    sizes = {"num_rows": ROWS, "rows_per_file": ROWS_PER_FILE, "rows_per_group": ROWS_PER_GROUP}
    return write_in_parts(small_dataset, out, **sizes)


def _stream(process: int, num_processes: int, s3: S3) -> dict[str, list[int]]:
    """Read an epoch on the ranks of some hosts; return the samples by user, who is `HOST_RANK`."""
    samples = {}
    for host in range(process, HOSTS, num_processes):
        for rank in range(host * RANKS_PER_HOST, (host + 1) * RANKS_PER_HOST):
            url, world_size = s3.url("stream", user=(user := f"{host}_{rank}")), HOSTS * RANKS_PER_HOST
            loader = build_stream_loader(url, CONFIG, STREAM, rank=rank, world_size=world_size)
            samples[user] = [sample for batch in loader for sample in ids_of(batch)]
    return samples


def _group_sizes(data: Path) -> list[int]:
    """Return the bytes of each row group of the split."""
    footers = [pq.read_metadata(path) for path in sorted((data / "train").iterdir())]
    groups = [footer.row_group(index) for footer in footers for index in range(footer.num_row_groups)]
    return [sum(group.column(index).total_compressed_size for index in range(group.num_columns)) for group in groups]


def test_hosts_that_stream_fetch_the_row_groups_of_their_ranks_once(data: Path, s3: S3, ranks: RankPool) -> None:
    s3.put(data, "stream")
    first, second = ranks.run(2, _stream, s3)
    samples: dict[str, list[int]] = first | second
    assert sorted(chain(*samples.values())) == list(range(ROWS))
    group_sizes = _group_sizes(data)
    file_sizes = {f"stream/train/{path.name}": path.stat().st_size for path in (data / "train").iterdir()}
    reads: dict[str, list[Read]] = defaultdict(list)
    footers: dict[str, list[Read]] = defaultdict(list)
    for read in s3.reads("stream/train"):
        of_kind = footers if read.end == file_sizes[read.key] else reads
        of_kind[read.user].append(read)
    for user, of_rank in samples.items():
        groups = {sample // ROWS_PER_GROUP for sample in of_rank}
        files = {sample // ROWS_PER_FILE for sample in of_rank}
        # A request per row group, one for a file's footer.
        assert [len(reads[user]), len(footers[user])] == [len(groups), len(files)]
        assert sum(read.end - read.first for read in reads[user]) == sum(group_sizes[group] for group in groups)
        assert all(read.end - read.first <= 1 << 16 for read in footers[user])
    for host in range(HOSTS):
        of_ranks = [read for user, of_rank in reads.items() if user.startswith(f"{host}_") for read in of_rank]
        # Of 8 row groups, one is read by two ranks.
        assert sum(read.end - read.first for read in of_ranks) < 1.2 * sum(group_sizes) / HOSTS


def _open_store(rank: int, world_size: int, s3: S3, home: Path) -> tuple[list[int], list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        store = open_store(s3.url("store"))
    loader = build_loader(store, CONFIG, rank=rank, world_size=world_size)
    return [sample for batch in loader for sample in ids_of(batch)], store.columns["item_id"].tolist()


def test_hosts_that_open_a_store_fetch_each_file_once(data: Path, s3: S3, ranks: RankPool, tmp_path: Path) -> None:
    s3.put(data, "store")
    of_ranks = ranks.run(2, _open_store, s3, tmp_path)
    assert sorted(chain(*(samples for samples, _ in of_ranks))) == list(range(ROWS))
    items = pq.read_table(data / "train")["item_id"].combine_chunks().flatten().to_pylist()
    assert all(found == items for _, found in of_ranks)
    files = {f"store/train/{path.name}": path.stat().st_size for path in (data / "train").iterdir()}
    assert sorted(s3.reads("store/train")) == sorted(Read("key", key, 0, size) for key, size in files.items())
