from itertools import chain

import polars as pl

from evenrank.preprocess.files.table import EventPart, Events


def read_part(part: EventPart) -> Events:
    """Return all events of a part at once, and the first bad rows of each of its blocks."""
    blocks = [*part.read()]
    good = pl.concat([block.good for block in blocks])
    return Events(good, sum(block.num_bad for block in blocks), [*chain(*(block.first_bad for block in blocks))])
