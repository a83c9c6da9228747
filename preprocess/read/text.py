"""Text files, compressed or not -> blocks of whole lines -> their fields, exactly.

Numbers in plain digits are parsed by a compiled loop. PyArrow divides all other lines for which it does what the rules
here say, and Python the rest, one by one; it tells what is wrong with a line. Both of the former leave the GIL.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

from evenrank.core.compiled import compiled
from evenrank.core.errors import DataError
from evenrank.core.files import open_regular
from evenrank.preprocess.read.places import CODECS
from evenrank.preprocess.read.table import FAULT, OPEN_QUOTE, WHOLE, Piece, Types

_BOM = b"\xef\xbb\xbf"
_BLOCK_BYTES = 8 << 20
_FIRST_BYTES = 1 << 18  # of a file's first block, which are enough for whoever looks at its first rows alone
_SAMPLE_BYTES = 1 << 20
_PIECES = 64  # of a log, which keep all cores busy; each has a slice of each bucket, so more take longer to read again
_PIECE_BYTES, _MAX_PIECE_BYTES = 8 << 20, 64 << 20
_LINE_BYTES = 1 << 16  # of the end of a block's last line, for which there is room beside it
_MAX_LINE_BYTES = 64 << 20
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
# Without the lookbehind, long runs of carriage returns would take quadratic time.
_LINE_END = re.compile(rb"(?<!\r)\r+\n")
_REPLACEMENT = "\ufffd"  # of bytes that are not UTF-8


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Consecutive lines of a file."""

    first_line: int  # counted from 1, from the begin of the piece
    data: NDArray[np.uint8]  # UTF-8, in which each line ends with a newline that no carriage return precedes
    counts: NDArray[np.int64]  # how often each byte of ASCII occurs, and bytes that are not ASCII did: [256]

    @property
    def num_lines(self) -> int:
        """Number of lines."""
        return int(self.counts[_NEWLINE])

    def has(self, byte: bytes) -> bool:
        """Return whether a byte of ASCII occurs."""
        return bool(self.counts[ord(byte)])

    @property
    def is_ascii(self) -> bool:
        """Whether all of it was ASCII from the start."""
        return not self.counts[128:].any()

    def lines(self) -> pl.Series:
        """Return the text of all lines."""
        return pl.Series([self.data.tobytes().decode()]).str.split("\n").explode()[:-1]

    def texts(self, places: pl.Series) -> pl.Series:
        """Return the text of the lines with these indices."""
        return self.lines().gather(places)


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
    """Return about how many lines a file has, by its first ones."""
    with _open_text(path) as (file, text):
        num_lines = text.read(_SAMPLE_BYTES).count(b"\n")
        return num_lines * path.stat().st_size // max(1, file.tell())


