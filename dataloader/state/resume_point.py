"""Positions in an epoch: `ResumePoint`, where an iteration begins; `Left` and `SkippedSamples`: what it left out.

A loader has one `CurrentPosition`, which a Balancer or an ElasticLoader that pulls its batches ahead moves for it.

Usually everything from one position on is untrained. Within a window of steps whose samples were assigned together,
some samples before the frontier are pending:

    positions      0 1 2 3 4 5 6 7 8 9 10 11 ...    window of 8 positions from 0 on, one step of 4 trained
    trained        x . x . . x x . . . .  .
    pending        1 3 4 7, below the frontier 8

Any loader can go on from there. One with the same window, ranks, batch size and plans finishes the window as if it had
not stopped.
"""

import base64
import hashlib
import json
import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, StateError
from evenrank.core.rules import Bounds
from evenrank.core.settings import check_value
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.state.checks import Epoch
from evenrank.datasets.order import SampleOrder

_log = logging.getLogger("evenrank")

Positions = NDArray[np.int64]
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ResumePoint:
    """Where an iteration begins: the pending positions come first, then everything from the frontier on."""

    epoch: int = 0
    start: int = 0
    """Samples trained before the window that the iteration begins in; without one, the same as `position`."""
    position: int = 0
    """Samples trained before the iteration."""
    pending: Positions | None = None
    """[n]: untrained positions below `frontier` after `start` samples, ascending; None: there are none."""
    left: "Left | None" = None
    """If a Balancer goes on in the middle of steps that it makes of several loaded ones: what is left of these."""
    first_step: int | None = None
    """Steps that the job has trained before the iteration, once it has begun."""

    @property
    def frontier(self) -> int:
        """The position from which on everything is untrained."""
        return self.start if self.pending is None else self.start + len(self.pending)

    def order(self, order: SampleOrder) -> SampleOrder:
        """Return the order of the epoch in which the pending positions come first, from `start` on."""
        return order if self.pending is None else _ResumedOrder(order, self)

    def positions(self, places: Positions) -> Positions:
        """Return the positions at these places of that order, each at least `start`: int64 of the same shape."""
        if self.pending is None:
            return places
        positions = places.copy()
        is_pending = places < self.frontier
        positions[is_pending] = self.pending[places[is_pending] - self.start]
        return positions

    def places(self, positions: Positions) -> Positions:
        """Return where these positions, each of which is still to come, are in that order: int64 of the same shape."""
        if self.pending is None:
            return positions
        places = self.start + np.searchsorted(self.pending, positions)
        return np.where(positions < self.frontier, places, positions)


class Position(NamedTuple):
    """The position after a batch."""

    epoch: int
    position: int


class CurrentPosition:
    """Where a loader is. Whoever pulls its batches ahead, such as a Balancer, has this one, and none of its own."""

    def __init__(self, seed: int = 0, *, has_epochs: bool = True) -> None:
        self.seed = seed  # of the order of samples, or that of a loaded state
        self.next = ResumePoint()  # where the next iteration begins
        self.after_last = Position(0, 0)  # after the batch that was handed out last
        self.steps = 0  # that were handed out, over all iterations
        self.left: Snapshots[Left | None] | None = None  # after steps of a Balancer's windows
        self._has_epochs = has_epochs

    def left_after(self, position: Position) -> "Left | None":
        """Return what is left before a position that was handed out; None: nothing but what the iteration skips."""
        if self.left is None or not position.position:
            return None
        return self.left.at(position, is_exact=True)

    def after(self, batch: "JaggedBatch | Position | None") -> Position:
        """Return the position after a batch that was handed out; None: the last one."""
        return self.after_last if batch is None else Position(batch.epoch, batch.position)

    def begin(self) -> ResumePoint:
        """Return where an iteration begins, after which the next epoch follows."""
        point = self.next
        self.move_to(point, is_over=True)
        return point

    def move_to(self, point: ResumePoint, *, is_over: bool = False) -> None:
        """Move to a point, where the next iteration begins, unless nothing is left of that epoch."""
        self.after_last = Position(point.epoch, point.position)
        if self.left is not None:
            self.left.add(self.after_last, None)
        self.next = ResumePoint(epoch=point.epoch + 1) if is_over else point

    def start_next(self, *, skip_rest: bool) -> None:
        """Move to where the next iteration begins, or to the epoch after that one, if there are several."""
        if self._has_epochs:
            self.move_to(ResumePoint(epoch=self.next.epoch + 1) if skip_rest else self.next)

    def start_epoch(self, epoch: int) -> None:
        """Make the next iteration that of an epoch; a ConfigError if no state could have it."""
        if not self._has_epochs:
            raise ConfigError("a log has no epochs; load_state_dict a state of its loader to go on there")
        epoch = int(epoch) if isinstance(epoch, np.integer) else epoch
        check_value("the epoch", epoch, Epoch)
        self.move_to(ResumePoint(epoch=epoch))


