import re
from pathlib import Path

import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.preprocess.files.locate import JSON, PARQUET, TEXT, file_format, find_files, partition_values

FILES = ("a.csv", "b.csv.gz", "day=1/p.csv", "day=2/sub/q.csv", "_tmp/x.csv", ".hidden.csv", "_SUCCESS", "notes.csv")


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "logs"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("" if name in ("notes.csv", "_SUCCESS") else "x\n")
    return Path("logs")


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["logs"], ["a.csv", "b.csv.gz", "day=1/p.csv", "day=2/sub/q.csv"]),  # none that are hidden or empty
        (["logs/*.csv"], ["a.csv"]),
        (["logs/**/*.csv"], ["a.csv", "day=1/p.csv", "day=2/sub/q.csv"]),
        (["logs/day=[12]"], ["day=1/p.csv", "day=2/sub/q.csv"]),
        (["logs/day=2", "logs/a.csv", "logs/_tmp/x.csv"], ["day=2/sub/q.csv", "a.csv", "_tmp/x.csv"]),
        (["logs/.hidden.csv"], [".hidden.csv"]),
    ],
)
def test_files_folders_and_patterns_are_found_in_order(logs: Path, paths: list[str], found: list[str]) -> None:
    assert list(find_files([Path(path) for path in paths])) == [logs / name for name in found]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["logs"], ["a.csv", "b.csv.gz", "day=1/p.csv", "day=2/sub/q.csv"]),
        (["logs/day=1", "logs/day=2", "logs/a.csv"], ["day=1/p.csv", "day=2/sub/q.csv", "a.csv"]),
        (["logs/day=1/p.csv", "logs/day=2/sub"], ["day=1/p.csv", "q.csv"]),
        (["logs/**/*.csv"], ["a.csv", "day=1/p.csv", "day=2/sub/q.csv"]),
    ],
)
@pytest.mark.parametrize("is_absolute", [False, True])
def test_the_names_of_files_depend_neither_on_the_machine_nor_on_other_paths(
    logs: Path, paths: list[str], names: list[str], is_absolute: bool
) -> None:
    given = [Path(path).absolute() if is_absolute else Path(path) for path in paths]
    assert [file.source for file in find_files(given).values()] == names
    assert [file.source for path in given for file in find_files([path]).values()] == names


@pytest.mark.parametrize(
    ("paths", "error", "message"),
    [
        (["logs/none.csv"], DataError, "logs/none.csv cannot be read: No such file or directory; check the path"),
        (["logs/*.tsv"], DataError, "logs/*.tsv leads to no data file; check it"),
        (["logs", "logs/day=1/p.csv"], ConfigError, "/logs/day=1/p.csv is in logs, logs/day=1/p.csv twice, and its ev"),
        (["mixed"], DataError, "mixed has files of several formats; use a pattern such as *.csv"),
        (
            ["other"],
            DataError,
            "other/a.log has an unknown suffix; expected one of .csv, .tsv, .txt, .dat, .json, .jso",
        ),
    ],
)
def test_paths_without_one_kind_of_files_are_refused(
    logs: Path, paths: list[str], error: type[Exception], message: str
) -> None:
    for name in ("mixed/a.csv", "mixed/b.jsonl", "other/a.log"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("x\n")
    with pytest.raises(error, match=re.escape(message)):
        find_files([Path(path) for path in paths])


def test_the_name_tells_the_format() -> None:
    for suffixes, expected in ((".csv .TSV .txt .dat", TEXT), (".json .jsonl .ndjson", JSON)):
        for suffix in suffixes.split():
            for compression in ("", ".gz", ".zst", ".BZ2"):
                assert file_format(Path(f"log{suffix}{compression}")) == expected
    assert file_format(Path("log.parquet")) == PARQUET
    for name in ("log.parquet.gz", "log.gz", "log", "log.csv.zip"):
        with pytest.raises(DataError, match=f"{name} has an unknown suffix"):
            file_format(Path(name))


def test_folders_add_columns() -> None:
    name = "a/day=1/city=S%C3%A3o%2FPaulo/x=__HIVE_DEFAULT_PARTITION__/y=1=2/z=/log.csv"
    assert partition_values(name) == {"day": "1", "city": "São/Paulo", "x": None, "y": "1=2", "z": ""}


@pytest.mark.parametrize("is_absolute", [False, True])
@pytest.mark.parametrize(
    ("path", "added"),
    [
        ("a.csv", {}),
        (".", {"shop": "2"}),
        ("shop=2", {}),
        ("shop=2/b.csv", {}),
        ("shop=*", {"shop": "2"}),
        ("shop=*/*.csv", {"shop": "2"}),
        ("shop=2/*.csv", {}),
        ("**/b.csv", {"shop": "2"}),
    ],
)
def test_folders_add_columns_below_the_path_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, added: dict[str, str], is_absolute: bool
) -> None:
    folder = tmp_path / "day=7" / "logs"
    (folder / "shop=2").mkdir(parents=True)
    for name in ("a.csv", "shop=2/b.csv"):
        (folder / name).write_text("x\n")
    monkeypatch.chdir(folder)
    (*_, file) = find_files([folder / path if is_absolute else Path(path)]).values()
    assert file.folders == added
