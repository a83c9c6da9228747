"""The needed columns of a CSV or Parquet file, and a description of the lines that cannot be read.

Fields of a CSV file may be quoted with `"`, and quotes inside a quoted field are doubled. A quoted field must end on
the line where it starts, so that every line is a row and a malformed line does not affect any other.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from evenrank.core.errors import DataError
from evenrank.preprocess.sources.interactions import BadRow
from evenrank.preprocess.sources.read_errors import reading
from evenrank.preprocess.sources.textlines import LINE, NUL_FAULT, TEXT, Block, count_lines, read_header, scan_blocks

_SEPARATORS = {".csv": ",", ".csv.gz": ",", ".tsv": "\t"}
_PARQUET = ".parquet"
# Columns that are added to those of the file; the prefix keeps them apart from the file's own names.
IS_WELL_FORMED = "evenrank is_well_formed"
_FAULT, _FIELDS = "evenrank fault", "evenrank fields"


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
        bad = self.described_rows.select(LINE, TEXT, first_reason).drop_nulls("reason").head(limit)
        with reading(self.path):
            rows = bad.collect(engine="streaming")  # which stops at the limit
        return [BadRow(line=line, text=text or "", reason=reason) for line, text, reason in rows.iter_rows()]


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
        described_rows=rows.with_columns(text.alias(TEXT), pl.lit(None, dtype=pl.String).alias(_FAULT)).with_row_index(
            LINE, offset=1
        ),
    )


def _open_csv(path: Path, names: Sequence[str], separator: str) -> Table:
    with reading(path):
        header = _parse_header(path, separator)
        num_rows = count_lines(path)
    _check_columns(path, header, names)
    layout = _Layout(
        separator=separator, num_columns=len(header), positions={name: header.index(name) for name in names}
    )
    dtypes: dict[str, pl.DataType] = dict.fromkeys(names, pl.String())
    described = {LINE: pl.Int64(), TEXT: pl.String(), _FAULT: pl.String(), **dtypes}
    return Table(
        path=path,
        dtypes=dtypes,
        num_rows=num_rows,
        rows=scan_blocks(path, has_header=True, schema={**dtypes, IS_WELL_FORMED: pl.Boolean()}, parse=layout.parse),
        described_rows=scan_blocks(path, has_header=True, schema=described, parse=layout.parse_strictly),
    )


def _parse_header(path: Path, separator: str) -> list[str]:
    line = read_header(path)
    try:
        return next(csv.reader([line], delimiter=separator, strict=True), [])
    except csv.Error as error:
        raise DataError(f"{path}: the header {line[:80]!r} cannot be parsed ({error}); fix its quotes") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """How the lines of a CSV file are divided into fields."""

    separator: str
    num_columns: int
    """Number of columns of the file."""
    positions: Mapping[str, int]
    """Positions of the needed columns among them."""

    def parse(self, block: Block) -> pl.DataFrame:
        """Return the needed columns of a block and IS_WELL_FORMED."""
        if self._is_simple(block):
            return self._parse_quickly(block)
        rows = self.parse_strictly(block)
        return rows.select(*self.positions, pl.col(_FAULT).is_null().alias(IS_WELL_FORMED))

    def _is_simple(self, block: Block) -> bool:
        """Return whether Polars' CSV reader divides the lines of a block as `parse_strictly` does.

        It is several times faster than regular expressions. But its result for unbalanced quotes depends on where it
        splits its input to read it in parallel; it also drops some carriage returns, rejects some doubled quotes, and
        takes a byte order mark for one wherever its input begins.
        """
        data = block.data
        if b"\0" in data or b"\r" in data or data.startswith(b"\xef\xbb\xbf"):
            return False
        if b'"' not in data:
            return True
        field = f'(?:"[^"\n]*"|[^"\n{self.separator}]*)'
        return bool(pl.Series([data.decode()]).str.contains(f"^(?:{field}(?:{self.separator}{field})*\n)*$").item())

    def _parse_quickly(self, block: Block) -> pl.DataFrame:
        columns = [f"column {index}" for index in range(self.num_columns + 1)]
        native = pl.scan_csv(
            # The empty first line, which is skipped, keeps the reader from taking the first bytes for those of a
            # compressed file.
            b"\n" + block.data,
            separator=self.separator,
            has_header=False,
            skip_lines=1,
            schema=dict.fromkeys(columns, pl.String),
            missing_columns="insert",
            truncate_ragged_lines=True,
            extra_columns="ignore",
            quote_char='"' if b'"' in block.data else None,
        )
        values = (pl.col(columns[index]).alias(name) for name, index in self.positions.items())
        return native.select(*values, (pl.col(columns[-1]).fill_null("") == "").alias(IS_WELL_FORMED)).collect()

    def parse_strictly(self, block: Block) -> pl.DataFrame:
        """Divide each line into fields independently; return LINE, TEXT, _FAULT and the needed columns.

        Quotes in a field that starts without one are plain characters.
        """
        # The pattern for a field includes the separator before it, so that no match is empty: after an empty match, the
        # next field would not be found. The line therefore gets a separator before its first field.
        separator = self.separator
        field = f'{separator}(?:"(?:[^"]|"")*"|[^"{separator}][^{separator}]*|)'
        text, num_fields = pl.col(TEXT), pl.col(_FIELDS).list.len()

        def value(index: int) -> pl.Expr:
            raw = pl.col(_FIELDS).list.get(index, null_on_oob=True).str.slice(1)
            inner = raw.str.slice(1, raw.str.len_chars().cast(pl.Int64) - 2).str.replace_all('""', '"', literal=True)
            return pl.when(raw.str.starts_with('"')).then(inner).otherwise(raw)

        fault = (
            pl.when(text == "")
            .then(pl.lit("the line is empty"))
            .when(text.str.contains("\0", literal=True))
            .then(pl.lit(NUL_FAULT))
            .when(~(separator + text).str.contains(f"^(?:{field})+$"))
            .then(
                pl.lit(
                    "a quoted field does not end at a separator or at the end of the line; Parquet can store any text"
                )
            )
            .when((value(self.num_columns).fill_null("") != "") | (num_fields <= max(self.positions.values())))
            .then(pl.format(f"expected {self.num_columns} fields, got {{}}", num_fields))
            .otherwise(None)
        )
        fields = block.lines().with_columns((separator + text).str.extract_all(field).alias(_FIELDS))
        values = (value(index).alias(name) for name, index in self.positions.items())
        return fields.select(LINE, TEXT, fault.alias(_FAULT), *values)
