"""Text files, compressed or not, in blocks of whole lines."""

import contextlib
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

_BOM = b"\xef\xbb\xbf"
_BLOCK_BYTES = 16 << 20
_MAX_LINE_BYTES = 64 << 20
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
# Without the lookbehind, long runs of carriage returns would take quadratic time.
_LINE_END = re.compile(rb"(?<!\r)\r+\n")
_NEWLINE = ord("\n")
REPLACEMENT = "\ufffd"  # of bytes that are not UTF-8


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Consecutive lines of a file."""

    first_line: int  # counted from 1
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


def read_blocks(path: Path, *, has_header: bool) -> Iterator[Block]:
    """Yield all lines of a file after its header, without the byte order mark. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        OSError: the file cannot be read, or is not compressed as its suffix says.
        DataError: a line is too long.
    """
    with _open_text(path) as (_, file):
        number = 1
        if has_header:
            file.readline()
            number = 2
        while True:
            data = bytearray(_BLOCK_BYTES)  # which grows in place
            del data[file.readinto(data) :]
            if number == 1 and data.startswith(_BOM):
                del data[: len(_BOM)]
            if not data:
                return
            last_line = data.rfind(b"\n") + 1
            if last_line < len(data):
                data += file.readline(_MAX_LINE_BYTES)
                if len(data) - last_line > _MAX_LINE_BYTES:
                    raise _too_long(path, number + data.count(b"\n", 0, last_line))
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


def _too_long(path: Path, line: int) -> DataError:
    return DataError(f"{path}, line {line} is longer than {_MAX_LINE_BYTES >> 20} MiB; check that it is a text file")
