"""What ranks compare before anything moves, so that a difference is an error on every rank, and never a hang."""

import itertools
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np

from evenrank.core.errors import EvenrankError, RankError
from evenrank.dataloader.balance.control.wire import StepSizes
from evenrank.dataloader.batch import BatchSchema, JaggedBatch, check_contents, schema_of
from evenrank.dataloader.pad import empty_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Introduction:
    """What a rank says of its batches before the first step."""

    schema: BatchSchema | None  # None if it has no batch
    error: str | None


def introduce(batch: JaggedBatch | None, error: Exception | None) -> Introduction:
    """Describe a rank's first batch, or why there is none."""
    schema = None
    if batch is not None and error is None:
        try:
            schema = schema_of(batch)
            pickle.dumps(schema)
            empty_batch(schema)  # a rank whose data run out needs one
        except Exception as raised:  # all ranks are told of it
            schema, error = None, raised
    return Introduction(schema=schema, error=in_words(error))


def in_words(error: BaseException | None) -> str | None:
    """Say what an exception is in one line; None for None."""
    if error is None:
        return None
    text = " ".join(str(error).split())
    if isinstance(error, EvenrankError):  # its message says it all
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def describe_cost(cost: object) -> str:
    """Describe a cost so that equal ones read the same in all processes."""
    text = repr(cost) if is_dataclass(cost) else getattr(cost, "__qualname__", type(cost).__qualname__)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def check_settings(everybody: Sequence[Mapping[str, Any]]) -> None:
    """Compare what each rank was told.

    Args:
        everybody: per rank, settings by name. `rank`, where it is given, has to be the rank's own; all else the same.

    Raises:
        RankError: the message names the setting, two ranks and their values.

    """
    for rank, settings in enumerate(everybody):
        if settings.get("rank", rank) != rank:
            raise RankError(f"the loader of rank {rank} was built for rank {settings['rank']}; pass each its own rank")
        for name in dict.fromkeys([*everybody[0], *settings]):
            first, value = everybody[0].get(name), settings.get(name)
            if name != "rank" and value != first:
                raise RankError(f"{name} differs between ranks: {first} on rank 0, {value} on rank {rank}")


def check_introductions(introductions: Sequence[Introduction]) -> BatchSchema | None:
    """Return the schema that all ranks with batches have, None if no rank has any.

    Raises:
        RankError: a rank failed, or two ranks differ; the message names ranks, fields and values.

    """
    raise_failures([one.error for one in introductions])
    known = [(rank, one.schema) for rank, one in enumerate(introductions) if one.schema is not None]
    for (rank, schema), (other_rank, other) in itertools.pairwise(known):
        if differences := schema.differences(other):
            raise RankError(f"batches differ between rank {rank} and rank {other_rank}: {'; '.join(differences)}")
    return known[0][1] if known else None


def raise_failures(words: Sequence[str | None]) -> None:
    """Raise what the ranks say of their errors, if any has one.

    Raises:
        RankError: with the words of each rank that failed.

    """
    if failures := [f"rank {rank} failed: {text}" for rank, text in enumerate(words) if text is not None]:
        raise RankError("; ".join(failures))


def check_batch(batch: JaggedBatch, agreed: BatchSchema) -> None:
    """Compare a batch with the schema that was agreed on at the start, and its lengths with its contents.

    Raises:
        ValueError: it differs, or does not add up; the message names the fields.

    """
    if differences := agreed.differences(schema_of(batch)):
        raise ValueError(f"a batch differs from the first one: {'; '.join(differences)}")
    check_contents(batch)


def check_headers(sizes: StepSizes) -> None:
    """Check that all ranks that have data are in the same step of the same epoch.

    Raises:
        RankError: they are not; the message names two ranks and where they are.

    """
    known = np.flatnonzero(sizes.header("ended") == 0)
    for name in ("schema_hash", "epoch", "step", "position"):
        words = sizes.header(name)[known]
        changes = np.flatnonzero(words[1:] != words[:-1])
        if len(changes):
            at = int(changes[0])
            raise RankError(
                f"ranks have left the common path: {name} is {words[at]} on rank {known[at]}, {words[at + 1]} on rank "
                f"{known[at + 1]}; iterate over the same epochs, load the same state, and leave loops at the same step "
                "on all ranks"
            )
