"""A text file as blocks of whole lines.

The quick and the strict reading of a file both start from these blocks, so that they cannot disagree about where a line
begins or ends, which bytes belong to it, or what its number is.
"""

import contextlib
import gzip
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray
from polars.io.plugins import register_io_source

from evenrank.core.compiled import compiled
from evenrank.core.errors import DataError
from evenrank.core.files import check_regular

# Columns of the frames of lines; the prefix keeps them apart from the columns of files.
LINE, TEXT = "evenrank line", "evenrank text"
NUL_FAULT = "the line contains a NUL byte; the file is damaged there"

_BLOCK_BYTES = 16 << 20
_MAX_LINE_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"
_NEWLINE = ord("\n")
# Without the lookbehind, long runs of carriage returns would take quadratic time.
_LINE_END = re.compile(rb"(?<!\r)\r+\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Consecutive lines of a file."""

    first_line: int
    """Number of the first line; those of a file are counted from 1."""
    data: bytes
    """The lines in UTF-8, each with a final newline; carriage returns before it and bytes that are not UTF-8 are
    replaced."""

    def num_lines(self) -> int:
        """Return the number of lines."""
        return count_byte(np.frombuffer(self.data, dtype=np.uint8), _NEWLINE)

    def lines(self) -> pl.DataFrame:
        """Return the columns LINE (int64) and TEXT, one row per line."""
        text = self.data.decode().split("\n")[:-1]
        numbers = np.arange(self.first_line, self.first_line + len(text), dtype=np.int64)
        return pl.DataFrame({LINE: numbers, TEXT: text}, schema={LINE: pl.Int64, TEXT: pl.String})


def read_header(path: Path) -> str:
    """Return the first line of a file; empty if the file is.

    Raises:
        DataError: the line is too long.
        OSError, EOFError, zlib.error: the file cannot be read.

    """
    with _opened(path) as file:
        line = file.readline(_MAX_LINE_BYTES + 1)
    if len(line) > _MAX_LINE_BYTES:
        raise _too_long(path, 1)
    return line.decode(errors="replace").rstrip("\r\n")


def read_blocks(path: Path, *, has_header: bool) -> Iterator[Block]:
    """Yield all lines of a file after its header, which is the first line if `has_header`.

    Raises:
        DataError: a line is too long.
        OSError, EOFError, zlib.error: the file cannot be read.

    """
    with _opened(path) as file:
        number = 1
        if has_header:
            file.readline()
            number = 2
        while chunk := file.read(_BLOCK_BYTES):
            rest = b"" if chunk.endswith(b"\n") else file.readline(_MAX_LINE_BYTES)
            last_line = chunk.rfind(b"\n") + 1
            if len(chunk) - last_line + len(rest) > _MAX_LINE_BYTES:
                raise _too_long(path, number + chunk.count(b"\n"))
            ending = b"" if (rest or chunk).endswith(b"\n") else b"\n"
            lines = b"".join((chunk, rest, ending)) if rest or ending else chunk
            block = _block(number, lines)
            number += block.num_lines()
            yield block


@compiled
def count_byte(data: NDArray[np.uint8], byte: int) -> int:
    """Return how often a byte occurs in data, uint8 [n]; several times as fast as `bytes.count` where that is often."""
    count = 0
    for value in data:
        count += value == byte
    return count


def count_lines(path: Path) -> int:
    """Return the number of lines of a file after its header.

    Raises:
        DataError: a line is too long.
        OSError, EOFError, zlib.error: the file cannot be read.

    """
    return sum(block.num_lines() for block in read_blocks(path, has_header=True))


def scan_blocks(
    path: Path, *, has_header: bool, schema: Mapping[str, pl.DataType], parse: Callable[[Block], pl.DataFrame]
) -> pl.LazyFrame:
    """Return the rows of all blocks of a file, in file order, read lazily and in bounded memory.

    Args:
        path: of the file.
        has_header: whether the first line is left out.
        schema: of the frames that `parse` returns.
        parse: turns a block into rows.

    """

    def read(
        columns: list[str] | None, predicate: pl.Expr | None, num_rows: int | None, batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        for block in read_blocks(path, has_header=has_header):
            rows = parse(block)
            if predicate is not None:
                rows = rows.filter(predicate)
            if num_rows is not None:
                rows = rows.head(num_rows)
                num_rows -= len(rows)
            yield rows if columns is None else rows.select(columns)
            if num_rows == 0:
                return

    return register_io_source(read, schema=dict(schema))


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line of a file.

    Raises:
        DataError: a line is too long or contains a NUL byte.
        OSError, EOFError, zlib.error: the file cannot be read.

    """
    for block in read_blocks(path, has_header=False):
        for number, text in block.lines().iter_rows():
            if "\0" in text:
                raise DataError(f"{path}, line {number} ({text[:80]!r}): {NUL_FAULT}; unpack or download it again")
            yield number, text


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[gzip.GzipFile | BufferedReader]:
    """Open a file behind its byte order mark, if it has one."""
    check_regular(path)
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        if file.read(len(_BOM)) != _BOM:
            file.seek(0)
        yield file


def _block(first_line: int, lines: bytes) -> Block:
    if b"\r" in lines:
        lines = lines.replace(b"\r\n", b"\n")
        if b"\r\n" in lines:
            lines = _LINE_END.sub(b"\n", lines)
    if not lines.isascii():
        try:
            lines.decode()
        except UnicodeDecodeError:
            lines = lines.decode(errors="replace").encode()
    return Block(first_line=first_line, data=lines)


def _too_long(path: Path, line: int) -> DataError:
    return DataError(f"{path}, line {line} is longer than {_MAX_LINE_BYTES >> 20} MiB; check that it is a text file")
