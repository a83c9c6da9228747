"""A split read in sequence, from a folder or an object store, for what no disk holds.

The rows of a split are cut into S logical shards, each of which is read in windows of `buffer_rows` rows:

    rows      0 1 2 3 4 5 6 7 8 9      S = 2, buffer_rows = 2
    shards    [ 0       | 1       ]
    windows   [0 1|2 3|4][5 6|7 8|9]

A window is the buffer of a shuffle: windows come in an order of their own in each epoch, and so do the rows of each.
Both are permutations without state, so the place in a shard is two numbers, and says what the buffer holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import fs

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.order import permute
from evenrank.datasets.schema import EVENT_DTYPES, MANIFEST_NAME, NUM_TARGETS, USER_ID, Manifest, parse_manifest
from evenrank.datasets.store import SequenceStore
from evenrank.datasets.unpack import Rows, read_row_group, unreadable

_EMPTY = np.empty(0, dtype=np.int64)
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: sets seeds of neighbouring shards far apart


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """How a split is read in sequence. It must stay the same for a saved place to stay valid."""

    num_shards: int = 64  # of the dataset, whatever the number of ranks; ranks beyond it get nothing
    buffer_rows: int = 8192  # rows of a shard that are shuffled among themselves, and held in memory
    open_shards: int = 4  # that a rank reads at the same time; a batch has samples of each

    def __post_init__(self) -> None:
        for name in ("num_shards", "buffer_rows", "open_shards"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSource:
    """A split in a file system of any kind."""

    manifest: Manifest
    split: str
    files: fs.FileSystem
    root: str  # of the dataset, in the file system

    @property
    def num_rows(self) -> int:
        """Rows of the split."""
        return self.manifest.splits[self.split].rows

    def read(self, first: int, end: int) -> SequenceStore:
        """Read rows first..end-1 of the split into memory.

        Raises:
            DataError: a file cannot be read, or is not what the manifest says.

        """
        pieces = list(self._pieces(first, end))
        lengths = np.concatenate([np.empty(0, dtype=np.int64), *(piece[0] for piece in pieces)])
        if len(lengths) != end - first:
            raise DataError(f"{self.root} has fewer rows than its manifest says; preprocess the dataset again")
        event_types = {**EVENT_DTYPES, **self.manifest.extra_events}
        names = [USER_ID, *self.manifest.contextual, *([NUM_TARGETS] if pieces and NUM_TARGETS in pieces[0][1] else [])]
        rows = {name: np.concatenate([_EMPTY, *(piece[1][name] for piece in pieces)]) for name in names}
        targets = rows.pop(NUM_TARGETS, None)
        return SequenceStore(
            manifest=self.manifest,
            split=self.split,
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            events={
                name: np.concatenate([np.empty(0, dtype), *(piece[2][name] for piece in pieces)])
                for name, dtype in event_types.items()
            },
            rows=rows,
            num_targets=None if targets is None else targets.astype(np.int32),
        )

    def _pieces(self, first: int, end: int) -> Iterator[Rows]:
        """Yield the rows of each row group that lie within first..end-1."""
        begin = 0  # of the file
        for file in self.manifest.splits[self.split].files:
            if begin < end and begin + file.rows > first:
                yield from self._pieces_of(f"{self.root}/{file.path}", first - begin, end - begin)
            begin += file.rows

    def _pieces_of(self, name: str, first: int, end: int) -> Iterator[Rows]:
        try:
            with self.files.open_input_file(name) as opened, pq.ParquetFile(opened) as file:
                begin = 0  # of the row group
                for group in range(file.num_row_groups):
                    count = file.metadata.row_group(group).num_rows
                    if begin < end and begin + count > first:
                        rows = read_row_group(file, group, self.manifest, name)
                        yield _cut(rows, max(first - begin, 0), min(end - begin, count))
                    begin += count
        except (OSError, pa.ArrowException) as error:
            raise unreadable(name, error) from error


def _cut(rows: Rows, first: int, end: int) -> Rows:
    lengths, of_row, of_event = rows
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return (
        lengths[first:end],
        {name: values[first:end] for name, values in of_row.items()},
        {name: values[offsets[first] : offsets[end]] for name, values in of_event.items()},
    )


def open_stream(url: Path | str, split: str) -> StreamSource:
    """Open a dataset in a folder, or at a URL that pyarrow knows: `s3://bucket/path`, `gs://...`, `file:///...`.

    Raises:
        DataError: there is no dataset, it cannot be reached, or it has no such split.

    """
    try:
        if "://" in str(url):
            files, root = fs.FileSystem.from_uri(str(url))
        else:
            files, root = fs.LocalFileSystem(), str(Path(url).absolute())
        root = root.rstrip("/")
        with files.open_input_file(f"{root}/{MANIFEST_NAME}") as file:
            text = file.read()
    except (OSError, pa.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{url} is not a dataset that can be read: {reason}") from error
    manifest = parse_manifest(text, f"{url}/{MANIFEST_NAME}")
    if split not in manifest.splits:
        raise DataError(f"{url} has no split {split!r}; it has {', '.join(sorted(manifest.splits))}")
    return StreamSource(manifest=manifest, split=split, files=files, root=root)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One of the logical shards of a split: consecutive rows, read in windows."""

    number: int
    first: int  # row of the split
    end: int
    buffer_rows: int

    @property
    def num_windows(self) -> int:
        """Windows of an epoch."""
        return -(-(self.end - self.first) // self.buffer_rows)

    def window(self, turn: int, *, seed: int, epoch: int) -> tuple[int, NDArray[np.int64]]:
        """Return the window that comes at this turn of an epoch: its first row, and the order of its rows.

        Returns:
            The first row, and int64 [rows of the window]: a permutation of 0..rows-1.

        """
        own_seed = seed + (self.number + 1) * _GOLDEN
        place = int(permute(np.array([turn]), self.num_windows, seed=own_seed, epoch=epoch)[0])
        first = self.first + place * self.buffer_rows
        count = min(self.buffer_rows, self.end - first)
        return first, permute(np.arange(count), count, seed=own_seed + first + 1, epoch=epoch)


def cut_shards(num_rows: int, config: StreamConfig) -> list[Shard]:
    """Cut a split into its shards; there are no more of them than rows."""
    count = max(1, min(config.num_shards, num_rows))
    ends = [num_rows * (number + 1) // count for number in range(count)]
    return [
        Shard(number=number, first=first, end=end, buffer_rows=config.buffer_rows)
        for number, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
    ]
