"""`Snapshots`: values by position of the latest steps, from which the state after any of them is made."""

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from evenrank.core.errors import StateError

Value = TypeVar("Value")


class Position(NamedTuple):
    """The position after a batch."""

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
        self.entries: deque[tuple[Position, Value]] = deque(maxlen=kept + ahead + 1)

    def add(self, position: Position, value: Value) -> None:
        """Add the snapshot at a position, which replaces an earlier one at the same position."""
        if self.entries and self.entries[-1][0] == position:
            self.entries.pop()
        self.entries.append((position, value))

    def at(self, position: Position) -> Value:
        """Return the snapshot at a position or, if this rank ran out of data before the others, at its end."""
        for known, value in reversed(self.entries):
            if known.epoch == position.epoch and known.position <= position.position:
                return value
        raise StateError(
            f"the state after position {position.position} of epoch {position.epoch} is no longer known; call "
            f"state_dict within {self._kept} steps of a batch"
        )
