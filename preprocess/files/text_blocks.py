"""Text files, compressed or not, in blocks of whole lines."""

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

from evenrank.core.errors import DataError
from evenrank.core.files import open_regular
from evenrank.preprocess.files.locate import CODECS
from evenrank.preprocess.files.table import WHOLE, Piece

_BOM = b"\xef\xbb\xbf"
_BLOCK_BYTES = 16 << 20
_PIECE_BYTES = 32 << 20
_MAX_LINE_BYTES = 64 << 20
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
# Without the lookbehind, long runs of carriage returns would take quadratic time.
_LINE_END = re.compile(rb"(?<!\r)\r+\n")
_NEWLINE = ord("\n")
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
