"""A Balancer's connection to the other ranks: opened and closed as a whole, and closed with a reason after an error."""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

from evenrank.core.errors import ConfigError, RankError, RankLostError, one_line
from evenrank.dataloader.balance.ranks.process_group import FailFastGroup, Members, within

_KEY = "reason"
_WAIT = timedelta(seconds=2)

Result = TypeVar("Result")


def check_process(process: int) -> None:
    """Raise a ConfigError in a fork of a process: it has none of the threads, and would wait for them forever."""
    if process != os.getpid():
        raise ConfigError("the Balancer was created before this process was forked; create one after that")


class FailureNote:
    """Why a rank left: written to the store by the first rank that fails alone, read by the ranks that then lose it."""

    def __init__(self, members: Members) -> None:
        self._rank = members.rank
        self._store = None if members.store is None else members.substore("failure")

    def write(self, error: Exception) -> None:
        """Leave the reason, unless another rank has left one before."""
        if (store := self._store) is not None:
            # The store is lost if the process that serves it is; then there is nobody to tell.
            with contextlib.suppress(RuntimeError):
                within(_WAIT, lambda: store.compare_set(_KEY, "", f"rank {self._rank} failed: {one_line(error)}"))

    def read(self) -> str | None:
        """Return the reason of the first rank that failed; None if none has left one."""
        if (store := self._store) is None:
            return None

        def read() -> str:
            store.wait([_KEY], _WAIT)
            return store.get(_KEY).decode()

        with contextlib.suppress(RuntimeError):
            return within(_WAIT, read)
        return None


class Connection:
    """The communicators of a Balancer, and the background thread that all-gathers.

    The metadata all-gather and the exchange of different steps overlap, so each has a communicator of its own.

    Collective: every rank must call the constructor. `backend` is that of the exchange, and `use_in_thread` is
    called once in the background thread.
    """

    def __init__(
        self,
        members: Members,
        timeout: timedelta,
        backend: str,
        use_in_thread: Callable[[], None],
    ) -> None:
        self._failure_note = FailureNote(members)
        self._failure: str | None = None  # the error that closed it
        self._is_closed = False
        self._process = os.getpid()
        # One thread, so that all-gathers of successive steps keep their order.
        self._background = ThreadPoolExecutor(1, thread_name_prefix="evenrank-balancer", initializer=use_in_thread)
        self._groups: list[FailFastGroup] = []
        with self.aborting():
            for name, backend_of_group in (("metadata", "gloo"), ("exchange", backend)):
                self._groups.append(FailFastGroup(members, name, timeout, backend=backend_of_group))
        self.metadata_group, self.exchange_group = self._groups

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Call a function in the background thread; a ConfigError if the connection is closed."""
        self.check_open()
        return self._background.submit(function, *arguments)

    def check_open(self) -> None:
        """Raise a ConfigError if the connection is closed; the message has the error that closed it."""
        check_process(self._process)
        if self._is_closed:
            after = "" if self._failure is None else f", after {self._failure}"
            raise ConfigError(f"the Balancer is closed{after}; create a new one")

    @contextlib.contextmanager
    def aborting(self) -> Iterator[None]:
        """Abort after any error, which may be kept, so that no rank waits for this one."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Close if another rank is lost, and raise its reason as a RankError if it has left one."""
        try:
            yield
        except RankLostError as error:
            self.close_after(error)  # first, because other ranks may wait for this one
            if (reason := self._failure_note.read()) is None:
                raise
            self._failure = reason
            raise RankError(reason) from None

    def fail(self, error: Exception) -> None:
        """Leave the reason for the other ranks and close, after an error that may be this rank's alone."""
        if self._process != os.getpid():  # the parent goes on
            return
        self._failure_note.write(error)
        self.close_after(error)

    def close_after(self, error: Exception) -> None:
        """Close after an error, so that ranks that wait for this one end, too."""
        if not self._is_closed or isinstance(error, RankError):
            self._failure = one_line(error)
        self.abort()

    def abort(self) -> None:
        """Close without waiting: on a GPU, collectives in flight may wait for ranks that are lost."""
        for group in self._groups[1:]:
            group.drop()
        self.close()

    def close(self) -> None:
        """End the background thread and the communicators. Closing twice does nothing."""
        self._is_closed = True
        self._background.shutdown()
        for group in self._groups:
            group.close()
