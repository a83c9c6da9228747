"""`ResumePoint`: what is left of an epoch, where an iteration begins; and the part of a state that tells it.

Usually that is all positions from one on. Within a window of steps whose samples were assigned together, it is some
of the window's positions and all after it:

    positions      0 1 2 3 4 5 6 7 8 9 10 11 ...    window of 8 positions from 0 on, one step of 4 trained
    trained        x . x . . x x . . . .  .
    left           1 3 4 7, then all from 8 on

Any loader can go on with what is left. One with the same window, ranks, batch size and plans finishes the window as if
it had not stopped.
"""

import base64
import hashlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import StateError
from evenrank.dataloader.routing.dist_type import DIST_TYPE
from evenrank.dataloader.state.checks import COUNT, EPOCH, INT64_MAX, SEED, TEXT, Check, StateFormat, integer
from evenrank.datasets.order import SampleOrder

_FORMAT = StateFormat(
    owner="the loader",
    version=3,
    fields={
        "epoch": EPOCH,
        "position": COUNT,
        "seed": SEED,
        "num_samples": COUNT,
        "fingerprint": TEXT,
        "pending": TEXT,
        DIST_TYPE: TEXT,
    },
    not_covered=frozenset({DIST_TYPE}),  # a remapped checkpoint has another one; it is compared with the job's
)
_SIZES = ("start", "world_size", "batch_size", "steps")