class _ResumedOrder:
    """An order in which the pending positions come before others."""

    def __init__(self, order: SampleOrder, point: ResumePoint) -> None:
        assert point.pending is not None
        self._order = order
        self._point = point
        self._hash = hashlib.sha256(point.pending.tobytes()).hexdigest()
        self.num_samples = order.num_samples

    def rows(self, positions: Positions, *, seed: int, epoch: int) -> Positions:
        return self._order.rows(self._point.positions(positions), seed=seed, epoch=epoch)

    def fingerprint(self) -> tuple[object, ...]:
        return (*self._order.fingerprint(), "pending", self._point.start, self._hash)


class Left(NamedTuple):
    """What is left after a step that was made of several loaded ones."""

    begin: int
    """Position of the loader, before which nothing is left."""
    window: int = 0
    """Loaded steps of a window; 0: samples of these are packed."""
    rows: NDArray[np.bool_] | None = None
    """[n, W, B]: which rows of the n steps loaded from `begin` on are left; None: all of them."""
    num_trained: int = 0
    """Steps of the window that are trained."""
    has_positions: bool = False
    """Whether rows, in their order, are the positions from `begin` on, which any loader can go on with."""

    def skipped(self, point: ResumePoint, before: "SkippedSamples") -> "SkippedSamples":
        """Return the samples skipped, of an iteration from `point` on; `before` are those before the window."""
        assert self.rows is not None
        end = self.begin + self.rows.size
        places = self.begin + np.flatnonzero(self.rows)
        pending = np.sort(point.positions(np.concatenate([places, np.arange(end, max(end, point.frontier))])))
        _, world_size, batch_size = self.rows.shape
        begin = ResumePoint(start=self.begin, position=self.begin, pending=before.pending)
        return SkippedSamples(pending, begin, (self.window, world_size, batch_size))

    def to_text(self) -> str:
        """Return it as text, which every format of checkpoints can hold."""
        bits = "" if self.rows is None else base64.b64encode(np.packbits(self.rows).tobytes()).decode("ascii")
        shape = () if self.rows is None else self.rows.shape
        return json.dumps([self.begin, self.num_trained, self.window, shape, bits])

    @classmethod
    def from_text(cls, text: str) -> "Left":
        """Return what `to_text` was called of."""
        begin, num_trained, window, shape, bits = json.loads(text)
        if not shape:
            return cls(begin, window)
        flat = np.unpackbits(np.frombuffer(base64.b64decode(bits), dtype=np.uint8), count=math.prod(shape))
        return cls(begin, window, flat.astype(np.bool_).reshape(shape), num_trained)


