"""Positions in an epoch: `ResumePoint`, where an iteration begins; `SavedPosition`, the state of a loader; `Snapshots`.

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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import StateError
from evenrank.core.settings import Bounds, Seed, check_value
from evenrank.dataloader.routing.remap import DIST_TYPE
from evenrank.dataloader.state.checks import Epoch, Natural, StateFormat, Text
from evenrank.dataloader.state.vocabulary import VOCABULARY, check_vocabulary, vocabulary_entry
from evenrank.datasets.order import SampleOrder
from evenrank.datasets.schema import IdSummary

_log = logging.getLogger("evenrank")
_FORMAT = StateFormat(
    owner="the loader",
    version=4,
    fields={
        "epoch": Epoch,
        "position": Natural,
        "seed": Seed,
        "num_samples": Natural,
        "fingerprint": Text,
        VOCABULARY: Text,
        "pending": Text,
        DIST_TYPE: Text,
    },
    not_covered=frozenset({DIST_TYPE}),  # a remapped checkpoint has another one; it is compared with the job's
)
LAST_MS = 253_402_300_799_999  # the last millisecond that is a datetime
_Time = Annotated[int, Bounds(at_least=-62_135_596_800_000, at_most=LAST_MS)]
_WINDOW_FORMAT = replace(_FORMAT, version=5, fields={**_FORMAT.fields, "begin_ms": _Time, "end_ms": _Time})

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


class Position(NamedTuple):
    """The position after a batch."""

    epoch: int
    position: int


class CurrentPosition:
    """Where a loader is. Whoever pulls its batches ahead, such as a Balancer, has this one, and none of its own."""

    def __init__(self, *, has_epochs: bool = True) -> None:
        self.next = ResumePoint()  # where the next iteration begins
        self.after_last = Position(0, 0)  # after the batch that was handed out last
        self._has_epochs = has_epochs

    def begin(self) -> ResumePoint:
        """Return where an iteration begins, after which the next epoch follows."""
        point = self.next
        self.move_to(point, is_over=True)
        return point

    def move_to(self, point: ResumePoint, *, is_over: bool = False) -> None:
        """Move to a point, where the next iteration begins, unless nothing is left of that epoch."""
        self.after_last = Position(point.epoch, point.position)
        self.next = ResumePoint(epoch=point.epoch + 1) if is_over else point

    def start_next(self, *, skip_rest: bool) -> None:
        """Move to where the next iteration begins, or to the epoch after that one, if there are several."""
        if self._has_epochs:
            self.move_to(ResumePoint(epoch=self.next.epoch + 1) if skip_rest else self.next)

    def start_epoch(self, epoch: int) -> None:
        """Make the next iteration that of an epoch; a ConfigError if no state could have it."""
        epoch = int(epoch) if isinstance(epoch, np.integer) else epoch
        check_value("the epoch", epoch, Epoch)
        self.move_to(ResumePoint(epoch=epoch))


class HasEpoch:
    """Base of what has a current position."""

    _current: CurrentPosition

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, from 0."""
        return self._current.next.epoch


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


class OpenWindow(NamedTuple):
    """A window of steps that is partly trained; `batch_size` is per rank."""

    start: int
    """Samples trained before the window."""
    world_size: int
    batch_size: int
    steps: int
    pending: Positions | None = None
    """`ResumePoint.pending` at the beginning of the window."""


class SkippedSamples(NamedTuple):
    """Samples skipped before the saved position, which are still to be trained."""

    pending: Positions | None = None
    """As in `ResumePoint`, for a `start` at that position."""
    window: OpenWindow | None = None

    def to_text(self) -> str:
        """Return the samples as text, which every format of checkpoints can hold; empty if there are none."""
        if self.pending is None:
            return ""
        window = None if self.window is None else self.window._asdict()
        if window is not None and window["pending"] is not None:
            window["pending"] = _encode(window["pending"])
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
            start, *sizes = (window[name] for name in ("start", "world_size", "batch_size", "steps"))
            check_value("start", start, Annotated[int, Bounds(at_least=0, at_most=position)])
            check_value("sizes", sizes, Sequence[Annotated[int, Bounds(at_least=1, below=1 << 63)]])
            before = None if window["pending"] is None else _decode(window["pending"], start, num_samples)
        except (ValueError, KeyError, TypeError, RecursionError):
            message = "corrupt loader state: field 'pending' cannot be decoded; use another checkpoint"
            raise StateError(message) from None
        return cls(pending, OpenWindow(start, *sizes)._replace(pending=before))


