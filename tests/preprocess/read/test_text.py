from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.preprocess.read import text as text_files
from evenrank.preprocess.read.table import WHOLE
from evenrank.preprocess.read.tabular import open_table
from evenrank.preprocess.read.text import DECIMAL, INTEGER, SKIPPED, parse_numbers, read_blocks, text_pieces

TEXTS = st.lists(st.sampled_from(["", "a,b", "é,1", "a longer line than others"]), max_size=12)


@given(TEXTS, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans(), st.integers(3, 40))
def test_every_line_is_in_one_piece(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, is_ended: bool, has_header: bool, size: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "log.csv"
    path.write_bytes(f"\ufeff{end.join(lines)}{end * is_ended}".encode())
    with pytest.MonkeyPatch.context() as patch:
        for name, num_bytes in (("_PIECE_BYTES", size), ("_BLOCK_BYTES", 16), ("_LINE_BYTES", 4)):
            patch.setattr(text_files, name, num_bytes)
        pieces = text_pieces(path)
        read = [[*read_blocks(path, piece, has_header=has_header)] for piece in pieces]
    whole = [line for block in read_blocks(path, WHOLE, has_header=has_header) for line in block.lines()]
    assert [line for blocks in read for block in blocks for line in block.lines()] == whole
    assert [piece.end for piece in pieces[:-1]] == [piece.begin for piece in pieces[1:]]


def test_pieces_are_equal_and_as_many_as_a_log_is_to_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_PIECE_BYTES", 10)
    monkeypatch.setattr(text_files, "_MAX_PIECE_BYTES", 50)
    (path := tmp_path / "log.csv").write_bytes(b"1,2\n" * 100)
    for log_bytes, num_pieces in ((0, 40), (400, 40), (64 * 25, 16), (64 * 400, 8)):
        pieces = text_pieces(path, log_bytes)
        assert [piece.begin for piece in pieces] == [400 * number // num_pieces for number in range(num_pieces)]
    assert text_pieces(path.rename(tmp_path / "log.csv.gz")) == [WHOLE]


def test_a_line_that_is_too_long_has_its_number_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_PIECE_BYTES", "_BLOCK_BYTES", "_MAX_LINE_BYTES"):
        monkeypatch.setattr(text_files, name, 10)
    path = tmp_path / "log.csv"
    path.write_text("a,b\n1,2\n3,4\n5,6\n" + "7" * 40)
    blocks = chain.from_iterable(read_blocks(path, piece, has_header=True) for piece in text_pieces(path))
    with pytest.raises(DataError, match=r"log\.csv, line 5 is longer than"):
        list(blocks)
    path.write_bytes(bytes(99))
    with pytest.raises(DataError, match=r"log\.csv, line 1 is longer than 0 MiB; check that it is a text file$"):
        open_table(path, ("a", "b"))


def _parse(text: bytes, separator: bytes = b",") -> tuple[bool, list[list[int]], list[float]]:
    kinds = np.array([INTEGER, SKIPPED, DECIMAL, INTEGER], dtype=np.int8)
    integers = np.zeros((3, text.count(b"\n")), dtype=np.int64)
    decimals = np.zeros_like(integers, dtype=np.float64)
    data = np.frombuffer(text, dtype=np.uint8)
    is_parsed = parse_numbers(data, separator[0], len(separator), kinds, integers, decimals)
    return is_parsed, integers[[0, 2]].T.tolist(), decimals[1].tolist()


# Integer, skipped, decimal, integer.
_OTHERS = b"|1,x,2|1,x,2,3,4|1,x,2,|+1,x,2,3|1,x,-2,3|1,x,1.2.3,3|1,x,.,3|1,x,2e1,3|9223372036854775808,x,2,3|"
_OTHERS += b"20000000000000000000,x,2,3|1,x,1234567890.123456,3|1,\0,2,3|1,x,2,3 |"
_OTHERS += b'"1",x,2,3|--1,x,2,3|1,x,2,-0|00,x,2,3|-01,x,2,3'


def test_plain_numbers_are_parsed_exactly_and_other_lines_left_to_the_slower_parser() -> None:
    text = b"-12,x,0.5,7\n9223372036854775807,,3.1415926535897,-1\n0,1.2.3,.25,0\n5,-,4.,123\n"
    integers = [[-12, 7], [9_223_372_036_854_775_807, -1], [0, 0], [5, 123]]
    for separator in (b",", b"::"):
        parsed = _parse(text.replace(b",", separator), separator)
        assert parsed == (True, integers, [0.5, 3.1415926535897, 0.25, 4.0])
    assert [line for line in _OTHERS.split(b"|") if _parse(b"1,x,2,3\n" + line + b"\n")[0]] == []