class SkippedSamples(NamedTuple):
    """Samples skipped before the saved position, which are still to be trained."""

    pending: Positions | None = None
    """As in `ResumePoint`, for a `start` at that position."""
    begin: ResumePoint | None = None
    """Where a window of steps begins that is partly trained; None: there is none. It tells no epoch."""
    shape: tuple[int, int, int] = (0, 0, 0)
    """Its steps, ranks, and rows of each rank."""

    def left(self, position: int, num_samples: int) -> Left:
        """Return what is left of the window at a position within it, of an epoch of `num_samples`."""
        assert self.pending is not None
        assert self.begin is not None
        start, num_rows = self.begin.start, math.prod(self.shape)
        is_left = np.zeros(num_rows, dtype=np.bool_)
        is_left[position + len(self.pending) - start : num_samples - start] = True
        places = self.begin.places(self.pending) - start
        is_left[places[places < num_rows]] = True
        num_trained = (position - start) // math.prod(self.shape[1:])
        return Left(start, self.shape[0], is_left.reshape(self.shape), num_trained, has_positions=True)

    def to_text(self) -> str:
        """Return the samples as text, which every format of checkpoints can hold; empty if there are none."""
        if self.pending is None:
            return ""
        window: dict[str, Any] | None = None
        if self.begin is not None:
            before, (steps, world_size, batch_size) = self.begin.pending, self.shape
            window = {"start": self.begin.start, "world_size": world_size, "batch_size": batch_size, "steps": steps}
            window["pending"] = None if before is None else _encode(before)
        return json.dumps({"positions": _encode(self.pending), "window": window})

    @classmethod
    def from_text(cls, text: str, *, position: int, num_samples: int) -> "SkippedSamples":
        """Return the samples of a text that `to_text` made at a position of an epoch of `num_samples`."""
        if not text:
            return cls()
        try:
            entries = json.loads(text)
            pending, window = _decode(entries["positions"], position, num_samples), entries["window"]
            if window is None:
                return cls(pending)
            start, *shape = (window[name] for name in ("start", "steps", "world_size", "batch_size"))
            check_value("start", start, Annotated[int, Bounds(at_least=0, at_most=position)])
            check_value("shape", shape, Sequence[Annotated[int, Bounds(at_least=1, below=1 << 63)]])
            before = None if window["pending"] is None else _decode(window["pending"], start, num_samples)
        except (ValueError, KeyError, TypeError, RecursionError):
            message = "corrupt loader state: field 'pending' cannot be decoded; use another checkpoint"
            raise StateError(message) from None
        steps, world_size, batch_size = shape
        return cls(pending, ResumePoint(start=start, position=start, pending=before), (steps, world_size, batch_size))


def _encode(positions: Positions) -> list[Any]:
    """Return positions as the first one, their number, and one bit for each position from the first on."""
    bits = np.zeros(int(positions[-1]) + 1 - int(positions[0]), dtype=np.bool_)
    bits[positions - positions[0]] = True
    return [int(positions[0]), len(positions), base64.b64encode(np.packbits(bits).tobytes()).decode("ascii")]


def _decode(value: Any, start: int, num_samples: int) -> Positions:
    """Return the positions that `_encode` was given, pending after `start` samples; may raise ValueError, TypeError."""
    first, count, text = value
    bits = np.unpackbits(np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8))
    check_value("first", first, Annotated[int, Bounds(at_least=0, at_most=start)])
    check_value("count", count, Annotated[int, Bounds(at_least=1, at_most=num_samples - start)])
    positions: Positions = first + np.flatnonzero(bits)
    # As many positions below the frontier are trained as come before the start.
    if len(positions) != count or positions[0] != first or positions[-1] >= start + count:
        raise ValueError
    return positions


def warn_of_rest(left: Position) -> None:
    """Warn that an iteration begins although the one before was left at a position within its epoch."""
    remedy = "load a state to go on there; in Lightning, pass the Trainer callbacks=[ElasticResume()]"
    _log.warning("epoch %d was left at position %d, and its rest is not trained; %s", *left, remedy)


class Snapshots(Generic[Value]):
    """Values of one rank, such as states of its loader, by position of its latest steps.

    Those of the step handed out last, of `kept` steps before it, and of `ahead` steps that are pulled ahead of it.
    """

    def __init__(self, kept: int, ahead: int = 0) -> None:
        self._kept = kept
        self.entries: deque[tuple[Position, Value]] = deque(maxlen=kept + ahead + 1)

    def add(self, position: Position, value: Value) -> None:
        """Add the snapshot at a position, which replaces an earlier one at the same position."""
        if self.entries and self.entries[-1][0] == position:
            self.entries.pop()
        self.entries.append((position, value))

    def at(self, position: Position, *, is_exact: bool = False) -> Value:
        """Return the snapshot at a position or, if this rank ran out of data before the others, at its end."""
        for known, value in reversed(self.entries):
            is_before = known.epoch == position.epoch and known.position <= position.position
            if known == position or (is_before and not is_exact):
                return value
        raise StateError(
            f"the state after position {position.position} of epoch {position.epoch} is no longer known; call "
            f"state_dict within {self._kept} steps of a batch"
        )
