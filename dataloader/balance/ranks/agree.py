"""Agreement of ranks: a difference is an error on every rank, never a hang, and found before anything moves.

Settings are compared when loaders and Balancers are created. Schemas are compared before the first step, positions and
plans in every step of a Balancer: a rank that planned differently would send other bytes than its peers expect, so
samples would be lost, or Gloo would abort the process. A rank that failed would leave its peers waiting for bytes.

The handshake of settings comes before any process group is created, through the store, which needs neither a device nor
a backend: rank 0 validates every rank's report and broadcasts the result. A rank with invalid or different arguments
would otherwise leave the others waiting in the creation of a group.
"""

import dataclasses
import itertools
import pickle
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import Store

from evenrank.core.errors import ConfigError, RankError, first_line, one_line
from evenrank.dataloader.balance.config import timeout_of
from evenrank.dataloader.balance.ranks.metadata import (
    StepMetadata,
    all_gather_bytes,
    all_gather_objects,
    common_word,
    hash63,
)
from evenrank.dataloader.balance.ranks.process_group import FailFastGroup, Group, Members, members_of, within
from evenrank.dataloader.batches.schema import BatchSchema
from evenrank.dataloader.state.node import HasRankInvariants

Created = TypeVar("Created")
Loader = TypeVar("Loader", bound=HasRankInvariants)
Result = TypeVar("Result")

SAME_STEPS = "iterate over the same epochs, load the same state, and leave loops at the same step on all ranks"
_SAME_PLANS = "ranks have found other files of the log that they follow, or planned alone and differently"
_SAME_WORDS = ("schema_hash", "epoch", "step", "position", "plan_hash")  # of the headers of ranks that are in step
_HANDSHAKE_WAIT = timedelta(seconds=10)  # at a time, as the next one


