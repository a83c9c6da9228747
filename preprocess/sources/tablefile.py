"""The needed columns of a CSV or Parquet file, and a description of the lines that cannot be read.

Fields of a CSV file may be quoted with `"`, and quotes inside a quoted field are doubled. A quoted field must end on
the line where it starts, so that every line is a row and a malformed line does not affect any other.
"""

import csv
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from evenrank.core.errors import DataError
from evenrank.preprocess.sources.interactions import BadRow
from evenrank.preprocess.sources.read_errors import reading

_SEPARATORS = {".csv": ",", ".csv.gz": ",", ".tsv": "\t"}
_PARQUET = ".parquet"
# Columns that are added to those of the file; the prefix keeps them apart from the file's own names.
IS_WELL_FORMED = "evenrank is_well_formed"
_LINE, _TEXT, _FAULT, _FIELDS = (f"evenrank {name}" for name in ("line", "text", "fault", "fields"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The needed columns of a file."""

    path: Path
    """The file."""
    dtypes: Mapping[str, pl.DataType]
    """Types of the needed columns."""
    num_rows: int
    """Number of rows, bad ones included."""
    rows: pl.LazyFrame
    """The needed columns, and IS_WELL_FORMED: whether a line has the expected fields. In file order."""
    described_rows: pl.LazyFrame
    """The same rows with their line number, their text and the fault of a malformed line; may be slower to read."""

    def find_bad(self, checks: Mapping[str, pl.Expr], limit: int) -> list[BadRow]:
        """Return the first `limit` rows that are malformed or fail a check.

        Args:
            checks: conditions that hold for good rows, by the reason to report where they do not.
            limit: maximum number of rows to return.

        """
        reasons = (pl.when(~check.fill_null(False)).then(pl.lit(reason)) for reason, check in checks.items())
        first_reason = pl.coalesce(_FAULT, *reasons).alias("reason")
        with reading(self.path):
            bad = self.described_rows.select(_LINE, _TEXT, first_reason).drop_nulls("reason").head(limit).collect()
        return [BadRow(line=line, text=text or "", reason=reason) for line, text, reason in bad.iter_rows()]


def open_table(path: Path, names: Sequence[str]) -> Table:
    """Open a file, whose format follows from its suffix; its rows are read lazily.

    Args:
        path: a CSV, gzipped CSV, TSV or Parquet file.
        names: the needed columns.

    Raises:
        DataError: the file is missing, empty, damaged or of an unknown format, or lacks a column.

    """
    suffix = next((known for known in (*_SEPARATORS, _PARQUET) if path.name.lower().endswith(known)), None)
    if suffix is None:
        known = ", ".join((*_SEPARATORS, _PARQUET))
        raise DataError(f"{path} has an unknown suffix; expected one of {known}")
    if not path.is_file():
        raise DataError(f"{path} does not exist or is not a file; check the path")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; create it again")
    table = _open_parquet(path, names) if suffix == _PARQUET else _open_csv(path, names, _SEPARATORS[suffix])
    if table.num_rows == 0:
        raise DataError(f"{path} contains no rows; create it again, or leave it out")
    return table


def _check_columns(path: Path, present: Sequence[str], names: Sequence[str]) -> None:
    for name in names:
        if name not in present:
            raise DataError(f"{path} has no column {name!r}; known: {', '.join(present)}")
        if present.count(name) > 1:
            raise DataError(f"{path} has {present.count(name)} columns {name!r}; rename all but one")


def _open_parquet(path: Path, names: Sequence[str]) -> Table:
    scanned = pl.scan_parquet(path, glob=False)
    with reading(path):
        schema = scanned.collect_schema()
        num_rows = scanned.select(pl.len()).collect().item()
    _check_columns(path, schema.names(), names)
    rows = scanned.select(*names, pl.lit(True).alias(IS_WELL_FORMED))
    text = pl.concat_str(*(pl.col(name).cast(pl.String, strict=False).fill_null("") for name in names), separator=",")
    return Table(
        path=path,
        dtypes={name: schema[name] for name in names},
        num_rows=num_rows,
        rows=rows,
        described_rows=rows.with_columns(text.alias(_TEXT), pl.lit(None, dtype=pl.String).alias(_FAULT)).with_row_index(
            _LINE, offset=1
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
        schema={_TEXT: pl.String},
        encoding="utf8-lossy",
        quote_char=None,
        truncate_ragged_lines=True,
        extra_columns="ignore",
        glob=False,
    ).select(pl.col(_TEXT).str.strip_chars_end("\r"))
    # Polars' CSV reader is several times faster than regular expressions, but its result for unbalanced quotes depends
    # on where it splits the file to read it in parallel; it also drops some carriage returns and rejects some doubled
    # quotes. So it only reads files whose lines are all well-formed and contain none of these.
    field = f'(?:"[^"]*"|[^"\\r{separator}]*)'
    with reading(path):
        num_rows, has_quotes, is_simple = (
            lines.select(
                pl.len().alias("rows"),
                pl.col(_TEXT).str.contains('"', literal=True).any().alias("quotes"),
                pl.col(_TEXT).str.contains(f"^{field}(?:{separator}{field})*$").all().alias("simple"),
            )
            .collect(engine="streaming")
            .row(0)
        )
    described_rows = _parse_lines(lines, positions, len(header), separator)
    if not is_simple:
        rows = described_rows.select(*names, pl.col(_FAULT).is_null().alias(IS_WELL_FORMED))
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
            (pl.col(columns[-1]).fill_null("") == "").alias(IS_WELL_FORMED),
        )
    dtypes: dict[str, pl.DataType] = dict.fromkeys(names, pl.String())
    return Table(path=path, dtypes=dtypes, num_rows=num_rows, rows=rows, described_rows=described_rows)


def _read_header(path: Path, separator: str) -> list[str]:
    with reading(path):
        is_compressed = path.suffix.lower() == ".gz"
        with gzip.open(path) if is_compressed else path.open("rb") as file:
            line = file.readline().decode("utf-8-sig", errors="replace").rstrip("\r\n")
    try:
        return next(csv.reader([line], delimiter=separator, strict=True), [])
    except csv.Error as error:
        raise DataError(f"{path}: the header {line[:80]!r} cannot be parsed ({error}); fix its quotes") from error


def _parse_lines(lines: pl.LazyFrame, positions: Mapping[str, int], num_columns: int, separator: str) -> pl.LazyFrame:
    """Split each line into fields independently. Quotes in a field that starts without one are plain characters."""
    # The pattern for a field includes the separator before it, so that no match is empty: after an empty match, the
    # next field would not be found. The line therefore gets a separator before its first field.
    field = f'{separator}(?:"(?:[^"]|"")*"|[^"{separator}][^{separator}]*|)'
    text, num_fields = pl.col(_TEXT), pl.col(_FIELDS).list.len()
    split = lines.with_row_index(_LINE, offset=2).with_columns((separator + text).str.extract_all(field).alias(_FIELDS))

    def value(index: int) -> pl.Expr:
        raw = pl.col(_FIELDS).list.get(index, null_on_oob=True).str.slice(1)
        inner = raw.str.slice(1, raw.str.len_chars().cast(pl.Int64) - 2).str.replace_all('""', '"', literal=True)
        return pl.when(raw.str.starts_with('"')).then(inner).otherwise(raw)

    fault = (
        pl.when(text.is_null() | (text == ""))
        .then(pl.lit("the line is empty"))
        .when(~(separator + text).str.contains(f"^(?:{field})+$"))
        .then(
            pl.lit("a quoted field does not end at a separator or at the end of the line; Parquet can store any text")
        )
        .when((value(num_columns).fill_null("") != "") | (num_fields <= max(positions.values())))
        .then(pl.format(f"expected {num_columns} fields, got {{}}", num_fields))
        .otherwise(None)
    )
    return split.select(
        _LINE, _TEXT, fault.alias(_FAULT), *(value(index).alias(name) for name, index in positions.items())
    )
