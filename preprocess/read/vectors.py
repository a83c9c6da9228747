"""Dense vectors of users or items, in any order -> a file by id; in memory are raw ids and a block at a time."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.errors import DataError, first_line
from evenrank.core.files import check_regular, replacing
from evenrank.core.storage import is_url
from evenrank.datasets.schema import MAX_WIDTH, VECTOR_DTYPES, IdKind, VectorFile, sha256_of
from evenrank.preprocess.read.keys import keys_of
from evenrank.preprocess.read.table import FAULT, WHOLE, Rows, Table
from evenrank.preprocess.read.tabular import open_table
from evenrank.preprocess.read.values import id_checks, raw_id, with_ids

_BLOCK_BYTES = 1 << 24
_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64"}  # of Arrow, by the names of NumPy
_RAW_ID, _ROW = "id", "evenrank row"


@dataclass(frozen=True, kw_only=True, slots=True)
class Vectors:
    """The vectors [n, d] of a file, with ids that are distinct."""

    path: Path
    files: tuple[Path, ...]  # which they are read from
    keys: NDArray[np.int64]  # of the ids that a log can have: [m]
    rows: NDArray[np.int64]  # in the file, of the same: [m]
    shape: tuple[int, int]
    dtype: str

    def blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield rows [*, d] in their order, and the number of those before; raises a DataError if some cannot be."""
        at_once = max(1, _BLOCK_BYTES // (self.shape[1] * np.dtype(self.dtype).itemsize))
        with _wrap_errors(self.path):
            if self.path.suffix == ".npy":
                mapped = np.load(self.path, mmap_mode="r", allow_pickle=False)
                yield from ((row, mapped[row : row + at_once]) for row in range(0, len(mapped), at_once))
                return
            with pq.ParquetFile(self.path, memory_map=True) as file:  # or buffers of all row groups stay
                batches = file.iter_batches(batch_size=at_once, columns=_lists(file)[:1])
                for number, batch in enumerate(batches):
                    lengths = pc.call_function("list_value_length", [batch.column(0)]).fill_null(0).to_numpy()
                    if len(odd := np.flatnonzero(lengths != self.shape[1])):
                        place = f"{self.path}: row {number * at_once + odd[0] + 1} has {lengths[odd[0]]} values"
                        raise DataError(f"{place}, and the first row {self.shape[1]}; leave rows without a vector out")
                    values = batch.column(0).flatten().to_numpy(zero_copy_only=False)  # null becomes NaN
                    yield number * at_once, values.astype(self.dtype, copy=False).reshape(len(batch), -1)


def ids_files(path: Path) -> list[Path]:
    """Return the paths or URLs of which one has to have the raw ids of vectors in a `.npy` file."""
    place, mark, options = str(path).partition("?") if is_url(path) else (str(path), "", "")
    stem = place.removesuffix(".npy")
    return [Path(f"{stem}.ids{suffix}{mark}{options}") for suffix in (".npy", ".txt") if stem != place]


def read_vectors(path: Path, key: str, name: str, kind: IdKind) -> Vectors:
    """Open the vectors of `user_id` or `item_id`, whose ids are of this kind, in the column `key` of the log.

    Raises:
        DataError: the file cannot be read, is of another type or shape, or has an id twice.
    """
    check_regular(path)
    with _wrap_errors(path):
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            shape, dtype, table, key = array.shape, array.dtype.name, _ids_beside(path), _RAW_ID
        else:
            with pq.ParquetFile(path, memory_map=True) as file:
                names, lists = file.schema_arrow.names, _lists(file)
                others = [other for other in names if other not in lists]
                if len(lists) != 1 or (key not in others and len(others) != 1):
                    raise DataError(
                        f"{path} has the columns {', '.join(names)}; write one of lists, the vectors, and one of ids, "
                        f"called {key!r} if there are others"
                    )
                element = str(file.schema_arrow.field(lists[0]).type.value_type)
                first = next(file.iter_batches(batch_size=1, columns=lists), None)
                width = 0 if first is None else pc.call_function("list_value_length", [first.column(0)])[0].as_py() or 0
                shape, dtype = (file.metadata.num_rows, width), _DTYPES.get(element, element)
            key = key if key in others else others[0]
            table = open_table(path, [key])
    if dtype not in VECTOR_DTYPES:
        raise DataError(f"{path} has vectors of {dtype}; convert them to {' or '.join(VECTOR_DTYPES)}")
    if len(shape) != 2 or not all(shape) or shape[1] > MAX_WIDTH:
        raise DataError(f"{path} has the shape {list(shape)}; write [n, d], n from 1 on and d in 1..{MAX_WIDTH}")
    ids = with_ids(table, key).read_good([raw_id(table, key, kind).alias(name)], id_checks(table, key, "text"))
    if len(ids) != shape[0]:
        raise DataError(f"{table.path} has {len(ids):,} ids, and {path} {shape[0]:,} vectors; write one id for each")
    ids = ids.with_row_index(_ROW).drop_nulls()  # null is text, which no event has if its ids are integers
    for repeated in ids.filter(pl.col(name).is_duplicated()).get_column(name):
        raise DataError(f"{table.path}: {name.removesuffix('_id')} {repeated} appears twice; keep one vector of each")
    keys, rows = keys_of(ids.get_column(name)), ids.get_column(_ROW).cast(pl.Int64).to_numpy()
    files = tuple(dict.fromkeys((path, table.path)))
    return Vectors(path=path, files=files, keys=keys, rows=rows, shape=shape, dtype=dtype)


def _lists(file: pq.ParquetFile) -> list[str]:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return [field.name for field in file.schema_arrow if any(is_kind(field.type) for is_kind in kinds)]


def _ids_beside(path: Path) -> Table:
    """Open the raw ids of a `.npy` file."""
    found = [candidate for candidate in ids_files(path) if candidate.exists()]
    if len(found) != 1:
        names = " or ".join(candidate.name for candidate in ids_files(path))
        raise DataError(f"{path} has {len(found)} files of ids beside it; write the id of each row to {names}")
    if found[0].suffix == ".txt":
        return open_table(found[0], [_RAW_ID], columns=[_RAW_ID], separator="\t")
    check_regular(found[0])
    ids = np.load(found[0], allow_pickle=False)
    if ids.ndim != 1 or ids.dtype.kind not in "iuU":
        raise DataError(f"{found[0]} has {ids.dtype} {list(ids.shape)}; write ids [n], integers or text")
    frame = pl.DataFrame({_RAW_ID: ids}).with_columns(pl.lit(None, dtype=pl.String).alias(FAULT))
    rows = Rows(frame, 1, lambda places: frame[places].get_column(_RAW_ID).cast(pl.String))
    of_ids: dict[str, Any] = {"dtypes": frame.schema, "blocks": lambda *_: [rows], "pieces": [WHOLE], "options": {}}
    return Table(path=found[0], num_rows=len(ids), has_types=True, **of_ids)


@contextlib.contextmanager
def _wrap_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # a malformed file can raise anything
        raise DataError(f"{path} cannot be read: {first_line(error)}; write .parquet or .npy again") from error


def write_vectors(
    vectors: Vectors, ids: NDArray[np.int64], size: int, path: Path, earlier: NDArray[Any] | None
) -> VectorFile:
    """Write the vectors of ids 0..size-1 to a file, and describe it.

    Args:
        vectors: in a file.
        ids: of their keys, 0 if the vocabulary has none: [m].
        size: of the vocabulary, with the id 0.
        path: the new file, which is to be [size, d].
        earlier: vectors of ids from 0 on, which those without a new one keep.

    Raises:
        DataError: a value is NaN or infinite, or lists differ in length.
    """
    width, by_row, missing = vectors.shape[1], np.zeros(vectors.shape[0], dtype=np.int64), -1  # but for the id 0
    by_row[vectors.rows] = ids
    with replacing(path) as new:
        written = np.lib.format.open_memmap(new, "w+", np.dtype(vectors.dtype), (size, width))
        with new.open("r+b") as file:  # the disk is full now or never: a store to a mapped file would kill the process
            getattr(os, "posix_fallocate", lambda *_: None)(file.fileno(), 0, new.stat().st_size)
        if earlier is not None:
            written[: len(earlier)] = earlier
        for row, block in vectors.blocks():
            if len(bad := np.flatnonzero(~np.isfinite(block).all(axis=1))):
                place = f"{vectors.path}: row {row + bad[0] + 1}"
                raise DataError(f"{place} has NaN or infinite values; correct it, or leave it out")
            of_block = by_row[row : row + len(block)]
            written[of_block[of_block > 0]] = block[of_block > 0]
        for begin in range(0, size, 1 << 16):
            missing += int(np.count_nonzero(~written[begin : begin + (1 << 16)].any(axis=1)))
        written.flush()
    return VectorFile(
        path=path.name, rows=size, sha256=sha256_of(path), width=width, dtype=vectors.dtype, missing=missing
    )
