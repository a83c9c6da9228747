"""A raw CSV file as events: read fast with types, and read again line by line where rows turn out bad."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from evenrank.core.errors import DataError
from evenrank.preprocess.sources.interactions import IS_GOOD, BadRow, EventPart

_TOO_MANY = "fields beyond the last"


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvEvents:
    """How a CSV file becomes events."""

    path: Path
    columns: Mapping[str, type[pl.DataType]]  # all columns of the file, in its order; unused ones as pl.String
    has_header: bool  # the first line names the columns, exactly so
    separator: str = ","
    events: Sequence[pl.Expr]  # of the columns: user_id, item_id, action, timestamp_ms, extra ones
    checks: Mapping[str, pl.Expr]  # words that complete "line 7: ...", and what is true of a good row of `columns`

    def part(self) -> EventPart:
        """Open the file.

        Raises:
            DataError: it is missing or empty, or its header is another one.

        """
        self._check_header()
        return EventPart(
            name=str(self.path), size=self.path.stat().st_size, events=self._scan(), find_bad=self._find_bad
        )

    def _check_header(self) -> None:
        expected = self.separator.join(self.columns)
        try:
            with self.path.open(encoding="utf-8-sig", errors="replace") as file:
                first_line = file.readline().rstrip("\r\n")
                first_row = file.readline() if self.has_header else first_line
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from error
        if self.has_header and first_line != expected:
            raise DataError(
                f"{self.path} begins with {first_line[:80]!r} where {expected!r} is expected; is it another file?"
            )
        if not first_row:
            raise DataError(f"{self.path} holds no event; unpack or download it again")

    def _scan(self) -> pl.LazyFrame:
        # A separator of two characters, `::`, is read as one of them with an empty column between each two fields; the
        # last column catches a field too many.
        gaps = len(self.separator) - 1
        schema: dict[str, type[pl.DataType]] = {}
        for name, dtype in self.columns.items():
            if schema:
                schema.update({f"gap before {name} {gap}": pl.String for gap in range(gaps)})
            schema[name] = dtype
        schema[_TOO_MANY] = pl.String
        empty = [pl.col(name).is_null() for name in schema if name not in self.columns]
        return pl.scan_csv(
            self.path,
            separator=self.separator[0],
            has_header=False,
            skip_lines=int(self.has_header),
            schema=schema,
            missing_columns="insert",
            ignore_errors=True,  # what cannot be read is null, and no good row has a null
            truncate_ragged_lines=True,  # one field too many is enough to know
            extra_columns="ignore",
            glob=False,
            quote_char=None,
        ).select(*self.events, pl.all_horizontal(*self.checks.values(), *empty).fill_null(False).alias(IS_GOOD))

    def _find_bad(self, limit: int) -> list[BadRow]:
        names = list(self.columns)
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
        read = lines.with_columns(fields.list.len().alias("count")).with_columns(
            fields.list.get(index, null_on_oob=True).cast(dtype, strict=False).alias(name)
            for index, (name, dtype) in enumerate(self.columns.items())
        )
        reasons = [
            pl.when(pl.col("count") != len(names)).then(
                pl.format(f"{{}} fields where {len(names)} are expected", pl.col("count"))
            ),
            *(pl.when(~check.fill_null(False)).then(pl.lit(words)) for words, check in self.checks.items()),
        ]
        first = pl.coalesce(*reasons).alias("reason")
        bad = read.select("line", "text", first).filter(pl.col("reason").is_not_null())
        return [
            BadRow(line=line, text=(text or "").rstrip("\r"), reason=words)
            for line, text, words in bad.head(limit).collect().iter_rows()
        ]


def integer(name: str) -> dict[str, pl.Expr]:
    """Return the check that a column holds a 64-bit whole number."""
    return {f"{name} is not a 64-bit number": pl.col(name).is_not_null()}
