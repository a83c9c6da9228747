"""Text files, compressed or not -> blocks of whole lines -> arrays: numbers in plain digits or any fields as text.

The compiled loops run without the GIL.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import DataError
from evenrank.core.files import open_regular
from evenrank.preprocess.read.places import CODECS
from evenrank.preprocess.read.table import WHOLE, Piece

_BOM = b"\xef\xbb\xbf"
_BLOCK_BYTES = 16 << 20
_PIECE_BYTES = 32 << 20
_MAX_LINE_BYTES = 64 << 20
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
# Without the lookbehind, long runs of carriage returns would take quadratic time.
_LINE_END = re.compile(rb"(?<!\r)\r+\n")
REPLACEMENT = "\ufffd"  # of bytes that are not UTF-8


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Consecutive lines of a file."""

    first_line: int  # counted from 1, from the begin of the piece
    num_lines: int
    data: bytearray  # UTF-8, in which each line ends with a newline that no carriage return precedes

    def lines(self) -> list[str]:
        """Return the text of all lines."""
        return self.data.decode().split("\n")[:-1]

    def texts(self, places: pl.Series) -> list[str]:
        """Return the text of the lines with these indices."""
        lines = self.lines()
        return [lines[place] for place in places]


@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[tuple[BufferedReader, BufferedReader]]:
    """Open a file: the bytes on disk, and its text."""
    with open_regular(path) as file:
        if (codec := CODECS.get(path.suffix.lower())) is None:
            yield file, file
        else:
            with pa.CompressedInputStream(file, codec) as stream, BufferedReader(cast(Any, stream)) as text:
                yield file, text


def estimate_lines(path: Path) -> int:
    """Return about how many lines a file has, by its first block."""
    with _open_text(path) as (file, text):
        num_lines = text.read(_BLOCK_BYTES).count(b"\n")
        return num_lines * path.stat().st_size // max(1, file.tell())


def text_pieces(path: Path) -> list[Piece]:
    """Divide a file into pieces, at any byte, the first of which has a line after the header, if there is one.

    A compressed file is one piece.
    """
    if path.suffix.lower() in CODECS:
        return [WHOLE]
    with open_regular(path) as file:
        first_end = max(_PIECE_BYTES, len(file.readline(_MAX_LINE_BYTES)) + 1)
    ends = range(first_end, path.stat().st_size, _PIECE_BYTES)
    return [*itertools.starmap(Piece, itertools.pairwise((0, *ends))), Piece(ends[-1] if ends else 0, None)]


def read_first_line(path: Path) -> str:
    """Return the first line of a file; raise a DataError if there is none, or it is not UTF-8 throughout."""
    with _open_text(path) as (_, file):
        line = file.readline(_MAX_LINE_BYTES + 1)
    if not line:
        raise DataError(f"{path} is empty; create it again")
    # Without a byte order mark, every second byte of Latin text in UTF-16 is zero.
    if line.startswith(_UTF16_BOMS) or any(all(line[1 - i :: 2]) and not any(line[i::2]) for i in (0, 1) if line[3:]):
        raise DataError(
            f"{path} is in UTF-16 or UTF-32; convert it to UTF-8, for example with iconv -f UTF-16 -t UTF-8"
        )
    if len(line) > _MAX_LINE_BYTES:
        raise _too_long(path, 1)
    return line.removeprefix(_BOM).decode(errors="replace").rstrip("\r\n")


def read_blocks(path: Path, piece: Piece = WHOLE, *, has_header: bool) -> Iterator[Block]:
    """Yield the lines of a file after its header, without the byte order mark. Bytes that are not UTF-8 become U+FFFD.

    Of a piece, these are the lines that begin in it.

    Raises:
        OSError: the file cannot be read, or is not compressed as its suffix says.
        DataError: a line is too long.
    """
    with _open_text(path) as (_, file):
        number, begin = 1, 0
        if piece.begin:
            file.seek(piece.begin - 1)
            while (read := file.readline(_BLOCK_BYTES)) and not read.endswith(b"\n"):
                pass  # this line begins in the piece before, unless the piece begins with a line
            begin = file.tell()
        elif has_header:
            file.readline()
            number = 2
        while True:
            size = _BLOCK_BYTES if piece.end is None else min(_BLOCK_BYTES, max(0, piece.end - file.tell()))
            data = bytearray(file.read(size))  # without touching more memory than a small file needs
            if number == 1 and not piece.begin and data.startswith(_BOM):
                del data[: len(_BOM)]
            if not data:
                return
            last_line = data.rfind(b"\n") + 1
            if last_line < len(data):
                data += file.readline(_MAX_LINE_BYTES)
                if len(data) - last_line > _MAX_LINE_BYTES:
                    raise _too_long(path, _lines_before(path, begin) + number + data.count(b"\n", 0, last_line))
            if not data.endswith(b"\n"):
                data += b"\n"
            if b"\r" in data:
                data = data.replace(b"\r\n", b"\n")
                if b"\r\n" in data:
                    data = bytearray(_LINE_END.sub(b"\n", data))
            if not data.isascii():
                data = bytearray(data.decode(errors="replace"), "utf-8")
            num_lines = int(np.count_nonzero(np.frombuffer(data, dtype=np.uint8) == _NEWLINE))
            yield Block(first_line=number, num_lines=num_lines, data=data)
            number += num_lines


def _lines_before(path: Path, end: int) -> int:
    with path.open("rb") as file:
        return sum(file.read(min(_BLOCK_BYTES, end - at)).count(b"\n") for at in range(0, end, _BLOCK_BYTES))


