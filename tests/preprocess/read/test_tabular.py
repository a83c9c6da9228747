import re
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from evenrank.core.errors import DataError
from evenrank.preprocess.read.table import FAULT
from evenrank.preprocess.read.tabular import open_table

ROWS = [("1", "x y", "3"), ("2", "", "4")]
NAMES = ("user", "note", "item")


@pytest.mark.parametrize("has_header", [True, False])
@pytest.mark.parametrize("separator", [",", "\t", ";", "|", "::"])
def test_the_delimiter_is_inferred_from_a_header_or_the_number_of_columns(
    tmp_path: Path, separator: str, has_header: bool
) -> None:
    path = tmp_path / "log.csv"
    path.write_text("".join(f"{separator.join(row)}\n" for row in ([NAMES] if has_header else []) + ROWS))
    table = open_table(path, ["item", "note"], columns=() if has_header else NAMES)
    assert table.separator == separator
    assert table.head(9).select("item", "note", FAULT).rows() == [("3", "x y", None), ("4", "", None)]


def test_any_other_delimiter_is_given(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user^item\n1^2\n")
    with pytest.raises(DataError, match=r"has no column 'item'; known: user\^item; choose one .* give --columns"):
        open_table(path, ["item"])
    assert open_table(path, ["item"], separator="^").head(9).get_column("item").to_list() == ["2"]


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("user,item", "it has ','; give that, or leave --delimiter out"),
        ("user,item;x", "it has ',' and ';'; give that, or leave --delimiter out"),
        ("user^item", "correct --delimiter"),
    ],
)
@pytest.mark.parametrize("columns", [(), ("user", "item")])
def test_a_first_line_without_the_delimiter_that_is_given_says_which_ones_it_has(
    tmp_path: Path, line: str, remedy: str, columns: tuple[str, ...]
) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"{line}\n1,2\n")
    with pytest.raises(DataError, match=re.escape(f"the first line '{line}' has no delimiter '|'; {remedy}") + "$"):
        open_table(path, ["user", "item"], separator="|", columns=columns)


def test_an_ambiguous_first_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("1,2;3\n")
    with pytest.raises(
        DataError, match=re.escape("the delimiter could be any of [',', ';'] by the first line, '1,2;3'")
    ):
        open_table(path, ["a"], columns=("a", "b"))


WRITERS: dict[str, Callable[[pl.DataFrame, Path], object]] = {
    "log.csv": pl.DataFrame.write_csv,
    "log.jsonl": pl.DataFrame.write_ndjson,
    "log.parquet": pl.DataFrame.write_parquet,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_column_that_a_file_lacks_is_that_of_its_folder(tmp_path: Path, name: str) -> None:
    path, folders = tmp_path / "day=7" / name, {"day": "7", "user": "9"}
    path.parent.mkdir()
    WRITERS[name](pl.DataFrame({"user": ["1", "2"], "item": ["3", "4"]}), path)
    table = open_table(path, ["user", "day", "item"], folders=folders)
    assert table.head(9).select("user", "day", "item").rows() == [("1", "7", "3"), ("2", "7", "4")]
    if name != "log.jsonl":  # whose rows lack what is missing
        with pytest.raises(
            DataError, match=r"has no column 'day'.*; a folder adds one only below the path that is given"
        ):
            open_table(path, ["user", "day"])
    if name == "log.csv":  # by whose delimiter at least one column must be found
        return
    with pytest.raises(DataError, match="all needed columns are in the names of its folders; one must be in the file"):
        open_table(path, ["day"], folders=folders)
