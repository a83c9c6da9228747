import bz2
import gzip
import os
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from evenrank.core.errors import DataError
from evenrank.preprocess.read.places import find_files
from evenrank.preprocess.read.tabular import open_table

FILES = "a.csv b.csv.gz day=1/p.csv day=2/sub/q.csv _tmp/x.csv .hidden.csv day=1/h=2/m=3/_r/p.csv"
EMPTY = "_SUCCESS notes.csv"
# Paths, the files that they lead to, and their names in the manifest; none that are hidden or empty.
FOUND = [
    ("logs", "a.csv b.csv.gz day=1/p.csv day=2/sub/q.csv", "a.csv b.csv.gz day=1/p.csv day=2/sub/q.csv"),
    ("logs/*.csv", "a.csv", "a.csv"),
    ("logs/**/*.csv", "a.csv day=1/p.csv day=2/sub/q.csv", "a.csv day=1/p.csv day=2/sub/q.csv"),
    ("logs/day=[12]", "day=1/p.csv day=2/sub/q.csv", "day=1/p.csv day=2/sub/q.csv"),
    ("logs/day=2 logs/a.csv logs/_tmp/x.csv", "day=2/sub/q.csv a.csv _tmp/x.csv", "day=2/sub/q.csv a.csv x.csv"),
    ("logs/.hidden.csv", ".hidden.csv", ".hidden.csv"),
    ("logs/day=1/p.csv logs/day=2/sub", "day=1/p.csv day=2/sub/q.csv", "day=1/p.csv q.csv"),
    ("logs/day=1/h=2/m=3/_r/p.csv logs/day=1/p.csv", "day=1/h=2/m=3/_r/p.csv day=1/p.csv", "p.csv day=1/p.csv"),
]


def test_files_are_found_in_order_and_named_alike_wherever_they_are(here: Path) -> None:
    for name in f"{FILES} {EMPTY}".split():
        (here / "logs" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "logs" / name).write_text("" if name in EMPTY.split() else "x\n")
    for root in (Path(), here):
        for paths, found, sources in FOUND:
            given = [root / path for path in paths.split()]
            files = find_files(given)
            assert [*files] == [root / "logs" / name for name in found.split()]
            one_by_one = [file.source for path in given for file in find_files([path]).values()]
            assert [file.source for file in files.values()] == one_by_one == sources.split()


def test_a_file_that_holds_nothing_is_left_out_of_a_folder_compressed_or_not(tmp_path: Path) -> None:
    zst = partial(pa.compress, codec="zstd", asbytes=True)
    for suffix, compress in (("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zst)):
        (tmp_path / f"none.csv{suffix}").write_bytes(compress(b""))
        (tmp_path / f"some.csv{suffix}").write_bytes(compress(b"a,b\n"))
    (tmp_path / "damaged.csv.gz").write_bytes(b"\x1f\x8b")
    names = ["damaged.csv.gz", "some.csv", "some.csv.bz2", "some.csv.gz", "some.csv.zst"]
    assert [path.name for path in find_files([tmp_path])] == names
    assert [path.name for path in find_files([tmp_path / "none.csv.gz"])] == ["none.csv.gz"]


@pytest.mark.timeout(60, method="thread")  # a read that waits cannot be interrupted
def test_a_named_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is a named pipe, not a regular file"):
        open_table(tmp_path / "pipe", ("user",))