def text_pieces(path: Path, log_bytes: int = 0) -> list[Piece]:
    """Divide a file into equal pieces, at any byte, the first of which has a line after the header, if there is one.

    A compressed file is one piece. `log_bytes` are those of all files of the log.
    """
    if path.suffix.lower() in CODECS:
        return [WHOLE]
    with open_regular(path) as file:
        header_end = len(file.readline(_MAX_LINE_BYTES))
    size, piece_bytes = path.stat().st_size, max(_PIECE_BYTES, min(log_bytes // _PIECES, _MAX_PIECE_BYTES))
    num_pieces = -(-size // piece_bytes)
    ends = [end for number in range(1, num_pieces) if (end := size * number // num_pieces) > header_end]
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
        number, begin, block_bytes = 1, 0, _BLOCK_BYTES if piece.begin else min(_FIRST_BYTES, _BLOCK_BYTES)
        if piece.begin:
            file.seek(piece.begin - 1)
            while (read := file.readline(_BLOCK_BYTES)) and not read.endswith(b"\n"):
                pass  # this line begins in the piece before, unless the piece begins with a line
            begin = file.tell()
        elif has_header:
            file.readline()
            number = 2
        while True:
            size = block_bytes if piece.end is None else min(block_bytes, max(0, piece.end - file.tell()))
            # Filled and searched without the GIL, for which all threads would wait.
            buffer = np.empty(size + _LINE_BYTES, dtype=np.uint8)
            num_bytes = file.readinto(buffer[:size].data)
            if num_bytes and buffer[num_bytes - 1] != _NEWLINE:
                tail = file.readline(_MAX_LINE_BYTES)
                before = buffer[:num_bytes]
                if num_bytes - _last_line(before) + len(tail) > _MAX_LINE_BYTES:
                    raise _too_long(path, _lines_before(path, begin) + number + int(np.sum(before == _NEWLINE)))
                end = np.frombuffer(tail if tail.endswith(b"\n") else tail + b"\n", dtype=np.uint8)
                if len(end) > _LINE_BYTES:
                    buffer = np.concatenate([before, end])
                num_bytes += len(end)
                buffer[num_bytes - len(end) : num_bytes] = end
            is_first = number == 1 and not piece.begin
            data = buffer[len(_BOM) * (is_first and buffer[: len(_BOM)].tobytes() == _BOM) : num_bytes]
            if not len(data):
                return
            counts = _count_bytes(data)
            if counts[_RETURN]:
                text = data.tobytes().replace(b"\r\n", b"\n")
                data = np.frombuffer(bytearray(_LINE_END.sub(b"\n", text) if b"\r\n" in text else text), dtype=np.uint8)
                counts = _count_bytes(data)
            if counts[128:].any():
                text = data.tobytes().decode(errors="replace").encode()
                data = np.frombuffer(bytearray(text), dtype=np.uint8)
            yield Block(first_line=number, data=data, counts=counts)
            number += int(counts[_NEWLINE])
            block_bytes = min(8 * block_bytes, _BLOCK_BYTES)


def _lines_before(path: Path, end: int) -> int:
    with path.open("rb") as file:
        return sum(file.read(min(_BLOCK_BYTES, end - at)).count(b"\n") for at in range(0, end, _BLOCK_BYTES))


def _too_long(path: Path, line: int) -> DataError:
    return DataError(f"{path}, line {line} is longer than {_MAX_LINE_BYTES >> 20} MiB; check that it is a text file")


_NEWLINE, _MINUS, _POINT, _ZERO, _RETURN = b"\n-.0\r"


@compiled
def _count_bytes(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return how often each byte occurs: [256]."""
    counts = np.zeros(256, dtype=np.int64)
    for position in range(len(data)):
        counts[data[position]] += 1
    return counts


@compiled
def _last_line(data: NDArray[np.uint8]) -> int:
    """Return where the last line begins."""
    begin = len(data)
    while begin > 0 and data[begin - 1] != _NEWLINE:
        begin -= 1
    return begin


# Kinds of a column: integers have neither leading zeros nor a -0, decimals have no sign.
SKIPPED, INTEGER, DECIMAL = 0, 1, 2


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


_QUOTED = '"[^"]*(?:""[^"]*)*'  # a field without its last quote
_STAND_IN = b"\x1f"  # for separators of several characters, which PyArrow does not know


def divide(line: str, separator: str) -> tuple[list[str], str | None]:
    """Return the fields of a line, which may be quoted if the separator is one character; or why there are none."""
    if len(separator) > 1 or '"' not in line:
        return line.split(separator), None
    mark, fields, end = re.escape(separator), list[str](), -1
    field = re.compile(rf'({_QUOTED})"(?={mark}|\Z)|(?!")[^{mark}]*')
    while end < len(line):
        if (found := field.match(line, end + 1)) is None:
            is_open = re.compile(rf"{_QUOTED}\Z").match(line, end + 1)
            where = "at a separator or at the end of the line"
            return [], OPEN_QUOTE if is_open else f"a quoted field does not end {where}; Parquet can store any text"
        fields.append(found[0] if found[1] is None else found[1][1:].replace('""', '"'))
        end = found.end()
    return fields, None


def parse_delimited(
    block: Block, numbers: Types, *, separator: str, columns: Sequence[str], names: Sequence[str]
) -> pl.DataFrame:
    """Divide lines into fields, which may be quoted if the separator is one character.

    Of all `columns`, those with `names` are returned, and FAULT. They are Int64 or Float64 if all of them are in
    `numbers` and plain digits, without quotes, else text.
    """
    if numbers.keys() >= set(names) and (len(separator) > 1 or not block.has(b'"')):
        kinds = {name: DECIMAL if numbers[name] == pl.Float64 else INTEGER for name in names}
        integers = np.empty((len(kinds), block.num_lines), dtype=np.int64)
        decimals = integers.view(np.float64)  # each row is of one type
        kind_of_column = np.array([kinds.get(name, SKIPPED) for name in columns], dtype=np.int8)
        if parse_numbers(block.data, ord(separator[0]), len(separator), kind_of_column, integers, decimals):
            values = zip([name for name in columns if name in kinds], integers, decimals, strict=True)
            rows = {name: decimal if kinds[name] == DECIMAL else integer for name, integer, decimal in values}
            no_fault = pl.Series(dtype=pl.String).extend_constant(None, block.num_lines)
            return pl.DataFrame({**rows, FAULT: no_fault})
    places = [columns.index(name) for name in names]
    is_plain, frame = _read_plain(block, separator, len(columns), places)
    frame.columns = names
    if not is_plain.all():
        odd = [_read_line(line, separator, len(columns), places) for line in block.lines().filter(~is_plain)]
        schema = dict.fromkeys((*names, FAULT), pl.String())
        others = pl.DataFrame(odd, schema=schema, orient="row")
        order = np.argsort(np.concatenate([np.flatnonzero(is_plain), np.flatnonzero(~is_plain)]))
        frame = pl.concat([frame, others], how="diagonal")[order]
    return with_encoding_faults(block, names, frame)


def _read_plain(
    block: Block, separator: str, num_columns: int, places: Sequence[int]
) -> tuple[NDArray[np.bool_], pl.DataFrame]:
    """Return which lines a library divides as `divide` does, into so many fields, and of those the ones at `places`."""
    data, byte, is_plain = block.data, separator.encode(), np.ones(block.num_lines, dtype=np.bool_)
    special = [mark for mark in (b"\0", b"\r", _STAND_IN if len(byte) > 1 else b'"') if block.has(mark)]
    if special:
        ends = np.flatnonzero(data == _NEWLINE)
        for mark in special:
            at = np.flatnonzero(data == ord(mark))
            if mark == b'"':  # which are in pairs, of which the first follows a separator and the second precedes one
                num_before = np.searchsorted(at, ends)
                counts = np.diff(num_before, prepend=0)
                is_first = (np.arange(len(at)) - np.repeat(num_before - counts, counts)) & 1 == 0
                # Or they are doubled. Before the first byte is the last one, the end of a line, too.
                outer = data[np.where(is_first, at - 1, at + 1)]
                is_plain[counts % 2 == 1] = False
                at = at[(outer != _NEWLINE) & (outer != ord(byte)) & (outer != ord(mark))]
            is_plain[np.searchsorted(ends, at)] = False
        if not is_plain.all():
            data = data[np.repeat(is_plain, np.diff(ends, prepend=-1))]
    lines: Any = data
    if len(byte) > 1:
        lines, byte = data.tobytes().replace(byte, _STAND_IN), _STAND_IN
    if data[: len(_BOM)].tobytes() == _BOM:
        lines = _BOM + bytes(lines)  # because PyArrow removes one
    ragged = list[int]()  # numbers of lines

    def skip(row: csv.InvalidRow) -> str:
        ragged.append(row.number - 1)
        return "skip"

    names = [str(place) for place in range(num_columns)]
    types = {names[place]: pa.large_string() for place in places}
    if len(lines):
        quote_char = '"' if len(separator) == 1 else False
        divided = csv.read_csv(
            pa.BufferReader(pa.py_buffer(lines)),
            # In one block, on this thread.
            csv.ReadOptions(use_threads=False, block_size=len(lines) + 1, column_names=names),
            csv.ParseOptions(delimiter=byte, quote_char=quote_char, ignore_empty_lines=False, invalid_row_handler=skip),
            csv.ConvertOptions(check_utf8=False, include_columns=[*types], column_types=types),
        )
        frame = pl.DataFrame(divided)
    else:
        frame = pl.DataFrame(schema=dict.fromkeys(types, pl.String()))
    is_plain[np.flatnonzero(is_plain)[ragged]] = False
    if (is_blank := frame.select(pl.all_horizontal(pl.all() == "")).to_series()).any():  # perhaps an empty line
        is_plain[np.flatnonzero(is_plain)[is_blank]] = False
        frame = frame.filter(~is_blank)
    return is_plain, frame


def _read_line(line: str, separator: str, num_columns: int, places: Sequence[int]) -> Sequence[str | None]:
    """Return the fields at `places` of a line, and why there are none."""
    fields, fault = divide(line, separator)
    if not line:
        fault = "the line is empty"
    elif "\0" in line:
        fault = "the line contains a NUL byte; the file is damaged there"
    elif fault is None and len(fields) != num_columns:
        fault = f"expected {num_columns} fields, got {len(fields)}"
    return [*((fields[place] for place in places) if fault is None else [None] * len(places)), fault]


def with_encoding_faults(block: Block, names: Sequence[str], frame: pl.DataFrame) -> pl.DataFrame:
    """Return rows with FAULT where needed text is not UTF-8; such bytes would merge different ids."""
    fault = pl.col(FAULT) if FAULT in frame.columns else pl.lit(None, dtype=pl.String)
    if not block.is_ascii and _REPLACEMENT.encode() in block.data.tobytes():
        is_damaged = pl.any_horizontal(pl.col(name).str.contains(_REPLACEMENT, literal=True) for name in names)
        reason = pl.lit("the line is not UTF-8; convert the file, for example with iconv")
        fault = pl.coalesce(fault, pl.when(is_damaged).then(reason))
    return frame.with_columns(fault.alias(FAULT))
