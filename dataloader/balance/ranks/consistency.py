"""Consistency checks between ranks, before anything moves: a difference is an error on every rank, never a hang."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from evenrank.core.errors import RankError
from evenrank.dataloader.balance.ranks.metadata import StepMetadata


def check_settings(settings_of_ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise a RankError unless all ranks have the same settings, except for `rank`, which must be the rank itself."""
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
    """Return the picklable values of all ranks, after `check_settings`. Collective: every rank must call this.

    `group` None is this process alone.
    """
    if group is None:
        return [value]
    reports: list[Any] = [None] * group.size()
    dist.all_gather_object(reports, (dict(settings), value), group)
    check_settings([settings for settings, _ in reports])
    return [of_rank for _, of_rank in reports]


def raise_reported_errors(errors: Sequence[str | None]) -> None:
    """Raise a RankError with each error, in one line, and the ranks that reported it, if there are any."""
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


def check_headers(step: StepMetadata) -> None:
    """Raise a RankError unless all ranks that still have batches are in the same step of the same epoch."""
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
