import bz2
import gzip
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from evenrank.core.errors import DataError
from evenrank.preprocess.read.places import find_files
from evenrank.preprocess.read.tabular import open_table

FILES = ("a.csv", "b.csv.gz", "day=1/p.csv", "day=2/sub/q.csv", "_tmp/x.csv", ".hidden.csv", "_SUCCESS", "notes.csv")


@pytest.fixture
def logs(here: Path) -> Path:
    for name in (*FILES, "day=1/hour=2/minute=3/_r/p.csv"):
        (here / "logs" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "logs" / name).write_text("" if name in ("notes.csv", "_SUCCESS") else "x\n")
    return Path("logs")


@pytest.mark.parametrize("is_absolute", [False, True])
@pytest.mark.parametrize(
    ("paths", "found", "sources"),
    [
        # None that are hidden or empty.
        ("logs", "a.csv b.csv.gz day=1/p.csv day=2/sub/q.csv", "a.csv b.csv.gz day=1/p.csv day=2/sub/q.csv"),
        ("logs/*.csv", "a.csv", "a.csv"),
        ("logs/**/*.csv", "a.csv day=1/p.csv day=2/sub/q.csv", "a.csv day=1/p.csv day=2/sub/q.csv"),
        ("logs/day=[12]", "day=1/p.csv day=2/sub/q.csv", "day=1/p.csv day=2/sub/q.csv"),
        ("logs/day=2 logs/a.csv logs/_tmp/x.csv", "day=2/sub/q.csv a.csv _tmp/x.csv", "day=2/sub/q.csv a.csv x.csv"),
        ("logs/.hidden.csv", ".hidden.csv", ".hidden.csv"),
        ("logs/day=1/p.csv logs/day=2/sub", "day=1/p.csv day=2/sub/q.csv", "day=1/p.csv q.csv"),
        (
            "logs/day=1/hour=2/minute=3/_r/p.csv logs/day=1/p.csv",
            "day=1/hour=2/minute=3/_r/p.csv day=1/p.csv",
            "p.csv day=1/p.csv",
        ),
    ],
)
def test_files_are_found_in_order_and_named_alike_wherever_they_are(
    logs: Path, paths: str, found: str, sources: str, is_absolute: bool
) -> None:
    given = [Path(path).absolute() if is_absolute else Path(path) for path in paths.split()]
    files = find_files(given)
    base = logs.absolute() if is_absolute else logs
    assert [*files] == [base / name for name in found.split()]
    assert [file.source for file in files.values()] == sources.split()
    assert [file.source for path in given for file in find_files([path]).values()] == sources.split()


def test_a_file_that_holds_nothing_is_left_out_of_a_folder_compressed_or_not(tmp_path: Path) -> None:
    codecs: dict[str, Callable[..., bytes]] = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "zst": partial(pa.compress, codec="zstd", asbytes=True),
    }
    for codec, compress in codecs.items():
        for name, content in ((f"none.csv.{codec}", b""), (f"some.csv.{codec}", b"a,b\n")):
            (tmp_path / name).write_bytes(compress(content))
    (tmp_path / "none.csv").touch()
    (tmp_path / "damaged.csv.gz").write_bytes(b"\x1f\x8b")
    names = ["damaged.csv.gz", "some.csv.bz2", "some.csv.gz", "some.csv.zst"]
    assert [path.name for path in find_files([tmp_path])] == names
    assert [path.name for path in find_files([tmp_path / "none.csv.gz"])] == ["none.csv.gz"]


@pytest.mark.timeout(60, method="thread")  # a read that waits cannot be interrupted
def test_a_named_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is a named pipe, not a regular file"):
        open_table(tmp_path / "pipe", ("user",))
