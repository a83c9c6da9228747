"""The events of a dataset -> buckets, batch by batch; rows that cannot be read raise an error, or are counted."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import polars as pl

from evenrank.core.errors import DataError
from evenrank.preprocess.build.buckets import Buckets
from evenrank.preprocess.sources.interactions import IS_GOOD, EventPart, Interactions
from evenrank.preprocess.sources.read_errors import reading

# What to do about rows that cannot be read.
OnError = Literal["fail", "skip"]

_BATCH_EVENTS = 1_000_000
_MAX_SHOWN = 3  # bad rows in an error message


def fill_buckets(
    buckets: Buckets, interactions: Interactions, *, on_error: OnError, on_stage: Callable[[str], None]
) -> dict[str, int]:
    """Read all events into buckets.

    Args:
        buckets: receive the events.
        interactions: the source of the events.
        on_error: what to do about rows that cannot be read: raise an error at the end of their file, or skip them.
        on_stage: called with a short description of the progress.

    Returns:
        The number of skipped rows of each part that has any; the keys describe the first of these rows.

    Raises:
        DataError: rows cannot be read and `on_error` is `fail`; or there are no events.

    """
    num_skipped: dict[str, int] = {}
    num_events = 0
    for part in interactions.parts:
        num_bad = 0
        for batch in _batches(part):
            is_good = batch.get_column(IS_GOOD)
            good = batch if is_good.all() else batch.filter(is_good)
            num_bad += len(batch) - len(good)
            buckets.append({name: good.get_column(name).to_numpy() for name in batch.columns if name != IS_GOOD})
            num_events += len(good)
            on_stage(f"reading {part.name}: {num_events:,} events")
        if num_bad and on_error == "fail":
            raise DataError(f"{part.name}: {_describe(part, num_bad)}; fix them, or skip them with --on-error skip")
        if num_bad:
            # The file name without its folder, so that the manifest does not depend on the machine.
            num_skipped[f"{Path(part.name).name}: {_describe(part, num_bad)}"] = num_bad
    if num_events == 0:
        names = ", ".join(part.name for part in interactions.parts)
        raise DataError(f"{names}: no events could be read; check the file, or unpack or download it again")
    return num_skipped


def _batches(part: EventPart) -> Iterator[pl.DataFrame]:
    with reading(part.name):
        yield from part.events.collect_batches(chunk_size=_BATCH_EVENTS, maintain_order=True)


def _describe(part: EventPart, num_bad: int) -> str:
    rows = part.find_bad(_MAX_SHOWN)
    shown = "; ".join(f"line {row.line} ({row.text[:80]!r}): {row.reason}" for row in rows)
    return f"{num_bad:,} bad row{'s' if num_bad > 1 else ''}, first {shown}"