Positions = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OpenWindow:
    """The window that a position is within."""

    start: int
    """Samples trained before the window."""
    world_size: int
    """Number of data-parallel ranks of its steps."""
    batch_size: int
    """Samples per rank and step."""
    steps: int
    """Steps of a window."""
    left: Positions | None = None
    """What was left before it, as in `ResumePoint`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ResumePoint:
    """What is left of an epoch."""

    epoch: int = 0
    """The epoch."""
    start: int = 0
    """Samples trained before the window in which the rest begins or, if it begins in none, before the rest."""
    position: int = 0
    """Samples trained before the rest."""
    left: Positions | None = None
    """[n]: the positions below `start` + n that were not trained before `start`, ascending; all from there on were not
    either. None: no position from `start` on was trained."""

    @property
    def end_of_left(self) -> int:
        """The position from which on nothing was trained before `start`."""
        return self.start if self.left is None else self.start + len(self.left)

    def order(self, order: SampleOrder) -> SampleOrder:
        """Return the order of the epoch, in which those positions come first, from `start` on."""
        return order if self.left is None else _ResumedOrder(order, self)

    def positions(self, places: Positions) -> Positions:
        """Return the positions at these places of that order, each at least `start`: int64 of the same shape."""
        if self.left is None:
            return places
        positions = places.copy()
        is_left = places < self.end_of_left
        positions[is_left] = self.left[places[is_left] - self.start]
        return positions


class _ResumedOrder:
    """An order in which some positions come before others."""

    def __init__(self, order: SampleOrder, rest: ResumePoint) -> None:
        assert rest.left is not None
        self._order = order
        self._rest = rest
        self._hash = hashlib.sha256(rest.left.tobytes()).hexdigest()

    @property
    def num_samples(self) -> int:
        return self._order.num_samples

    def rows(self, positions: Positions, *, seed: int, epoch: int) -> Positions:
        return self._order.rows(self._rest.positions(positions), seed=seed, epoch=epoch)

    def fingerprint(self) -> tuple[object, ...]:
        return (*self._order.fingerprint(), "left", self._rest.start, self._hash)


class Unfinished(NamedTuple):
    """What is left after a position, besides all positions from it on."""

    left: Positions | None = None
    """As in `ResumePoint`, for a `start` at that position."""
    window: OpenWindow | None = None
    """In which the position is."""

    def to_text(self) -> str:
        """Return it as text, which every format of checkpoints can hold; empty if there is nothing to tell."""
        if self.left is None:
            return ""
        window = None
        if self.window is not None:
            before = self.window.left
            window = {name: getattr(self.window, name) for name in _SIZES}
            window["left"] = None if before is None else _encode(before)
        return json.dumps({"left": _encode(self.left), "window": window})

    @classmethod
    def from_text(cls, text: str, *, position: int, num_samples: int) -> "Unfinished":
        """Return what `to_text` made text of, for a position of an epoch of so many samples.

        Raises:
            StateError: the text is damaged.

        """
        if not text:
            return cls()
        try:
            entries = json.loads(text)
            left, window = _decode(entries["left"], position, num_samples), entries["window"]
            if window is None:
                return cls(left=left)
            sizes = {name: window[name] for name in _SIZES}
            if any(check(sizes[name]) for name, check in _checks_of_sizes(position).items()):
                raise ValueError
            left_before = None if window["left"] is None else _decode(window["left"], sizes["start"], num_samples)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise StateError(
                "corrupt loader state: field 'pending' cannot be decoded; load another checkpoint"
            ) from None
        return cls(left=left, window=OpenWindow(**sizes, left=left_before))


class SavedPosition(NamedTuple):
    """The state of a loader."""

    epoch: int
    """The epoch."""
    position: int
    """Samples of it that are trained."""
    seed: int
    """Of the loader."""
    unfinished: Unfinished
    """What is left, besides all positions from that one on."""
    dist_type: str
    """How the keys of batches are mapped; see `routing.dist_type`."""

    def to_state(self, num_samples: int, fingerprint: str) -> dict[str, Any]:
        """Return the state, given the number of samples of an epoch, and a hash of all that decides on their order."""
        return _FORMAT.make(
            epoch=self.epoch,
            position=self.position,
            seed=self.seed,
            num_samples=num_samples,
            fingerprint=fingerprint,
            pending=self.unfinished.to_text(),
            dist_type=self.dist_type,
        )

    @classmethod
    def from_state(cls, state: object, num_samples: int, fingerprint: str) -> "SavedPosition":
        """Return what `to_state` made a state of.

        Raises:
            StateError: the state is damaged, of another version, or of another number of samples or fingerprint.

        """
        entries = _FORMAT.check(state)
        if entries["num_samples"] != num_samples or entries["fingerprint"] != fingerprint:
            raise StateError(
                f"the loader's state is of other data, codes or filters: it has {entries['num_samples']:,} samples and "
                f"fingerprint {entries['fingerprint'][:12]}, this loader {num_samples:,} and {fingerprint[:12]}; load "
                "it with the dataset, the codes and the filters that it was saved with"
            )
        position = entries["position"]
        if position > num_samples:
            raise StateError(
                f"the loader's state has position {position} of {num_samples} samples; load a state that state_dict "
                "returned"
            )
        unfinished = Unfinished.from_text(entries["pending"], position=position, num_samples=num_samples)
        return cls(entries["epoch"], position, entries["seed"], unfinished, entries[DIST_TYPE])


def _checks_of_sizes(position: int) -> dict[str, Check]:
    return dict.fromkeys(_SIZES, integer(1, INT64_MAX)) | {"start": integer(0, position)}


def _encode(left: Positions) -> list[Any]:
    """Return positions as the first one, how many there are, and one bit for each position from the first on."""
    bits = np.zeros(int(left[-1]) + 1 - int(left[0]), dtype=np.bool_)
    bits[left - left[0]] = True
    return [int(left[0]), len(left), base64.b64encode(np.packbits(bits).tobytes()).decode("ascii")]


def _decode(value: Any, start: int, num_samples: int) -> Positions:
    """Return what `_encode` was given: positions of an epoch that are left after `start` samples.

    Raises:
        ValueError, TypeError: the value is damaged.

    """
    first, count, text = value
    bits = np.unpackbits(np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8))
    if integer(0, start)(first) or integer(1, num_samples - start)(count):
        raise ValueError
    left: Positions = first + np.flatnonzero(bits)
    # As many samples as come before the start are trained, all of them positions before the end of what is left.
    if len(left) != count or left[0] != first or left[-1] >= start + count:
        raise ValueError
    return left