class SavedPosition(NamedTuple):
    """The state of a loader."""

    epoch: int
    position: int
    """Samples of the epoch that are trained."""
    seed: int
    skipped: SkippedSamples
    dist_type: str
    """Mapping of the keys of batches; see `routing.remap`."""
    window: tuple[int, int] | None = None
    """Of a window of time: its begin and its end in milliseconds since 1970, which tell it in other datasets."""

    def to_state(self, num_samples: int, fingerprint: str, ids: Mapping[str, IdSummary]) -> dict[str, Any]:
        """Return the state, given the samples of an epoch, a hash of all that decides on their order, and their ids."""
        entries = self._asdict() | {"pending": self.skipped.to_text()}
        del entries["skipped"], entries["window"]
        entries |= {"num_samples": num_samples, "fingerprint": fingerprint, VOCABULARY: vocabulary_entry(ids)}
        if self.window is None:
            return _FORMAT.make(**entries)
        return _WINDOW_FORMAT.make(**entries, begin_ms=self.window[0], end_ms=self.window[1])

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any], num_samples: int, fingerprint: str) -> "SavedPosition":
        """Return the position of a state that `to_state` made, after `checked_state`, given its first arguments."""
        if entries["num_samples"] != num_samples or entries["fingerprint"] != fingerprint:
            raise StateError(
                f"the loader's state is of other data, codes or filters: it has {entries['num_samples']:,} samples and "
                f"fingerprint {entries['fingerprint'][:12]}, this loader {num_samples:,} and {fingerprint[:12]}; load "
                "it with the dataset, the codes and the filters that it was saved with, or train on other data after "
                "it with begin_after"
            )
        if (position := entries["position"]) > num_samples:
            raise StateError(
                f"the loader's state has position {position} of {num_samples} samples; load a state that state_dict "
                "returned"
            )
        skipped = SkippedSamples.from_text(entries["pending"], position=position, num_samples=num_samples)
        return cls(entries["epoch"], position, entries["seed"], skipped, entries[DIST_TYPE])

    @staticmethod
    def next_epoch(state: object, ids: Mapping[str, IdSummary]) -> tuple[int, int | None]:
        """Return the epoch after that of a state, if it is of a dataset whose ids all mean the same here.

        Of windows, also the time in milliseconds since 1970 before which all events are trained, else None.
        """
        entries = checked_state(state, ids)
        epoch, left_out = entries["epoch"], entries["num_samples"] - entries["position"]
        if entries["position"] and left_out:
            _log.warning("epoch %d is not finished: %d samples of its dataset are never trained", epoch, left_out)
        return int(epoch) + 1, entries.get("end_ms" if entries["position"] else "begin_ms")


def checked_state(state: object, ids: Mapping[str, IdSummary]) -> dict[str, Any]:
    """Return the entries of a state of either version, intact, whose ids all mean the same here; else a StateError."""
    has_window = isinstance(state, Mapping) and state.get("version") == _WINDOW_FORMAT.version
    entries = (_WINDOW_FORMAT if has_window else _FORMAT).check(state)
    check_vocabulary(entries[VOCABULARY], ids, source="the loader's state")
    return entries


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

    def at(self, position: Position) -> Value:
        """Return the snapshot at a position or, if this rank ran out of data before the others, at its end."""
        for known, value in reversed(self.entries):
            if known.epoch == position.epoch and known.position <= position.position:
                return value
        raise StateError(
            f"the state after position {position.position} of epoch {position.epoch} is no longer known; call "
            f"state_dict within {self._kept} steps of a batch"
        )
