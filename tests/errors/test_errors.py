"""Users' mistakes, a table for each part of the package: the call, the kind of error, and its one line."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.errors.scene import Row, Scene

ROOMS = ("core", "preprocess", "datasets", "codebooks", "dataloader", "balance", "training", "extending", "cli")
TABLE = [
    pytest.param(row, id=f"{room}: {row.line[:60]}")
    for room in ROOMS
    for row in import_module(f"tests.errors.{room}").ROWS
]


@pytest.mark.parametrize("row", TABLE)
def test_mistake_gives_one_line(row: Row, tmp_path: Path, small_dataset: Path) -> None:
    with pytest.raises(row.kind) as caught:
        row.call(Scene(tmp_path, small_dataset))
    line = str(caught.value).replace(str(tmp_path), "<folder>").replace(str(small_dataset), "<data>")
    expected = ".*".join(map(re.escape, row.line.split("...")))
    assert re.fullmatch(expected, line), f"{line!r} is not {row.line!r}"