def attempt(call: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """Return the result of a call, or the error that it raises, to report it to all ranks."""
    try:
        return call(), None
    except Exception as error:
        return None, error


def reported(error: Exception | None) -> str | None:
    """Return an error as ranks report it, in one line."""
    return None if error is None else one_line(error)


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
    """Return the picklable values of all ranks, after `check_settings`; `group` None is this process alone.

    Collective: every rank must call this.
    """
    if group is None:
        return [value]
    reports: list[Any] = [None] * group.size()
    dist.all_gather_object(reports, (dict(settings), value), group)
    check_settings([settings for settings, _ in reports])
    return [of_rank for _, of_rank in reports]


def compare_settings(check: Callable[[], Mapping[str, Any]], group: dist.ProcessGroup | None) -> None:
    """Compare the settings that `check` returns between ranks; an error that it raises on one is raised on all of them.

    `group` as for `gather_checked`. Collective: every rank must call this.
    """
    settings, error = attempt(check)
    errors, of_ranks = zip(*gather_checked({}, (reported(error), settings or {}), group), strict=True)
    if error is not None:
        raise error
    raise_reported_errors(errors)
    check_settings(of_ranks)


def raise_reported_errors(errors: Sequence[str | None]) -> None:
    """Raise a RankError with each error, in one line, and the ranks that reported it, if there are any."""
    if any(error is not None for error in errors):
        raise _reported_error(errors)


def _reported_error(errors: Sequence[str | None]) -> RankError:
    ranks_by_error: dict[str, list[int]] = {}
    for rank, error in enumerate(errors):
        if error is not None:
            ranks_by_error.setdefault(error, []).append(rank)
    return RankError("; ".join(f"{_ranks(ranks)} failed: {error}" for error, ranks in ranks_by_error.items()))


def _ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text, such as `ranks 0 to 3 and 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    # Within a run of adjacent ranks, rank - index stays the same.
    groups = itertools.groupby(enumerate(ranks), lambda entry: entry[1] - entry[0])
    runs = [[rank for _, rank in group] for _, group in groups]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"ranks {texts[0]}" if len(texts) == 1 else f"ranks {', '.join(texts[:-1])} and {texts[-1]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What a rank reports of the Balancer or loader that it creates."""

    error: str | None = None  # why it cannot be created, in one line; None if it can
    settings: Mapping[str, Any] = field(default_factory=dict)  # must be the same on all ranks, see `check_settings`
    hardware: str | None = None  # identifies the device if no other rank can use it
    num_batches: int | None = None  # batches of an epoch of its loader, if the loader knows
    host: str = field(default_factory=lambda: socket.gethostname())  # name of its host


def validate_reports(reports: Sequence[RankReport]) -> int | None:
    """Return the steps of an epoch, or raise a RankError if a rank failed or two are inconsistent.

    These are the batches of the rank with the most; None if a loader does not know them.
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
    return max(numbers) if len(numbers) == len(reports) else None


def handshake(
    make: Callable[[], tuple[Created, RankReport]], members: Members, timeout: timedelta, *, of: str = "Balancer"
) -> tuple[Created, int | None]:
    """Return what `make` creates, once it does so on all ranks, and the steps of an epoch (see `validate_reports`).

    Collective: every rank must call this. Whatever can be wrong on one rank alone is checked in `make`: its error is
    raised on this rank, while the others raise a RankError with it. `of` names what every rank creates, for the message
    if one has not.
    """
    made, error = attempt(make)
    report = RankReport(error=reported(error)) if made is None else made[1]
    try:
        if members.store is None:
            num_steps = validate_reports([report])
        else:
            # Rank 0 gets the time to name the ranks that are late.
            num_steps = within(timeout + _HANDSHAKE_WAIT, lambda: _handshake(report, members, timeout, of))
    except RankError:
        if error is not None:
            raise error from None
        raise
    assert made is not None
    return made[0], num_steps


def _handshake(report: RankReport, members: Members, timeout: timedelta, of: str) -> int | None:
    store = members.store
    assert store is not None
    keys = [f"report/{rank}" for rank in range(members.world_size)]
    store.set(keys[members.rank], _as_text(report))
    deadline = time.monotonic() + timeout.total_seconds()
    result: int | str | None  # a message if reports are invalid
    if members.rank == 0:
        try:
            result = validate_reports([_get(store, key, rank, deadline, of) for rank, key in enumerate(keys)])
        except Exception as error:  # raised on all ranks below
            result = one_line(error)
        store.set("result", _as_text(result))
    else:
        result = _get(store, "result", 0, deadline + _HANDSHAKE_WAIT.total_seconds(), of)
    if isinstance(result, str):
        raise RankError(result)
    return result


def _as_text(value: object) -> str:
    return pickle.dumps(value).hex()  # stores take strings


def _get(store: Store, key: str, rank: int, deadline: float, of: str) -> Any:
    while True:
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        try:
            store.wait([key], min(_HANDSHAKE_WAIT, left))
            return pickle.loads(bytes.fromhex(store.get(key).decode()))
        except RuntimeError as error:
            reason = first_line(error)
        store.check([key])  # raises if the store is lost
        if time.monotonic() >= deadline:
            raise RankError(
                f"rank {rank} has not created its {of} in time ({reason}); create one on every rank of the group, "
                "in the same order, or raise timeout"
            )


def create_on_all_ranks(
    make: Callable[[Members], Loader], *, group: Group | None, world_size: int, balance: object
) -> Loader:
    """Return the loader that `make` creates, once it does so on all ranks, with the same rank invariants.

    `make` checks `balance`, which may be anything. Collective: every rank must call this; without a process group, it
    only calls `make`.
    """
    members = members_of(group, timeout := timeout_of(balance), "loader")
    if members.store is None:
        return make(members)

    def create() -> tuple[Loader, RankReport]:
        if members.world_size != world_size:
            raise ConfigError(
                f"the loader is created for world_size {world_size!r}, but {members.world_size} ranks would balance "
                "together; pass the data-parallel ranks as group, and their number as world_size"
            )
        loader = make(members)
        return loader, RankReport(settings=dict(loader.rank_invariants()))

    return handshake(create, members, timeout, of="loader")[0]


def common_schema(schemas: Sequence[BatchSchema | None], batch_size: int | None = None) -> BatchSchema | None:
    """Return the schema of all ranks that have batches, or raise a RankError if two differ; None if no rank has any.

    `batch_size` None is the largest of them.
    """
    known = [(rank, schema) for rank, schema in enumerate(schemas) if schema is not None]
    if batch_size is None:
        batch_size = max((schema.batch_size for _, schema in known if schema.batch_size), default=1)
    known = [(rank, dataclasses.replace(schema, batch_size=batch_size)) for rank, schema in known]
    for (rank, schema), (other_rank, other) in itertools.pairwise(known):
        if differences := schema.differences(other):
            raise RankError(f"batches differ between rank {rank} and rank {other_rank}: {'; '.join(differences)}")
    return known[0][1] if known else None


def check_headers(step: StepMetadata) -> None:
    """Raise a RankError unless all ranks that still have batches are in the same step of the same epoch."""
    if len(missing := np.flatnonzero(step["started"] == 0)):
        raise RankError(f"ranks are out of step: rank {missing[0]} has not started a step of others; {SAME_STEPS}")
    ranks = np.flatnonzero(step["ended"] == 0)
    for name in _SAME_WORDS:
        words = step[name][ranks]
        for i in np.flatnonzero(words[1:] != words[:-1])[:1]:
            found = f"{name} is {words[i]} on rank {ranks[i]}, {words[i + 1]} on rank {ranks[i + 1]}"
            raise RankError(f"ranks are out of step: {found}; {_SAME_PLANS if name == 'plan_hash' else SAME_STEPS}")


def steps_to_plan(known: StepMetadata, errors: Sequence[Sequence[str | None]]) -> tuple[int, Exception | None]:
    """Return how many of n started steps, [n, W], can be planned, and the error of the next one, if it has one.

    `errors` are those of each rank, one of each step that it has started; empty: there are none.
    """
    are_same = all((known[name] == known[name][:, :1]).all() for name in _SAME_WORDS)
    if not errors and are_same and not known["ended"].any() and known["started"].all():
        return len(known), None
    for index, of_step in enumerate(known):
        try:
            raise_reported_errors([of_rank[index] for of_rank in errors if index < len(of_rank)])
            check_headers(of_step)
        except RankError as raised:  # on all ranks
            return index, raised
        if of_step["ended"].all():
            return index, None
    return len(known), None


def confirm(
    group: FailFastGroup,
    plans: Sequence[NDArray[np.int32]],
    error: Exception | None,
    steps: StepMetadata,
    strategy: str,
) -> tuple[int, Exception] | None:
    """Compare the plans of n steps, [n, W], between ranks. Collective: every rank must call this.

    Returns the index of the first step that a rank could not plan, or that ranks have planned differently, and the
    error to raise: a RankError, or this rank's own. None: there is no such step.

    `plans` are this rank's assignments, int32 [W, B] each: of all steps, or of those before the one that failed with
    `error`.
    """
    words = np.zeros((len(steps), 2), dtype=np.int64)
    words[len(plans) :, 0] = 1
    words[: len(plans), 1] = [hash63(np.ascontiguousarray(plan).data) for plan in plans]
    of_ranks = all_gather_bytes(group, words.reshape(-1).view(np.uint8)).copy().view(np.int64)
    failed, assigned = of_ranks.reshape(-1, *words.shape).transpose(2, 1, 0)  # [n, W] each
    is_wrong = (failed | (assigned != assigned[:, :1])).any(axis=1)
    if not is_wrong.any():
        return None
    index = int(np.argmax(is_wrong))
    if failed[index].any():
        errors = all_gather_objects(group, reported(error))
        of_step = [text if of_rank else None for text, of_rank in zip(errors, failed[index], strict=True)]
        if error is not None and reported(error) in of_step:
            return index, error
        return index, _reported_error(of_step)
    name = f"step {common_word(steps[index], 'step')} of epoch {common_word(steps[index], 'epoch')}"
    rank = np.flatnonzero(assigned[index] != assigned[index][0])[0]
    return index, RankError(
        f"in {name}, rank {rank} assigns samples differently from rank 0, given the same costs; the strategy "
        f"{strategy!r} must be a pure function of its argument, and the same code on all ranks"
    )
