"""A CSV or Parquet file as a table of its needed columns, with the lines that cannot be read.

A CSV file may quote fields with `"`, a quote inside written twice. A quoted field ends on the line it begins on, so
that each line is a row and one that is broken spoils no other.
"""

import contextlib
import csv
import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from evenrank.core.errors import DataError
from evenrank.preprocess.sources.interactions import BadRow

_SEPARATORS = {".csv": ",", ".csv.gz": ",", ".tsv": "\t"}
PARQUET = ".parquet"
# Of the tables that are read here, beside columns that carry the names of the file's own.
IS_WHOLE, LINE, TEXT, FAULT, FIELDS = (f"evenrank {name}" for name in ("whole", "line", "text", "fault", "fields"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The needed columns of a file."""

    path: Path
    dtypes: Mapping[str, pl.DataType]
    num_rows: int  # the bad ones too
    rows: pl.LazyFrame  # the needed columns, and IS_WHOLE: whether a line has the right fields; in file order
    numbered: pl.LazyFrame  # the same rows with LINE, TEXT and FAULT, what is wrong with the line; may be slower

    def find_bad(self, checks: Mapping[str, pl.Expr], limit: int) -> list[BadRow]:
        """Return the first rows that have a fault, or for which a check is not true."""
        broken = (pl.when(~check.fill_null(False)).then(pl.lit(words)) for words, check in checks.items())
        bad = self.numbered.select(LINE, TEXT, pl.coalesce(FAULT, *broken).alias(FAULT)).drop_nulls(FAULT)
        with reading(self.path):
            found = bad.head(limit).collect()
        return [BadRow(line=line, text=text or "", reason=words) for line, text, words in found.iter_rows()]


@contextlib.contextmanager
def reading(*paths: Path) -> Iterator[None]:
    """Turn what Polars says of damaged files into one line that names them."""
    try:
        yield
    except (pl.exceptions.PolarsError, OSError, EOFError, zlib.error) as error:
        names = ", ".join(map(str, paths))
        reason = getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{names} cannot be read: {reason}; is it whole?") from error


def open_table(path: Path, names: Sequence[str]) -> Table:
    """Open a file by its suffix; its rows are read later.

    Args:
        path: a CSV, gzipped CSV, TSV or Parquet file.
        names: the columns that are needed.

    Raises:
        DataError: the file is missing, empty, damaged or of an unknown kind, or lacks a column.

    """
    suffix = next((known for known in (*_SEPARATORS, PARQUET) if path.name.lower().endswith(known)), None)
    if suffix is None:
        known = ", ".join((*_SEPARATORS, PARQUET))
        raise DataError(f"{path} is of no kind that is known by its suffix; there are {known}")
    if not path.is_file():
        raise DataError(f"{path} is not there, or is no file; check the path")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; make it again")
    table = _open_parquet(path, names) if suffix == PARQUET else _open_csv(path, names, _SEPARATORS[suffix])
    if table.num_rows == 0:
        raise DataError(f"{path} holds no row; make it again, or leave it out")
    return table


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn what the system or Polars says while a file is opened into one line that names it."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _check_columns(path: Path, present: Sequence[str], names: Sequence[str]) -> None:
    for name in names:
        if name not in present:
            raise DataError(f"{path} has no column {name!r}; there are {', '.join(present)}")
        if present.count(name) > 1:
            raise DataError(f"{path} has {present.count(name)} columns {name!r}; rename all but one")


def _open_parquet(path: Path, names: Sequence[str]) -> Table:
    scanned = pl.scan_parquet(path, glob=False)
    with reading(path):
        schema = scanned.collect_schema()
        num_rows = scanned.select(pl.len()).collect().item()
    _check_columns(path, schema.names(), names)
    rows = scanned.select(*names, pl.lit(True).alias(IS_WHOLE))
    text = pl.concat_str(*(pl.col(name).cast(pl.String, strict=False).fill_null("") for name in names), separator=",")
    return Table(
        path=path,
        dtypes={name: schema[name] for name in names},
        num_rows=num_rows,
        rows=rows,
        numbered=rows.with_columns(text.alias(TEXT), pl.lit(None, dtype=pl.String).alias(FAULT)).with_row_index(
            LINE, offset=1
        ),
    )


def _open_csv(path: Path, names: Sequence[str], separator: str) -> Table:
    header = _read_header(path, separator)
    _check_columns(path, header, names)
    positions = {name: header.index(name) for name in names}
    lines = pl.scan_csv(
        path,
        separator="\0",
        has_header=False,
        skip_lines=1,
        schema={TEXT: pl.String},
        encoding="utf8-lossy",
        quote_char=None,
        truncate_ragged_lines=True,
        extra_columns="ignore",
        glob=False,
    ).select(pl.col(TEXT).str.strip_chars_end("\r"))
    # Polars' own reader is several times faster than regular expressions, but what it makes of broken quotes depends on
    # where it cuts the file to read it in parallel; it also drops some carriage returns, and refuses some doubled
    # quotes. So it reads files where each line is in order by itself and has none of these.
    field = f'(?:"[^"]*"|[^"\\r{separator}]*)'
    with reading(path):
        num_rows, has_quotes, is_strict = (
            lines.select(
                pl.len().alias("rows"),
                pl.col(TEXT).str.contains('"', literal=True).any().alias("quotes"),
                pl.col(TEXT).str.contains(f"^{field}(?:{separator}{field})*$").all().alias("strict"),
            )
            .collect(engine="streaming")
            .row(0)
        )
    numbered = _parse_lines(lines, positions, len(header), separator)
    if not is_strict:
        rows = numbered.select(*names, pl.col(FAULT).is_null().alias(IS_WHOLE))
    else:
        columns = [f"column {index}" for index in range(len(header) + 1)]
        native = pl.scan_csv(
            path,
            separator=separator,
            has_header=False,
            skip_lines=1,
            schema=dict.fromkeys(columns, pl.String),
            missing_columns="insert",
            truncate_ragged_lines=True,
            extra_columns="ignore",
            encoding="utf8-lossy",
            quote_char='"' if has_quotes else None,
            glob=False,
        )
        rows = native.select(
            *(pl.col(columns[index]).alias(name) for name, index in positions.items()),
            (pl.col(columns[-1]).fill_null("") == "").alias(IS_WHOLE),
        )
    dtypes: dict[str, pl.DataType] = dict.fromkeys(names, pl.String())
    return Table(path=path, dtypes=dtypes, num_rows=num_rows, rows=rows, numbered=numbered)


def _read_header(path: Path, separator: str) -> list[str]:
    with reading(path):
        is_packed = path.suffix.lower() == ".gz"
        with gzip.open(path) if is_packed else path.open("rb") as file:
            line = file.readline().decode("utf-8-sig", errors="replace").rstrip("\r\n")
    try:
        return next(csv.reader([line], delimiter=separator, strict=True), [])
    except csv.Error as error:
        raise DataError(f"{path}: the line of column names cannot be read ({error}); mend {line[:80]!r}") from error


def _parse_lines(lines: pl.LazyFrame, positions: Mapping[str, int], num_columns: int, separator: str) -> pl.LazyFrame:
    """Take each line apart by itself. A quote inside a field that does not begin with one stands for itself."""
    # A separator goes before each field, the first too: a match of nothing would hide the field behind it.
    field = f'{separator}(?:"(?:[^"]|"")*"|[^"{separator}][^{separator}]*|)'
    text, count = pl.col(TEXT), pl.col(FIELDS).list.len()
    split = lines.with_row_index(LINE, offset=2).with_columns((separator + text).str.extract_all(field).alias(FIELDS))

    def value(index: int) -> pl.Expr:
        raw = pl.col(FIELDS).list.get(index, null_on_oob=True).str.slice(1)
        inner = raw.str.slice(1, raw.str.len_chars().cast(pl.Int64) - 2).str.replace_all('""', '"', literal=True)
        return pl.when(raw.str.starts_with('"')).then(inner).otherwise(raw)

    fault = (
        pl.when(text.is_null() | (text == ""))
        .then(pl.lit("the line is empty"))
        .when(~(separator + text).str.contains(f"^(?:{field})+$"))
        .then(pl.lit("a quoted field does not end where its line or a separator is; Parquet can hold any text"))
        .when((value(num_columns).fill_null("") != "") | (count <= max(positions.values())))
        .then(pl.format(f"{{}} fields where {num_columns} are expected", count))
        .otherwise(None)
    )
    return split.select(
        LINE, TEXT, fault.alias(FAULT), *(value(index).alias(name) for name, index in positions.items())
    )
