import glob
import os
import re
from collections.abc import Callable
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


LISTERS: tuple[Callable[[Path], object], ...] = (
    lambda folder: find_files([folder]),
    lambda folder: find_files([folder / "day=*/*.parquet"]),
    lambda folder: open_store(folder, columns={"item_id": "item_id"}),
    lambda folder: FolderLog(folder, describe_log({"item_id": 9})).end(),
)
DAY_1, DAY_2, DAY_3, NOWHERE = (Path(f"day={day}") for day in (1, 2, 3, 9))
SPOILS: dict[Callable[[], object], str] = {
    lambda: DAY_2.chmod(0): "day=2 cannot be read: Permission denied; check its permissions",
    lambda: os.mkfifo(DAY_2 / "2.parquet"): "day=2/2.parquet is a named pipe, not a regular file",
    lambda: DAY_3.symlink_to(DAY_3): "day=3 cannot be read: Too many levels of symbolic links",
    lambda: DAY_3.symlink_to(NOWHERE): "day=3 is a link that leads nowhere; fetch its data, or remove it",
    lambda: DAY_3.symlink_to(DAY_1): "are the same; remove the link",
    lambda: (DAY_2 / "2.parquet").symlink_to(Path("..") / DAY_1 / "1.parquet"): "are the same; remove the link",
    lambda: DAY_3.symlink_to("."): "are the same; remove the link",
}


@pytest.mark.parametrize(("spoil", "message"), SPOILS.items())
def test_nothing_is_left_out_in_silence(here: Path, spoil: Callable[[], object], message: str) -> None:
    for day in (DAY_1, DAY_2):
        day.mkdir()
        pq.write_table(pa.table({"item_id": [[1]]}), day / "1.parquet")
    for lister in LISTERS:
        lister(here)
    spoil()
    for lister in LISTERS:
        with unprivileged(here), pytest.raises(DataError, match=re.escape(message)) as raised:
            lister(here)
        assert str(here) in str(raised.value)
