"""Dense vectors of logs of a few events, in files of all kinds, compared with dicts by raw id."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets import open_store, open_vectors, read_manifest
from evenrank.preprocess import preprocess
from evenrank.preprocess.read import vectors as reading
from tests.preprocess.decoded import bytes_in, number, of_log, read_vocabulary, write_log
from tests.s3_server import S3

FORMATS = ("lists.parquet", "large.parquet", "fixed.parquet", "ids.npy", "ids.txt")


def write_vectors(folder: Path, form: str, ids: list[Any], vectors: NDArray[Any], name: str = "item") -> Path:
    """Write vectors [n, d] and their raw ids in one of the formats, and return the path of the file."""
    if not form.endswith(".parquet"):
        np.save(folder / "given.npy", vectors)
        if form == "ids.npy":
            np.save(folder / "given.ids.npy", np.array(ids))
        else:
            (folder / "given.ids.txt").write_text("".join(f"{each}\n" for each in ids))
        return folder / "given.npy"
    values = pa.array(vectors.reshape(-1))
    lists: Any = pa.FixedSizeListArray.from_arrays(values, vectors.shape[1])
    if form != "fixed.parquet":
        lists = lists.cast((pa.list_ if form == "lists.parquet" else pa.large_list)(values.type))
    pq.write_table(pa.table({"title": ["x"] * len(ids), "v": lists, name: ids}), folder / "given.parquet")
    return folder / "given.parquet"


def by_raw_id(dataset: Path | str, name: str = "item_id") -> dict[Any, list[float]]:
    """Return the vectors of a dataset that are not zeros."""
    vectors = open_vectors(dataset, name)
    vocabulary = read_vocabulary(Path(dataset), name)
    assert len(vectors) == len(vocabulary)
    assert not vectors[0].any()
    return {vocabulary[row]: vectors[row].tolist() for row in range(len(vectors)) if vectors[row].any()}


_IDS = st.sampled_from([st.integers(0, 12).map(lambda id: id * 10**15), st.integers(0, 12).map(lambda id: f"n{id}")])
_CASES = _IDS.flatmap(
    lambda ids: st.tuples(st.lists(ids, min_size=1, max_size=9), st.lists(ids, min_size=1, max_size=9, unique=True))
)


@pytest.mark.parametrize("form", FORMATS)
def test_each_id_has_its_vector_and_those_without_are_counted(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    @settings(max_examples=8)
    @given(_CASES, st.integers(1, 3), st.sampled_from(["float16", "float32"]), st.booleans(), st.sampled_from([1, 99]))
    def check(case: Any, width: int, dtype: str, is_user: bool, block_bytes: int) -> None:
        monkeypatch.setattr(reading, "_BLOCK_BYTES", block_bytes)
        (seen, given_ids), folder = case, tmp_path_factory.mktemp("vectors")
        vectors = np.random.default_rng(0).standard_normal((len(given_ids), width)).astype(dtype)
        vectors[len(given_ids) // 2] = 0  # as if it was missing
        expected = {
            each: row for each, row in zip(given_ids, vectors.tolist(), strict=True) if each in seen and any(row)
        }
        log = [(each, 7, t) if is_user else (7, each, t) for t, each in enumerate(seen)]
        of = "user" if is_user else "item"
        path = write_vectors(folder, form, given_ids, vectors, of)
        manifest = number(
            folder / "out", write_log(folder / "log.parquet", log), ids="dense", log={f"{of}_vectors": path}
        )
        assert by_raw_id(folder / "out", f"{of}_id") == expected
        num_missing = len({*seen}) - len(expected)
        counted = {f"{of}s without a vector": num_missing}
        counted[f"{of}s with a vector but no id (left out)"] = len({*given_ids} - {*seen})
        assert manifest.options["audit"] == {what: count for what, count in counted.items() if count}
        (file,) = manifest.vectors.values()
        assert (file.width, file.dtype, file.missing) == (width, dtype, num_missing)
        assert [*manifest.sources][1].path == path.name

    check()


def test_rare_items_have_events_but_no_id_for_a_vector(here: Path) -> None:
    log = write_log(here / "log.parquet", [(1, item, time) for time, item in enumerate([7, 7, 8])])
    path = write_vectors(here, "ids.npy", [7, 8], np.ones((2, 3), dtype=np.float32))
    manifest = number(here / "out", log, min_count="item=2", log={"item_vectors": path})
    assert by_raw_id(here / "out") == {7: [1.0] * 3}
    assert manifest.options["audit"]["items with a vector but no id (left out)"] == 1


def test_ids_are_parsed_as_those_of_the_log_and_texts_match_no_integer(here: Path) -> None:
    log = here / "log.csv"
    log.write_text("user,item,time\na,7,1700000000\na, 8,1700000001\na,9.0,1700000002\n")
    vectors = np.arange(1, 6, dtype=np.float32)[:, None]
    path = write_vectors(here, "ids.txt", ["9.0", " 7", "007", "8 ", "x"], vectors)
    manifest = number(here / "out", log, ids="dense", log={"item_vectors": path})
    assert by_raw_id(here / "out") == {7: [2.0], 8: [4.0], 9: [1.0]}
    assert manifest.options["audit"] == {"items with a vector but no id (left out)": 2}


def test_rare_items_have_no_vector_although_they_have_events(here: Path) -> None:
    path = write_vectors(here, "ids.npy", ["x", "y"], np.ones((2, 3), dtype=np.float16))
    log = write_log(here / "log.csv", [("a", "x", 1), ("a", "y", 2), ("b", "y", 3)])
    audit = number(here / "out", log, min_count="item=2", log={"item_vectors": path}).options["audit"]
    assert by_raw_id(here / "out") == {"y": [1, 1, 1]}
    assert audit["rare items (kept, with the id 0)"] == audit["items with a vector but no id (left out)"] == 1


def test_later_days_keep_rows_and_vectors_and_a_full_file_gives_what_all_days_at_once_give(here: Path) -> None:
    days = [write_log(here / "1.csv", [("a", "x", 1), ("a", "y", 2)]), write_log(here / "2.csv", [("b", "z", 9**5)])]
    vectors = np.array([[1, 2], [3, 4], [5, 6]], dtype=np.float16)

    def run(out: str, *paths: Path, ids: list[str], rows: list[int], **options: Any) -> None:
        log = {"item_vectors": write_vectors(here, "ids.npy", ids, vectors[rows])}
        preprocess(of_log(here / out, *paths, log=log, **options))

    run("some", days[0], ids=["y", "x"], rows=[1, 0])  # texts, which are numbered
    run("all", days[0], ids=["y", "x"], rows=[1, 0])
    old = open_vectors(here / "some")  # whose rows stay readable
    run("some", days[1], ids=["z"], rows=[2], append=True)  # of the new item alone
    run("all", days[1], ids=["z", "y", "x"], rows=[2, 1, 0], append=True)
    run("once", *days, ids=["z", "y", "x"], rows=[2, 1, 0])
    assert bytes_in(here / "all", versions=False) == bytes_in(here / "once", versions=False)
    assert open_vectors(here / "some").tolist() == open_vectors(here / "once").tolist() == [[0, 0], *vectors.tolist()]
    assert old.tolist() == [[0, 0], [1, 2], [3, 4]]
    run("later", days[1], ids=["y", "z"], rows=[1, 2], vocabulary=here / "some")
    assert open_vectors(here / "later").tolist() == [[0, 0], [0, 0], [3, 4], [5, 6]]
    before = bytes_in(here / "some")
    vectors = vectors.astype(np.float32)
    with pytest.raises(DataError, match=r"^.*given.npy has vectors of 2 float32, and .*some of 2 float16; append"):
        run("some", write_log(here / "3.csv", [("b", "z", 9**6)]), ids=["z"], rows=[2], append=True)
    assert bytes_in(here / "some") == before


def test_vectors_are_read_from_urls_and_written_to_them(here: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here / "home"))
    log, vectors = write_log(here / "log.csv", [("a", "x", 1)]), np.array([[1.5, 2]], dtype=np.float16)
    for form, suffixes in {"ids.txt": (".npy", ".ids.txt"), "fixed.parquet": (".parquet",)}.items():
        write_vectors(here, form, ["x"], vectors)
        for suffix in suffixes:
            s3.put(here / f"given{suffix}", f"vectors/given{suffix}")
        out = s3.url(f"of-{form}")
        preprocess(of_log(out, log, log={"item_vectors": Path(s3.url(f"vectors/given{suffixes[0]}"))}, ids="dense"))
        for source in (out, open_store(out)):
            assert open_vectors(source).tolist() == [[0, 0], [1.5, 2]]
        preprocess(of_log(out, log, ids="dense"))  # replaces all files, also those of vectors
        assert not read_manifest(out).vectors
        assert not [name for name in s3.keys(f"of-{form}") if name.endswith(".npy")]


def test_a_full_disk_is_an_error_before_vectors_are_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, written = write_log(here / "log.csv", [("a", "x", 1)]), list[int]()
    path = write_vectors(here, "ids.txt", ["x"], np.ones((1, 3), dtype=np.float16))

    def allocate(_: int, begin: int, size: int) -> None:
        written.append(size - begin)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(
        DataError, match=r"out could not be written: No space left on device; it is unchanged, free som"
    ):
        number(here / "out", log, log={"item_vectors": path})
    assert written == [128 + 2 * 3 * 2]  # the header, and two rows
    assert not (here / "out").exists()
    monkeypatch.undo()
    number(here / "out", log, log={"item_vectors": path})  # goes on
    assert by_raw_id(here / "out") == {"x": [1, 1, 1]}


def _npy(array: Any, ids: Any = ("x", "y")) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        np.save(folder / "v.npy", array)
        if ids is not None:
            np.save(folder / "v.ids.npy", np.array(ids))
        return folder / "v.npy"

    return write


def _parquet(lists: Any, type_: pa.DataType, ids: Any = ("x", "y"), name: str = "item", **more: Any) -> Any:
    def write(folder: Path) -> Path:
        table = {name: pa.array(ids), "v": pa.array(lists, type_), **more}
        pq.write_table(pa.table(table), folder / "v.parquet")
        return folder / "v.parquet"

    return write


def _raw(name: str, content: bytes, *others: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        for each in (name, *others):
            (folder / each).write_bytes(content)
        return folder / name

    return write


OF_FLOATS, TWO = pa.list_(pa.float32()), np.ones((2, 3), dtype=np.float32)
CUT = np.lib.format.magic(1, 0) + b"\x10\0{'descr': '<f4'\n"
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "float64": (_npy(np.ones((2, 3))), "v.npy has vectors of float64; convert them to float16 or float32"),
    "integers": (_npy(np.ones((2, 3), dtype=int)), "v.npy has vectors of int64; "),
    "objects": (_npy(np.array([[{}]])), "v.npy cannot be read: Array can't be memory-mapped: Python objects in dtype"),
    "doubles": (_parquet([[1.0]] * 2, pa.list_(pa.float64())), "v.parquet has vectors of float64; "),
    "texts": (_parquet([["a"]] * 2, pa.list_(pa.string())), "v.parquet has vectors of string; "),
    "1-D": (_npy(TWO[0]), r"v.npy has the shape \[3\]; write \[n, d\], n from 1 on and d in 1..1048576"),
    "no rows": (_npy(TWO[:0], ids=np.array([], "U1")), r"v.npy has the shape \[0, 3\]; "),
    "no columns": (_npy(TWO[:, :0]), r"v.npy has the shape \[2, 0\]; "),
    "no rows of Parquet": (_parquet([], OF_FLOATS, ids=pa.array([], "string")), r"v.parquet has the shape \[0, 0\]; "),
    "null first": (_parquet([None, [1.0]], OF_FLOATS), r"v.parquet has the shape \[2, 0\]; "),
    "empty": (_raw("v.npy", b"", "v.ids.npy"), "v.npy cannot be read: No data left in file; write"),
    "empty Parquet": (_raw("v.parquet", b""), "v.parquet cannot be read: Parquet file size is 0 bytes; write"),
    "cut": (_raw("v.npy", CUT, "v.ids.npy"), "v.npy cannot be read: .*; write .parquet or .npy again"),
    "another format": (_raw("v.csv", b"item,v\nx,1\n"), "v.csv cannot be read: Parquet magic bytes not found"),
    "other widths": (_parquet([[1.0, 2], [3.0]], OF_FLOATS), "row 2 has 1 values, and the first row 2; leave rows w"),
    "null": (_parquet([[1.0, 2], None], OF_FLOATS), "row 2 has 0 values, and the first row 2; leave rows w"),
    "NaN": (_npy(TWO * np.array([[1], [np.nan]], "f4")), "v.npy: row 2 has NaN or infinite values; correct it, or lea"),
    "infinite": (_npy(np.array([[np.inf], [1]], "f2")), "v.npy: row 1 has NaN or infinite values; "),
    "null value": (_parquet([[1.0], [None]], OF_FLOATS), "v.parquet: row 2 has NaN or infinite values; "),
    "null half": (_parquet([[1.0], [None]], pa.list_(pa.float16())), "v.parquet: row 2 has NaN or infinite values; "),
    "twice": (_npy(TWO, ids=["x", "x"]), "v.ids.npy: item x appears twice; keep one vector of each"),
    "too few ids": (_npy(TWO, ids=["x"]), "v.ids.npy has 1 ids, and .*v.npy 2 vectors; write one id for each"),
    "ids in columns": (_npy(TWO, ids=[["x"], ["y"]]), r"v.ids.npy has <U1 \[2, 1\]; write ids \[n\], integers or text"),
    "ids of floats": (_npy(TWO, ids=[1.5, 2.5]), r"v.ids.npy has float64 \[2\]; write ids"),
    "no ids": (_npy(TWO, ids=None), "v.npy has 0 files of ids beside it; write the id of each row to v.ids.npy or v"),
    "missing id": (_npy(TWO, ids=["x", ""]), "v.ids.npy, line 2 .*: id is missing; fix or remove the line"),
    "no id column": (_parquet([[1.0]] * 2, OF_FLOATS, name="a", b=[1, 2]), "the columns a, v, b; .* called 'item' if"),
    "only ids": (_parquet([1.0, 2], pa.float32()), "v.parquet has the columns item, v; write one of lists, the vect"),
    "two of lists": (_parquet([[1.0]] * 2, OF_FLOATS, w=[[1], [2]]), "v.parquet has the columns item, v, w; write one"),
    "no file": (
        lambda folder: folder / "none.npy",
        "none.npy cannot be read: No such file or directory; check the pat",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_faulty_file_is_refused_in_one_line_and_the_earlier_dataset_stays(here: Path, name: str) -> None:
    write, line = REFUSED[name]
    log = write_log(here / "log.csv", [("a", "x", 1), ("a", "y", 2)])
    number(here / "out", log, ids="dense")
    before = bytes_in(here / "out")
    with pytest.raises(DataError, match=line) as caught:
        number(here / "out", log, ids="dense", log={"item_vectors": write(here)})
    assert "\n" not in str(caught.value)
    assert bytes_in(here / "out") == before
    assert not [*here.glob(".out*")]


def test_vectors_need_dense_ids_and_a_place_that_is_not_replaced(here: Path) -> None:
    log = write_log(here / "log.csv", [(1, 1, 1), (1, 2, 2)])
    path = write_vectors(here, "ids.npy", [1, 2], np.ones((2, 3), dtype=np.float16))
    for rule in ("keep", "hash:9", "auto"):
        with pytest.raises(DataError, match=r"given.npy has vectors of items, whose ids are .*; choose --ids item=den"):
            number(here / "out", log, ids=rule, log={"item_vectors": path})
    with pytest.raises(ConfigError, match=r"given.npy is read, and would be replaced"):
        number(here / "v", log, ids="dense", log={"item_vectors": here / "v" / path.name})
