"""A raw CSV file as events: parsed fast with types where all rows of a block are good, and strictly elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import DataError
from evenrank.preprocess.sources.interactions import IS_GOOD, BadRow, EventPart
from evenrank.preprocess.sources.read_errors import reading
from evenrank.preprocess.sources.textlines import LINE, NUL_FAULT, TEXT, Block, read_blocks, read_header, scan_blocks

_FAULT = "evenrank fault"


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
        no_rows = pl.LazyFrame(schema=self.columns).select(*self.events, self._is_good())
        events = scan_blocks(
            self.path, has_header=self.has_header, schema=no_rows.collect_schema(), parse=self._parse_events
        )
        return EventPart(name=str(self.path), size=self.path.stat().st_size, events=events, find_bad=self._find_bad)

    def _check_header(self) -> None:
        expected = self.separator.join(self.columns)
        with reading(self.path):
            if self.has_header and (header := read_header(self.path)) != expected:
                raise DataError(
                    f"{self.path} starts with {header[:80]!r}, expected {expected!r}; check that it is the right file"
                )
            if next(read_blocks(self.path, has_header=self.has_header), None) is None:
                raise DataError(f"{self.path} contains no events; unpack or download it again")

    def _is_good(self) -> pl.Expr:
        return pl.all_horizontal(*self.checks.values()).fill_null(False).alias(IS_GOOD)

    def _parse_events(self, block: Block) -> pl.DataFrame:
        # As good rows have a value in the last column, a block with as many separators as they need has no others.
        num_separators = (len(self.columns) - 1) * len(self.separator) * block.num_lines()
        if _count_separators(np.frombuffer(block.data, dtype=np.uint8), ord(self.separator[0])) == num_separators:
            events = self._parse_quickly(block)
            if events.get_column(IS_GOOD).all():
                return events
        is_good = pl.col(_FAULT).is_null().alias(IS_GOOD)
        return self._parse_strictly(block).select(*self.events, is_good)

    def _parse_quickly(self, block: Block) -> pl.DataFrame:
        """Parse a block with Polars' CSV reader; what it makes of bad rows depends on the rows before them."""
        # A separator of two characters, `::`, is parsed as `:` with an empty column between any two fields.
        num_gaps = len(self.separator) - 1
        schema: dict[str, type[pl.DataType]] = {}
        for name, dtype in self.columns.items():
            if schema:
                schema.update({f"gap before {name} {gap}": pl.String for gap in range(num_gaps)})
            schema[name] = dtype
        gaps_are_empty = [pl.col(name).is_null() for name in schema if name not in self.columns]
        events = pl.scan_csv(
            block.data,
            separator=self.separator[0],
            has_header=False,
            schema=schema,
            missing_columns="insert",
            ignore_errors=True,  # fields that cannot be parsed become null, and good rows contain no null
            truncate_ragged_lines=True,
            extra_columns="ignore",
            quote_char=None,
        )
        is_good = pl.all_horizontal(self._is_good(), *gaps_are_empty).alias(IS_GOOD)
        return events.select(*self.events, is_good).collect()

    def _parse_strictly(self, block: Block) -> pl.DataFrame:
        """Split each line independently; return LINE, TEXT, _FAULT and all columns of the file."""
        fields = pl.col(TEXT).str.split(self.separator)
        rows = block.lines().with_columns(
            fields.list.get(index, null_on_oob=True).cast(dtype, strict=False).alias(name)
            for index, (name, dtype) in enumerate(self.columns.items())
        )
        num_fields = fields.list.len()
        faults = [
            pl.when(pl.col(TEXT).str.contains("\0", literal=True)).then(pl.lit(NUL_FAULT)),
            pl.when(num_fields != len(self.columns)).then(
                pl.format(f"expected {len(self.columns)} fields, got {{}}", num_fields)
            ),
            *(pl.when(~check.fill_null(False)).then(pl.lit(reason)) for reason, check in self.checks.items()),
        ]
        return rows.with_columns(pl.coalesce(faults).alias(_FAULT))

    def _find_bad(self, limit: int) -> list[BadRow]:
        bad: list[BadRow] = []
        for block in read_blocks(self.path, has_header=self.has_header):
            rows = self._parse_strictly(block).select(LINE, TEXT, _FAULT).drop_nulls(_FAULT).head(limit - len(bad))
            bad += [BadRow(line=line, text=text, reason=reason) for line, text, reason in rows.iter_rows()]
            if len(bad) == limit:
                break
        return bad


@compiled
def _count_separators(data: NDArray[np.uint8], separator: int) -> int:
    """Return the number of separators in data, uint8 [n]; -1 if it is not made up of numbers.

    These consist of digits and the characters from `,` to `:`. Polars' reader trims blanks.
    """
    num_separators = num_others = 0
    for value in data:
        num_separators += value == separator
        num_others += not (value == 10 or 44 <= value <= 58)
    return -1 if num_others else num_separators


def integer_check(name: str) -> dict[str, pl.Expr]:
    """Return the check that a column contains 64-bit integers, keyed by the reason to report."""
    return {f"{name} is not an integer in -2^63..2^63-1": pl.col(name).is_not_null()}
