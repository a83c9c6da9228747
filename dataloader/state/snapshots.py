"""`Snapshots`: values by position of the latest steps, so that the state after any of them can be asked for."""

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from evenrank.core.errors import StateError

Value = TypeVar("Value")


class Position(NamedTuple):
    """The position after a batch; all that `state_dict(after=...)` needs of the batch."""

    epoch: int
    position: int


class Snapshots(Generic[Value]):
    """Values of one rank after each of its latest steps.

    Args:
        kept: steps before the last one handed out whose snapshots are kept.
        ahead: steps that are pulled ahead of the last one handed out.
    """

    def __init__(self, kept: int, ahead: int = 0) -> None:
        self._kept = kept
        self._entries: deque[tuple[Position, Value]] = deque(maxlen=kept + ahead + 1)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def clear(self) -> None:
        """Forget all snapshots."""
        self._entries.clear()

    def add(self, position: Position, value: Value) -> None:
        """Add the snapshot at a position, which replaces an earlier one at the same position."""
        if self._entries and self._entries[-1][0] == position:
            self._entries.pop()
        self._entries.append((position, value))

    @property
    def first(self) -> tuple[Position, Value]:
        """The earliest snapshot that is kept."""
        return self._entries[0]

    @property
    def last(self) -> tuple[Position, Value]:
        """The latest snapshot."""
        return self._entries[-1]

    def at(self, position: Position) -> Value:
        """Return the snapshot at a position or, if this rank ran out of data before the others, at its end.

        Raises:
            StateError: it is no longer kept.
        """
        for known, value in reversed(self._entries):
            if known.epoch == position.epoch and known.position <= position.position:
                return value
        raise StateError(
            f"the state after position {position.position} of epoch {position.epoch} is no longer known; call "
            f"state_dict within {self._kept} steps of a batch"
        )