def _too_long(path: Path, line: int) -> DataError:
    return DataError(f"{path}, line {line} is longer than {_MAX_LINE_BYTES >> 20} MiB; check that it is a text file")


# Kinds of a column: integers have neither leading zeros nor a -0, decimals have no sign.
SKIPPED, INTEGER, DECIMAL = 0, 1, 2
EMPTY, NUL, UNQUOTED, OPEN = 0, -1, -2, -3  # in place of the number of fields of a line
_NEWLINE, _MINUS, _POINT, _ZERO, _QUOTE = b'\n-.0"'


@compiled
def parse_numbers(
    data: NDArray[np.uint8],
    separator: int,
    width: int,
    kinds: NDArray[np.int8],
    integers: NDArray[np.int64],
    decimals: NDArray[np.float64],
) -> bool:
    """Parse lines of numbers.

    Args:
        data: whole lines.
        separator: byte between fields.
        width: how often it is repeated.
        kinds: SKIPPED, INTEGER or DECIMAL for each column of a line.
        integers, decimals: [columns, lines]; column by column, without those skipped, one of the two is filled.

    Returns:
        False if a line has another form, though it may be well formed; the results are undefined then.
    """
    position, one = np.uint64(0), np.uint64(1)  # unsigned, because an index that may be negative takes twice as long
    line = 0
    while position < len(data):
        row = 0
        for column in range(len(kinds)):
            for _ in range(width if column > 0 else 0):
                if data[position] != separator:
                    return False
                position += one
            if kinds[column] == SKIPPED:
                while data[position] != separator and data[position] != _NEWLINE:
                    if data[position] == 0:
                        return False
                    position += one
                continue
            is_integer = kinds[column] != DECIMAL
            is_negative = is_integer and data[position] == _MINUS
            position += np.uint64(is_negative)
            begin = position
            value, scale = np.int64(0), 1.0  # a power of ten
            while 0 <= np.int64(data[position]) - _ZERO <= 9:
                value = 10 * value + np.int64(data[position]) - _ZERO
                position += one
            num_digits = position - begin
            if not is_integer and data[position] == _POINT:
                position += one
                while 0 <= np.int64(data[position]) - _ZERO <= 9:
                    value = 10 * value + np.int64(data[position]) - _ZERO
                    scale *= 10.0
                    num_digits += one
                    position += one
            # Integers below 10^19 fit into a uint64, and become negative if they do not fit into an int64. Below 10^15,
            # both operands of the division are exact.
            if num_digits == 0 or num_digits > (19 if is_integer else 15) or value < 0:
                return False
            if is_integer and data[begin] == _ZERO and (is_negative or num_digits > 1):
                return False
            if is_integer:
                integers[row, line] = -value if is_negative else value
            else:
                decimals[row, line] = value / scale
            row += 1
        if data[position] != _NEWLINE:
            return False
        position += one
        line += 1
    return True


@compiled
def split_fields(
    data: NDArray[np.uint8],
    separator: int,
    width: int,
    outputs: NDArray[np.int64],
    texts: NDArray[np.uint8],
    ends: NDArray[np.int64],
    num_fields: NDArray[np.int64],
) -> None:
    """Divide lines into fields, which may be enclosed in quotes if the separator is one byte wide.

    Args:
        data: whole lines.
        separator: byte between fields.
        width: how often it is repeated.
        outputs: for each column of a line, the row of `texts` to which its fields are copied, or -1.
        texts: [outputs, bytes]: filled with the fields of all lines, without quotes.
        ends: [outputs, lines + 1]: zeros, filled with the ends of fields in `texts`; those of bad lines are empty.
        num_fields: [lines]: filled with the number of fields, or EMPTY, NUL, or where quotes do not end
            well, UNQUOTED; OPEN if the line ends before them.
    """
    position, one = np.uint64(0), np.uint64(1)
    lengths = np.zeros(len(texts), dtype=np.uint64)
    for line in range(len(num_fields)):
        count, num_nuls, is_divided = 0, 0, data[position] == _NEWLINE
        num_fields[line] = EMPTY if is_divided else UNQUOTED
        while not is_divided:
            output = outputs[count] if count < len(outputs) else -1
            is_quoted = width == 1 and data[position] == _QUOTE
            position += np.uint64(is_quoted)
            while data[position] != _NEWLINE:
                if is_quoted and data[position] == _QUOTE:
                    if data[position + one] != _QUOTE:
                        break
                    position += one
                elif not is_quoted and _is_separator(data, position, separator, width):
                    break
                num_nuls += data[position] == 0
                if output >= 0:
                    texts[output, lengths[output]] = data[position]
                    lengths[output] += one
                position += one
            count += 1
            if is_quoted:
                if data[position] == _NEWLINE:
                    num_fields[line] = OPEN
                    break
                position += one
            if data[position] == _NEWLINE:
                num_fields[line] = count
                is_divided = True
            elif _is_separator(data, position, separator, width):
                position += np.uint64(width)
            else:
                break
        while data[position] != _NEWLINE:
            num_nuls += data[position] == 0
            position += one
        if num_nuls:
            num_fields[line] = NUL
        for output in range(len(texts)):
            if num_fields[line] != len(outputs):
                lengths[output] = np.uint64(ends[output, line])
            ends[output, line + 1] = np.int64(lengths[output])
        position += one


@compiled
def _is_separator(data: NDArray[np.uint8], position: np.uint64, separator: int, width: int) -> bool:
    for _ in range(width):
        if data[position] != separator:
            return False
        position += np.uint64(1)
    return True
