from itertools import chain

import polars as pl

from evenrank.preprocess.read.table import EventPart, Events


def read_part(part: EventPart) -> Events:
    """Return all events of a part at once, and the first bad rows of each of its blocks."""
    blocks = [*chain.from_iterable(map(part.read, part.pieces))]
    good, last_line = pl.concat([block.good for block in blocks]), blocks[-1].last_line
    first_bad = [*chain(*(block.first_bad for block in blocks))]
    return Events(good, last_line, sum(block.num_bad for block in blocks), first_bad)
