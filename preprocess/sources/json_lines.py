"""JSON lines -> rows: one object per line, whose needed values become text."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from evenrank.preprocess.sources.interactions import IS_WELL_FORMED, LINE, TEXT
from evenrank.preprocess.sources.text_blocks import Block, is_utf8, line_fault

_IS_OBJECT = "evenrank is_object"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonLayout:
    """Parses lines with one object each. Integers keep their digits; 1.50 becomes 1.5, and null stays null."""

    dtypes: Mapping[str, pl.DataType]  # of the needed keys: String

    def parse_quickly(self, block: Block) -> pl.DataFrame | None:
        """Return the needed keys and IS_WELL_FORMED; None if a line is no object, or may be none."""
        # Polars reads half a surrogate pair as NUL.
        if b"\0" in block.data or _SURROGATE.search(block.data):
            return None
        rows = self._read(bytes(block.data), block.num_lines)
        return None if rows is None else rows.with_columns(is_utf8(self.dtypes).alias(IS_WELL_FORMED))

    def parse_strictly(self, block: Block) -> pl.DataFrame:
        """Parse each line independently; return LINE, TEXT, FAULT and the needed keys."""
        lines, rows = block.lines(), self.parse_quickly(block)
        if rows is None:
            # Another parser, which does not stop at an invalid line, leaves few of them to search for.
            is_likely = pl.col(TEXT).str.json_path_match("$").str.starts_with("{")
            rows = self._read_each(lines.select(pl.when(is_likely).then(TEXT).otherwise(pl.lit(""))).to_series())
        else:
            rows = rows.with_columns(pl.lit(True).alias(_IS_OBJECT))
        fault = pl.when(~pl.col(_IS_OBJECT)).then(pl.lit("the line is not a JSON object"))
        described = pl.concat([lines, rows], how="horizontal")
        return described.select(LINE, TEXT, line_fault(fault, self.dtypes), *self.dtypes)

    def _read(self, data: bytes, num_lines: int) -> pl.DataFrame | None:
        try:
            rows = pl.read_ndjson(data, schema=dict(self.dtypes)).select(*self.dtypes)
        except pl.exceptions.PolarsError:
            return None
        return rows if len(rows) == num_lines else None  # empty lines are skipped

    def _read_each(self, lines: pl.Series) -> pl.DataFrame:
        """Read lines that are objects or empty; only few others."""
        text = lines.replace("", "{}").str.join("\n").item()
        if (rows := self._read(f"{text}\n".encode(), len(lines))) is not None:
            return rows.with_columns((lines != "").alias(_IS_OBJECT))
        if len(lines) == 1:
            return self._read_each(pl.Series([""]))
        half = len(lines) // 2
        return pl.concat([self._read_each(lines[:half]), self._read_each(lines[half:])])
