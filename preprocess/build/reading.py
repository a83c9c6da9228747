"""All parts of a dataset -> buckets, batch by batch; rows that cannot be read end the job, or are counted."""

from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl

from evenrank.core.errors import DataError
from evenrank.preprocess.build.buckets import Buckets
from evenrank.preprocess.sources.interactions import IS_GOOD, EventPart, Interactions

FAIL = "fail"
SKIP = "skip"

_BATCH_EVENTS = 1_000_000
# Bad rows that a message shows.
_SHOWN = 3


def fill_buckets(
    buckets: Buckets, interactions: Interactions, *, on_error: str, on_stage: Callable[[str], None]
) -> dict[str, int]:
    """Read all events.

    Args:
        buckets: take them.
        interactions: where they are.
        on_error: `fail` or `skip`: what to do about rows that cannot be read.
        on_stage: called with a few words now and then.

    Returns:
        How many rows of each part were left out, for parts with any; the key is a sentence with their first lines.

    Raises:
        DataError: with the count and the first lines of what cannot be read; or there is no event at all.

    """
    left_out: dict[str, int] = {}
    count = 0
    for part in interactions.parts:
        bad = 0
        for batch in _batches(part):
            is_good = batch.get_column(IS_GOOD)
            good = batch if is_good.all() else batch.filter(is_good)
            bad += len(batch) - len(good)
            buckets.append({name: good.get_column(name).to_numpy() for name in batch.columns if name != IS_GOOD})
            count += len(good)
            on_stage(f"reading {part.name}: {count:,} events")
        if bad and on_error == FAIL:
            raise DataError(f"{part.name}: {_describe(part, bad)}; mend them, or leave them out with --on-error skip")
        if bad:
            # Without the folder: the manifest does not depend on the machine.
            left_out[f"{Path(part.name).name}: {_describe(part, bad)}"] = bad
    if count == 0:
        names = ", ".join(part.name for part in interactions.parts)
        raise DataError(f"{names}: no event could be read; check the file, or unpack or download it again")
    return left_out


def _batches(part: EventPart) -> Iterator[pl.DataFrame]:
    try:
        yield from part.events.collect_batches(chunk_size=_BATCH_EVENTS, maintain_order=True)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{part.name} cannot be read: {str(error).splitlines()[0]}; is it whole?") from error


def _describe(part: EventPart, bad: int) -> str:
    rows = part.find_bad(_SHOWN)
    shown = "; ".join(f"line {row.line} ({row.text[:80]!r}): {row.reason}" for row in rows)
    return f"{bad:,} bad row{'s' if bad > 1 else ''}, first {shown}"
