"""The ranks that balance together, and process groups that are torn down on every rank when one rank fails."""

import atexit
import contextlib
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllToAllOptions,
    PrefixStore,
    Store,
)

from evenrank.core.errors import ConfigError, RankLostError, first_line

Group = dist.ProcessGroup | DeviceMesh
"""The ranks that balance together: a process group, or a device mesh of one dimension."""

Result = TypeVar("Result")

_GRACE = timedelta(seconds=2)  # for the timeout of the call itself, whose error says more


def within(timeout: timedelta, call: Callable[[], Result]) -> Result:
    """Return the result of a call that uses a store; raise a RankLostError 2 seconds after its own timeout.

    The store's timeouts do not hold: a client of a TCPStore whose timeout has passed tells the server so, and waits for
    its answer until TCP gives up, which takes a quarter of an hour, or never. The call is made in another thread, which
    cannot be interrupted: it is left behind until the process ends, with a lock of the store's client, so that other
    uses of that client miss their deadlines, too.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="evenrank-store", daemon=True)
    thread.start()
    thread.join((timeout + _GRACE).total_seconds())
    if thread.is_alive():
        reason = f"no answer within {timeout.total_seconds():g} s"
    else:
        try:
            return outcome.result()
        except dist.DistError as error:
            reason = first_line(error)
    raise RankLostError(
        f"the process group does not respond ({reason}); a rank, or the process that serves its store, usually rank 0, "
        "is lost or cannot be reached; see its own error"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """The ranks that balance together, as seen from one of them."""

    rank: int  # this process's rank among them
    world_size: int  # how many there are
    store: Store | None  # shared by them alone; None if there is only one rank, without a process group

    def substore(self, name: str) -> Store:
        """Return a part of the store with a namespace of its own."""
        assert self.store is not None
        return PrefixStore(name, self.store)


def process_group_of(group: Group | None) -> dist.ProcessGroup | None:
    """Return a group as a process group; None if it is None, and there is no default process group either."""
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ConfigError(
                f"group is a device mesh of the dimensions {group.mesh_dim_names or group.ndim}; pass one dimension, "
                'such as mesh["dp"], or several flattened into one'
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigError("this process is not a rank of the group; pass a group on its own ranks only")
        raise ConfigError(f"group must be a process group or a device mesh, got {type(group).__name__}")
    return group


def members_of(group: Group | None, timeout: timedelta, user: str = "balancer") -> Members:
    """Return the ranks of a group; their store is empty, however often this is called for the same group.

    Every rank of the group must call this equally often for the same user, the name of the caller. `group` None is the
    default process group or, without one, this process alone. Waits for the store, but for no other rank.
    """
    process_group = process_group_of(group)
    if process_group is None:
        return Members(rank=0, world_size=1, store=None)
    rank = process_group.rank()
    store = process_group.get_group_store()
    # Each rank counts for itself, so that the number does not depend on which rank comes first.
    number = within(timeout, lambda: store.add(f"evenrank/{user}/calls/{rank}", 1))
    return Members(rank=rank, world_size=process_group.size(), store=PrefixStore(f"evenrank/{user}/{number}", store))


class Work(Protocol):
    """A collective in flight that the host must wait for."""

    def wait(self) -> Any:
        """Return once the collective is complete."""
        ...


class FailFastGroup:
    """Collectives over Gloo or NCCL that end on all ranks within seconds when one of them is lost.

    When a rank is lost, only its neighbors in a collective notice; the others would wait for the timeout. Gloo closes
    its connections when the last reference to the group is dropped. So a rank that notices drops the group at once,
    its neighbors notice in turn, and so on, each with a RankLostError.

    Collective: every member must call the constructor, and no other rank (unlike `dist.new_group`), with a name that
    is new among the members. `backend` is `gloo` or `nccl`. A member without a store is alone: it connects to nobody,
    and must not start a collective.
    """

    def __init__(self, members: Members, name: str, timeout: timedelta, *, backend: str = "gloo") -> None:
        self.world_size = members.world_size
        self.is_alone = members.store is None
        # Nothing else may refer to it; a traceback would keep that reference alive.
        self._backend: Any = None
        if not self.is_alone:
            self._backend = within(timeout, lambda: _create_backend(members, name, timeout, backend))
        self._pending: weakref.WeakSet[_PendingWork] = weakref.WeakSet()
        _open_groups.add(self)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, async_op: bool = False) -> Work | None:
        """Gather every rank's `tensor` into this rank's `outputs`, one per rank. Collective: every rank must call this.

        All tensors have one size. With `async_op` it returns the work, for the caller to wait for under `guard`;
        otherwise the collective is complete (on a GPU: enqueued on the current stream), and the result is None.
        """
        options = AllgatherOptions()
        options.asyncOp = async_op
        with self.guard():
            return self._completed(self._backend.allgather([list(outputs)], [tensor], options), async_op)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], splits: list[int], *, async_op: bool = False
    ) -> Work | None:
        """Send each rank its part of `tensor`, in rank order. Collective: every rank must call this.

        `output_splits` are the elements received from each rank, `splits` those sent; for `async_op` see `all_gather`.
        """
        options = AllToAllOptions()
        options.asyncOp = async_op
        with self.guard():
            work = self._backend.alltoall_base(output, tensor, output_splits, splits, options)
            return self._completed(work, async_op)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Turn an error of a collective, or of waiting for one, into a RankLostError, and tear down the group."""
        if self._backend is None:
            raise RankLostError("a rank is lost or does not respond, as an earlier error reported; see its own error")
        try:
            yield
        except RuntimeError as error:
            lost = _rank_lost(error)
            traceback.clear_frames(error.__traceback__)  # they refer to the backend
            self.drop()
            raise lost from None

    def close(self) -> None:
        """Close all connections, on a GPU once collectives in flight are complete; closing twice does nothing."""
        if self._backend is not None:
            self._backend.shutdown()
        self.drop()

    def drop(self) -> None:
        """Close all connections, and abort collectives in flight on a GPU rather than wait for other ranks."""
        for pending in self._pending:
            pending.work = None
        self._backend = None

    def _completed(self, work: Work | None, async_op: bool) -> Work | None:
        if work is None:
            return None
        if not async_op:
            work.wait()
            return None
        pending = _PendingWork(work)
        self._pending.add(pending)
        return pending


class _PendingWork:
    """A collective in flight that can be kept without keeping the connections open."""

    def __init__(self, work: Work) -> None:
        self.work: Work | None = work  # refers to the connections

    def wait(self) -> None:
        """Return once the collective is complete, or at once if the group was dropped, which `guard` reports."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()


def _create_backend(members: Members, name: str, timeout: timedelta, backend: str) -> Any:
    connected = members.substore(name), members.rank, members.world_size
    try:
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(*connected, options)
        return dist.ProcessGroupGloo(*connected, timeout)
    except RuntimeError as error:
        raise _rank_lost(error) from None


_open_groups: "weakref.WeakSet[FailFastGroup]" = weakref.WeakSet()


@atexit.register
def _drop_open_groups() -> None:
    """Drop the groups that nobody has closed, while the interpreter still lets other threads run.

    A thread of Gloo that frees a tensor needs the GIL. Once the interpreter finalizes, such a thread is terminated
    instead, which aborts the process ("terminate called without an active exception"). Dropping a group ends its
    threads; the threads of Balancers have ended already.
    """
    for group in list(_open_groups):
        group.drop()


def _rank_lost(error: RuntimeError) -> RankLostError:
    return RankLostError(f"a rank is lost or does not respond ({first_line(error)}); see its own error")
