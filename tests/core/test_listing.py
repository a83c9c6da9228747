import glob
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.core.listing import list_files, matches
from evenrank.datasets import open_store
from evenrank.datasets.continuous_log import FolderLog, describe_log
from evenrank.preprocess.read.places import find_files
from tests.privileges import unprivileged

_NAMES = ("a", "b.csv", "day=1", "[0]", "0")
_PARTS = (*_NAMES, "*", "**", "?", "*.csv", "day=*", "[ab]*", "[[]0]")
_LISTERS: Mapping[str, Callable[[Path], object]] = {
    "folder": lambda folder: find_files([folder]),
    "pattern": lambda folder: find_files([folder / "day=*/*.parquet"]),
    "columns": lambda folder: open_store(folder, columns={"item_id": "item_id"}),
    "log": lambda folder: FolderLog(folder, describe_log({"item_id": 9})).end(),
}


def _tree(folder: Path, names: set[str]) -> Path:
    """Make files with these paths, unless one is a folder."""
    for name in names:
        if not any(other.startswith(f"{name}/") for other in names):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    return folder


@given(
    st.sets(st.lists(st.sampled_from(_NAMES), min_size=1, max_size=4).map("/".join), max_size=12),
    st.lists(st.sampled_from(_PARTS), max_size=4),
)
@example({"a"}, ["a", "**"])
def test_a_pattern_stands_for_what_it_does_in_python_and_for_all_below(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], pattern: list[str]
) -> None:
    folder, expected = _tree(tmp_path_factory.mktemp("tree"), names), set[Path]()
    for found in glob.glob("/".join(pattern), root_dir=folder, recursive=True) if pattern else [""]:
        if (folder / found).is_dir() or not found.endswith("/"):  # the file a as `a/`, for a/**, is no path of a file
            expected |= {folder / found, *(folder / found).rglob("*")}
    listed = list_files(folder, pattern)
    assert [folder / name for name in listed] == sorted(path for path in expected if path.is_file())
    every = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert {*listed} == {name for name in every if matches(pattern, name)}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda day: day(2).chmod(0), "day=2 cannot be read: Permission denied; check its permissions"),
        (lambda day: os.mkfifo(day(2) / "2.parquet"), "day=2/2.parquet is a named pipe, not a regular file"),
        (lambda day: day(3).symlink_to(day(3)), "day=3 cannot be read: Too many levels of symbolic links"),
        (
            lambda day: day(3).symlink_to(day(9)),
            "day=3 is a link that leads nowhere; fetch its data, or remove it",
        ),
        (lambda day: (day(2) / "2.parquet").symlink_to(day(9)), "day=2/2.parquet is a link that leads nowhere"),
        (lambda day: day(3).symlink_to(day(1)), "are the same; remove the link"),
        (lambda day: (day(2) / "2.parquet").symlink_to(day(1) / "1.parquet"), "are the same"),
        (lambda day: day(3).symlink_to(day(1).parent), "are the same"),
    ],
)
def test_nothing_is_left_out_in_silence(
    tmp_path: Path, spoil: Callable[[Callable[[int], Path]], object], message: str
) -> None:
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table({"item_id": [[day]]}), tmp_path / f"day={day}" / "1.parquet")
    for lister in _LISTERS.values():
        lister(tmp_path)
    spoil(lambda day: tmp_path / f"day={day}")
    for lister in _LISTERS.values():
        with unprivileged(tmp_path), pytest.raises(DataError, match=re.escape(message)) as raised:
            lister(tmp_path)
        assert str(tmp_path) in str(raised.value)
