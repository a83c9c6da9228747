"""What ranks compare before anything moves: settings and schemas, once; each batch's schema, in every step."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenrank.dataloader.batch import BatchSchema, JaggedBatch, schema_of
from evenrank.datasets.errors import EvenrankError, RankError


@dataclass(frozen=True, kw_only=True, slots=True)
class Introduction:
    """What a rank says of itself at the start."""

    settings: Mapping[str, str]
    schema: BatchSchema | None  # None if it has no batch
    error: str | None


def in_words(error: BaseException | None) -> str | None:
    """Say what an exception is in one line; None for None."""
    if error is None:
        return None
    if isinstance(error, EvenrankError):  # its message says it all
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def check_agreement(introductions: Sequence[Introduction]) -> BatchSchema | None:
    """Return the schema that all ranks with batches have, None if no rank has any.

    Raises:
        RankError: a rank failed, or two ranks differ; the message names ranks, fields and values.

    """
    raise_failures([one.error for one in introductions])
    for rank, one in enumerate(introductions):
        for name, value in one.settings.items():
            if value != (expected := introductions[0].settings.get(name)):
                raise RankError(f"{name} differs between ranks: {expected} on rank 0, {value} on rank {rank}")
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


def check_schema(batch: JaggedBatch, agreed: BatchSchema) -> None:
    """Compare a batch with the schema that was agreed on at the start.

    Raises:
        ValueError: it differs; the message names the fields.

    """
    if differences := agreed.differences(schema_of(batch)):
        raise ValueError(f"a batch differs from the first one: {'; '.join(differences)}")
