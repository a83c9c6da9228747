"""Consistency checks between ranks, before anything moves: a difference is an error on every rank, never a hang."""

import dataclasses
import itertools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from evenrank.core.errors import ConfigError, RankError, one_line
from evenrank.dataloader.balance.ranks.metadata import MAX_RANKS_OF_FLAT_ALL_GATHER, StepMetadata
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.padding import empty_batch
from evenrank.dataloader.batches.schema import BatchSchema, check_contents, schema_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What a rank reports when its Balancer is created."""

    error: str | None
    """Why it cannot be created, in one line; None if it can."""

    settings: Mapping[str, Any]
    """The settings that must be the same on all ranks, by name."""

    hardware: str | None
    """Identifies the device if no other rank can use it."""

    num_batches: int | None
    """Batches of an epoch of its loader, if the loader knows."""

    host: str
    """Name of its host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandshakeResult:
    """What ranks have settled when their Balancers are created."""

    num_steps: int | None
    """Steps of an epoch: the batches of the rank with the most; None if a loader does not know."""

    hosts: tuple[str, ...] | None
    """Host name of each rank if the all-gather is hierarchical."""


def validate_reports(reports: Sequence[RankReport]) -> HandshakeResult:
    """Return what all ranks handshake.

    Raises:
        RankError: a rank failed, or ranks are inconsistent.

    """
    raise_reported_errors([report.error for report in reports])
    check_settings([report.settings for report in reports])
    rank_of_device: dict[str, int] = {}
    for rank, report in enumerate(reports):
        if report.hardware is not None and (other := rank_of_device.setdefault(report.hardware, rank)) != rank:
            raise RankError(
                f"ranks {other} and {rank} use the same GPU of host {report.host}; call "
                "torch.cuda.set_device(local_rank) first, or pass each rank its own device"
            )
    numbers = [report.num_batches for report in reports if report.num_batches is not None]
    return HandshakeResult(
        num_steps=max(numbers) if len(numbers) == len(reports) else None,
        hosts=tuple(report.host for report in reports) if len(reports) > MAX_RANKS_OF_FLAT_ALL_GATHER else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemaReport:
    """What a rank reports of its batches before the first step."""

    schema: BatchSchema | None
    """Schema of its first batch; None if it has none."""

    error: str | None
    """What its loader raised instead, in one line."""


def report_schema(batch: JaggedBatch | None, error: Exception | None) -> SchemaReport:
    """Return the report on a rank's first batch, or on why there is none."""
    schema = None
    if batch is not None and error is None:
        try:
            schema = schema_of(batch)
            pickle.dumps(schema)
            empty_batch(schema)  # needed once this rank has no more batches
        except Exception as raised:  # reported to all ranks
            schema, error = None, raised
    return SchemaReport(schema=schema, error=None if error is None else one_line(error))


def check_settings(settings_of_ranks: Sequence[Mapping[str, Any]]) -> None:
    """Check that all ranks have the same settings.

    Args:
        settings_of_ranks: per rank, settings by name. `rank`, if present, must be the rank itself; all others must be
            equal.

    Raises:
        RankError: they differ; the message names the setting, two ranks and their values.

    """
    for rank, settings in enumerate(settings_of_ranks):
        if settings.get("rank", rank) != rank:
            raise RankError(
                f"the loader of rank {rank} was created for rank {settings['rank']}; pass each rank its own number"
            )
        for name in dict.fromkeys([*settings_of_ranks[0], *settings]):
            first, value = settings_of_ranks[0].get(name), settings.get(name)
            if name != "rank" and value != first:
                raise RankError(f"{name} differs between ranks: {first} on rank 0, {value} on rank {rank}")


def gather_checked(settings: Mapping[str, Any], value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks, after checking that they have the same settings.

    Collective: every rank must call this.

    Args:
        settings: of this rank, by name; see `check_settings`.
        value: of this rank; settings and value can be pickled.
        group: the ranks; None: this process alone.

    Raises:
        RankError: settings differ; on every rank.

    """
    if group is None:
        return [value]
    reports: list[Any] = [None] * group.size()
    dist.all_gather_object(reports, (dict(settings), value), group)
    check_settings([settings for settings, _ in reports])
    return [of_rank for _, of_rank in reports]


def common_schema(reports: Sequence[SchemaReport], batch_size: int | None = None) -> BatchSchema | None:
    """Return the schema of all ranks that have batches; None if no rank has any.

    Args:
        reports: of all ranks, none of which failed.
        batch_size: of the schema; None: that of the longest batch.

    Raises:
        RankError: two ranks differ; the message names ranks, fields and values.

    """
    known = [(rank, report.schema) for rank, report in enumerate(reports) if report.schema is not None]
    if batch_size is None:
        batch_size = max((schema.batch_size for _, schema in known if schema.batch_size), default=1)
    known = [(rank, dataclasses.replace(schema, batch_size=batch_size)) for rank, schema in known]
    for (rank, schema), (other_rank, other) in itertools.pairwise(known):
        if differences := schema.differences(other):
            raise RankError(f"batches differ between rank {rank} and rank {other_rank}: {'; '.join(differences)}")
    return known[0][1] if known else None


def raise_reported_errors(errors: Sequence[str | None]) -> None:
    """Raise the errors that ranks reported, if there are any.

    Args:
        errors: per rank, its error in one line, or None.

    Raises:
        RankError: with each error and the ranks that it occurred on.

    """
    ranks_by_error: dict[str, list[int]] = {}
    for rank, error in enumerate(errors):
        if error is not None:
            ranks_by_error.setdefault(error, []).append(rank)
    if ranks_by_error:
        raise RankError("; ".join(f"{_ranks(ranks)} failed: {error}" for error, ranks in ranks_by_error.items()))


def _ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text, such as `ranks 0 to 3 and 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    return f"ranks {texts[0]}" if len(texts) == 1 else f"ranks {', '.join(texts[:-1])} and {texts[-1]}"


def check_batch(batch: JaggedBatch, schema: BatchSchema, *, max_batch_size: int | None) -> None:
    """Check that a batch has the common schema except for its rows, and that its lengths match its contents.

    Args:
        batch: before padding.
        schema: of all ranks.
        max_batch_size: most rows that the batch may have; None: any number.

    Raises:
        ValueError: it has not, or they do not; the message names the fields.
        ConfigError: it has too many rows.

    """
    if differences := schema.differences(dataclasses.replace(schema_of(batch), batch_size=schema.batch_size)):
        raise ValueError(f"a batch differs from the first one: {'; '.join(differences)}")
    if max_batch_size is not None and batch.batch_size > max_batch_size:
        raise ConfigError(
            f"a batch has {batch.batch_size} rows, but the Balancer's batch_size is {max_batch_size}; raise it, or "
            "leave it out"
        )
    check_contents(batch)


def check_headers(step: StepMetadata) -> None:
    """Check that all ranks that still have batches are in the same step of the same epoch.

    Raises:
        RankError: they are not; the message names two ranks and where they are.

    """
    ranks = np.flatnonzero(step.header("ended") == 0)
    for name in ("schema_hash", "epoch", "step", "position"):
        words = step.header(name)[ranks]
        changes = np.flatnonzero(words[1:] != words[:-1])
        if len(changes):
            i = int(changes[0])
            raise RankError(
                f"ranks are out of step: {name} is {words[i]} on rank {ranks[i]}, {words[i + 1]} on rank "
                f"{ranks[i + 1]}; iterate over the same epochs, load the same state, and leave loops at the same step "
                "on all ranks"
            )
