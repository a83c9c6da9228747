from itertools import chain
from typing import NamedTuple

import polars as pl

from evenrank.preprocess.read.table import BadRow, EventPart


class Read(NamedTuple):
    good: pl.DataFrame
    last_line: int
    bad: list[BadRow]


def read_part(part: EventPart) -> Read:
    """Return all events of a part at once, and the bad rows of its blocks, whose lines are those of each piece."""
    blocks = [*chain.from_iterable(map(part.read, part.pieces))]
    bad = [BadRow._make(row) for block in blocks for row in block.bad.iter_rows()]
    return Read(pl.concat([block.good for block in blocks]), blocks[-1].last_line, bad)
