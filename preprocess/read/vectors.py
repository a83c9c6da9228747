"""Dense vectors of users or items: files in any order -> a file by id.

Ids and shape are read first. Then the vectors are checked in the order of the file and, from Parquet, copied to a flat
one, and those of each id gathered from the mapped file: in memory are the ids and a few blocks.
"""

import contextlib
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
from evenrank.datasets.schema import MAX_WIDTH, VECTOR_DTYPES, IdKind, VectorFile, sha256_of
from evenrank.preprocess.read.keys import keys_of
from evenrank.preprocess.read.table import FAULT, WHOLE, Rows, Table
from evenrank.preprocess.read.tabular import open_table
from evenrank.preprocess.read.values import CASTS, id_checks, raw_id, with_ids

_BLOCK_BYTES = 1 << 25
_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}  # of Arrow, by those of NumPy
_RAW_ID, _ROW = "id", "evenrank row"


@dataclass(frozen=True, kw_only=True, slots=True)
class Vectors:
    """The vectors [n, d] of a file, whose ids are known and distinct."""

    path: Path
    files: tuple[Path, ...]  # which it is read from
    keys: NDArray[np.int64]  # of the ids that a log can have: [m]
    rows: NDArray[np.int64]  # in the file, of the same: [m]
    shape: tuple[int, int]
    dtype: str
    mapped: NDArray[Any] | None  # all, if the file is a flat one: [n, d]

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield the vectors of some rows at a time, in their order: [*, d]; raises a DataError if there are other."""
        at_once, width = self.rows_at_once, self.shape[1]
        if self.mapped is not None:
            yield from (self.mapped[begin : begin + at_once] for begin in range(0, len(self.mapped), at_once))
            return
        with _wrap_errors(self.path), pq.ParquetFile(self.path) as file:
            names = [field.name for field in file.schema_arrow if _element(field) is not None]
            for number, batch in enumerate(file.iter_batches(batch_size=at_once, columns=names)):
                lists, first_row = batch.column(0), number * at_once
                lengths = pc.list_value_length(lists).fill_null(0).to_numpy()
                if len(odd := np.flatnonzero(lengths != width)):
                    raise DataError(
                        f"{self.path}: row {first_row + odd[0] + 1} has {lengths[odd[0]]} values, and the first row "
                        f"{width}; leave rows without a vector out"
                    )
                # A null among the values becomes NaN.
                yield lists.flatten().to_numpy(zero_copy_only=False).reshape(-1, width).astype(self.dtype, copy=False)

    @property
    def rows_at_once(self) -> int:
        """Vectors of a block."""
        return max(1, _BLOCK_BYTES // (self.shape[1] * np.dtype(self.dtype).itemsize))


def ids_files(path: Path) -> list[Path]:
    """Return the paths of which one must have the ids of vectors in a `.npy` file."""
    return [path.with_suffix(suffix) for suffix in (".ids.npy", ".ids.txt")] if path.suffix == ".npy" else []


def read_vectors(path: Path, key: str, name: str, kind: IdKind) -> Vectors:
    """Open the vectors of `user_id` or `item_id`, whose ids are of this kind, in the column `key` of the log.

    Raises:
        DataError: the file cannot be read, is of another type or shape, or has an id twice.
    """
    check_regular(path)
    files: tuple[Path, ...] = (path,)
    mapped: NDArray[Any] | None = None
    with _wrap_errors(path):
        if path.suffix == ".npy":
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
            shape, dtype, table, key = mapped.shape, mapped.dtype.name, _ids_beside(path), _RAW_ID
            files = (path, table.path)
        elif path.suffix == ".parquet":
            shape, dtype, table, key = _describe_parquet(path, key)
        else:
            raise DataError(f"{path} is neither .parquet nor .npy; write the vectors to one of them")
    if dtype not in VECTOR_DTYPES:
        raise DataError(f"{path} has vectors of {dtype}; convert them to {' or '.join(VECTOR_DTYPES)}")
    if len(shape) != 2 or not all(shape) or shape[1] > MAX_WIDTH:
        reason = f"{path} has the shape {list(shape)}, which must be [ids, width], both at least 1"
        raise DataError(f"{reason}, and width at most {MAX_WIDTH:,}; write one row per id")
    ids = with_ids(table, key).read_good([raw_id(table, key, kind).alias(name)], id_checks(table, key, "text"))
    if len(ids) != shape[0]:
        raise DataError(f"{table.path} has {len(ids):,} ids, and {path} {shape[0]:,} vectors; write one id per vector")
    ids = ids.with_row_index(_ROW).drop_nulls()  # of text, which no event has if its ids are integers
    for repeated in ids.filter(pl.col(name).is_duplicated()).get_column(name):
        raise DataError(f"{table.path}: {name.removesuffix('_id')} {repeated} appears twice; keep one vector of each")
    keys, rows = keys_of(ids.get_column(name)), ids.get_column(_ROW).cast(pl.Int64).to_numpy()
    return Vectors(path=path, files=files, keys=keys, rows=rows, shape=shape, dtype=dtype, mapped=mapped)


def _ids_beside(path: Path) -> Table:
    """Open the raw ids beside a `.npy` file: text or integers [n], or lines of text."""
    candidates = ids_files(path)
    found = [candidate for candidate in candidates if candidate.exists()]
    if len(found) != 1:
        names = " or ".join(candidate.name for candidate in candidates)
        raise DataError(f"{path} has {len(found)} files of ids beside it; write those of its rows to {names}")
    if found[0].suffix == ".txt":
        return open_table(found[0], [_RAW_ID], columns=[_RAW_ID], separator="\t")
    check_regular(found[0])
    with _wrap_errors(found[0]):
        ids = np.load(found[0], allow_pickle=False)
    if ids.ndim != 1 or ids.dtype.kind not in "iuU":
        raise DataError(f"{found[0]} has ids {list(ids.shape)} of {ids.dtype}; write one dimension of integers or text")
    return _table_of(found[0], pl.Series(_RAW_ID, ids))


def _describe_parquet(path: Path, key: str) -> tuple[tuple[int, int], str, Table, str]:
    """Return shape and type of the vectors of a file, its ids, and their column."""
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        elements = {field.name: _element(field) for field in schema}
        others = [name for name, element in elements.items() if element is None]
        lists = [name for name in elements if name not in others]
        ids = [key] if key in others else others
        if len(lists) != 1 or len(ids) != 1:
            raise DataError(
                f"{path} has the columns {', '.join(schema.names)}; write one of vectors, a list each, and one of ids, "
                f"called {key!r} if there are more"
            )
        width = 0
        for batch in file.iter_batches(batch_size=1, columns=lists):
            width = pc.list_value_length(batch.column(0))[0].as_py() or 0
            break
        table = _table_of(path, pl.Series(ids[0], pl.from_arrow(file.read(columns=ids).column(0))))
        return (file.metadata.num_rows, width), _NAMES.get(kind := str(elements[lists[0]]), kind), table, ids[0]


def _element(field: pa.Field) -> pa.DataType | None:
    """Return the type of the elements of a column of lists; None: it has none."""
    kind = field.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return kind.value_type if is_list else None


def _table_of(path: Path, ids: pl.Series) -> Table:
    """Return a table of ids whose types the file knows."""
    frame = pl.DataFrame(ids).cast(CASTS).with_columns(pl.lit(None, dtype=pl.String).alias(FAULT))
    rows = Rows(frame, 1, lambda places: frame[places].get_column(ids.name).cast(pl.String))
    dtypes = {ids.name: frame.schema[ids.name]}
    return Table(
        path=path,
        num_rows=len(ids),
        dtypes=dtypes,
        blocks=lambda *_: [rows],
        pieces=[WHOLE],
        has_types=True,
        options={},
    )


@contextlib.contextmanager
def _wrap_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}; write it again") from error


def write_vectors(
    vectors: Vectors, ids: NDArray[np.int64], size: int, path: Path, work: Path, earlier: NDArray[Any] | None = None
) -> VectorFile:
    """Write the vectors of the ids 0, 1, ..., size - 1 to a file, and describe it.

    Args:
        vectors: of raw ids.
        ids: of the same, 0 if the vocabulary has no such one: [m].
        size: of the vocabulary, with the id 0.
        path: the new file: [size, d].
        work: a folder for what is deleted at the end.
        earlier: vectors of ids 0, 1, ... that keep theirs where the file has none, of the same d and type.

    Raises:
        DataError: a value is NaN or infinite, or lists differ in length.
    """
    width, places = vectors.shape[1], np.full(size, -1, dtype=np.int64)
    places[ids] = vectors.rows
    places[0] = -1
    copy, missing = work / path.name, -1  # without the id 0
    with contextlib.nullcontext() if vectors.mapped is not None else copy.open("wb") as file:
        for number, block in enumerate(vectors.blocks()):
            if not np.isfinite(block).all():
                row = number * vectors.rows_at_once + np.flatnonzero(~np.isfinite(block).all(axis=1))[0] + 1
                raise DataError(f"{vectors.path}: row {row} has NaN or infinite values; correct it, or leave it out")
            if file is not None:
                file.write(np.ascontiguousarray(block).data)
    mapped = np.memmap(copy, vectors.dtype, mode="r", shape=vectors.shape) if vectors.mapped is None else vectors.mapped
    with replacing(path) as new, new.open("xb") as written:
        header = {"descr": np.dtype(vectors.dtype).str, "fortran_order": False, "shape": (size, width)}
        np.lib.format.write_array_header_1_0(written, header)
        for begin in range(0, size, vectors.rows_at_once):
            rows = places[begin : begin + vectors.rows_at_once]
            block = np.zeros((len(rows), width), dtype=vectors.dtype)
            if earlier is not None:
                kept = earlier[begin : begin + len(rows)]
                block[: len(kept)] = kept
            block[rows >= 0] = mapped[rows[rows >= 0]]
            missing += int(np.count_nonzero(~block.any(axis=1)))
            written.write(block.data)
    if file is not None:
        copy.unlink()
    return VectorFile(
        path=path.name, rows=size, sha256=sha256_of(path), width=width, dtype=vectors.dtype, missing=missing
    )
