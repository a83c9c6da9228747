from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.preprocess.files import text_blocks
from evenrank.preprocess.files.table import WHOLE
from evenrank.preprocess.files.text_blocks import read_blocks, text_pieces

TEXTS = st.lists(st.sampled_from(["", "a,b", "é,1", "a longer line than others"]), max_size=12)


@given(TEXTS, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans(), st.integers(3, 40))
def test_every_line_is_in_one_piece(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[str],
    end: str,
    is_ended: bool,
    has_header: bool,
    piece_bytes: int,
) -> None:
    path = tmp_path_factory.mktemp("text") / "log.csv"
    path.write_bytes(f"\ufeff{end.join(lines)}{end * is_ended}".encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_blocks, "_PIECE_BYTES", piece_bytes)
        patch.setattr(text_blocks, "_BLOCK_BYTES", 16)
        pieces = text_pieces(path)
        read = [
            [line for block in read_blocks(path, piece, has_header=has_header) for line in block.lines()]
            for piece in pieces
        ]
    whole = [line for block in read_blocks(path, WHOLE, has_header=has_header) for line in block.lines()]
    assert [line for of_piece in read for line in of_piece] == whole
    assert [piece.end for piece in pieces[:-1]] == [piece.begin for piece in pieces[1:]]


def test_a_compressed_file_is_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_blocks, "_PIECE_BYTES", 1)
    (tmp_path / "log.csv.gz").write_bytes(bytes(100))
    assert text_pieces(tmp_path / "log.csv.gz") == [WHOLE]


def test_a_line_that_is_too_long_has_its_number_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_PIECE_BYTES", "_BLOCK_BYTES", "_MAX_LINE_BYTES"):
        monkeypatch.setattr(text_blocks, name, 10)
    path = tmp_path / "log.csv"
    path.write_text("a,b\n1,2\n3,4\n5,6\n" + "7" * 40)
    blocks = chain.from_iterable(read_blocks(path, piece, has_header=True) for piece in text_pieces(path))
    with pytest.raises(DataError, match=r"log\.csv, line 5 is longer than"):
        list(blocks)
