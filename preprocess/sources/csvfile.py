"""A raw CSV file as events: parsed fast with types, and parsed again line by line to describe bad rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from evenrank.core.errors import DataError
from evenrank.preprocess.sources.interactions import IS_GOOD, BadRow, EventPart
from evenrank.preprocess.sources.read_errors import reading

_EXTRA_FIELDS = "fields after the last column"


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvEvents:
    """How to turn a CSV file into events."""

    path: Path
    """The file."""
    columns: Mapping[str, type[pl.DataType]]
    """All columns of the file, in file order; those that are not used as pl.String."""
    has_header: bool
    """Whether the first line contains exactly the names of `columns`."""
    separator: str = ","
    """Separator between fields: one character, or one character repeated."""
    events: Sequence[pl.Expr]
    """Expressions over `columns`: user_id, item_id, action, timestamp_ms and extra columns."""
    checks: Mapping[str, pl.Expr]
    """Conditions over `columns` that hold for good rows, by the reason to report where they do not."""

    def part(self) -> EventPart:
        """Check the start of the file and return its events, to be read lazily.

        Raises:
            DataError: the file is missing or empty, or has an unexpected header.

        """
        self._check_header()
        return EventPart(
            name=str(self.path), size=self.path.stat().st_size, events=self._scan(), find_bad=self._find_bad
        )

    def _check_header(self) -> None:
        expected = self.separator.join(self.columns)
        with reading(self.path), self.path.open(encoding="utf-8-sig", errors="replace") as file:
            first_line = file.readline().rstrip("\r\n")
            first_row = file.readline() if self.has_header else first_line
        if self.has_header and first_line != expected:
            raise DataError(
                f"{self.path} starts with {first_line[:80]!r}, expected {expected!r}; check that it is the right file"
            )
        if not first_row:
            raise DataError(f"{self.path} contains no events; unpack or download it again")

    def _scan(self) -> pl.LazyFrame:
        # A separator of two characters, `::`, is parsed as `:` with an empty column between any two fields. The last
        # column receives a superfluous field.
        num_gaps = len(self.separator) - 1
        schema: dict[str, type[pl.DataType]] = {}
        for name, dtype in self.columns.items():
            if schema:
                schema.update({f"gap before {name} {gap}": pl.String for gap in range(num_gaps)})
            schema[name] = dtype
        schema[_EXTRA_FIELDS] = pl.String
        are_empty = [pl.col(name).is_null() for name in schema if name not in self.columns]
        return pl.scan_csv(
            self.path,
            separator=self.separator[0],
            has_header=False,
            skip_lines=int(self.has_header),
            schema=schema,
            missing_columns="insert",
            ignore_errors=True,  # fields that cannot be parsed become null, and good rows contain no null
            truncate_ragged_lines=True,  # one superfluous field is enough to mark a row as bad
            extra_columns="ignore",
            glob=False,
            quote_char=None,
        ).select(*self.events, pl.all_horizontal(*self.checks.values(), *are_empty).fill_null(False).alias(IS_GOOD))

    def _find_bad(self, limit: int) -> list[BadRow]:
        lines = pl.scan_csv(
            self.path,
            separator="\0",
            extra_columns="ignore",
            glob=False,
            has_header=False,
            skip_lines=int(self.has_header),
            schema={"text": pl.String},
            encoding="utf8-lossy",
            quote_char=None,
            truncate_ragged_lines=True,
        ).with_row_index("line", offset=1 + int(self.has_header))
        fields = pl.col("text").str.strip_chars_end("\r").str.split(self.separator)
        rows = lines.with_columns(fields.list.len().alias("num_fields")).with_columns(
            fields.list.get(index, null_on_oob=True).cast(dtype, strict=False).alias(name)
            for index, (name, dtype) in enumerate(self.columns.items())
        )
        reasons = [
            pl.when(pl.col("num_fields") != len(self.columns)).then(
                pl.format(f"expected {len(self.columns)} fields, got {{}}", pl.col("num_fields"))
            ),
            *(pl.when(~check.fill_null(False)).then(pl.lit(reason)) for reason, check in self.checks.items()),
        ]
        first_reason = pl.coalesce(*reasons).alias("reason")
        bad = rows.select("line", "text", first_reason).filter(pl.col("reason").is_not_null())
        return [
            BadRow(line=line, text=(text or "").rstrip("\r"), reason=reason)
            for line, text, reason in bad.head(limit).collect().iter_rows()
        ]


def integer_check(name: str) -> dict[str, pl.Expr]:
    """Return the check that a column contains 64-bit integers, keyed by the reason to report."""
    return {f"{name} is not a 64-bit integer": pl.col(name).is_not_null()}
