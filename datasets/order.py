"""The order of samples: pure functions (epoch, position) -> sample, and the schedule of positions by steps and ranks.

The stateless permutation depends only on the seed, the epoch and the number of samples. Each position of it is computed
independently, so no rank ever holds an array of all samples, and an epoch can be entered at any position.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError
from evenrank.core.hashing import mix_word
from evenrank.core.registry import Registry
from evenrank.core.rules import Count, NonNegative
from evenrank.core.settings import Settings, check_value, construct

if TYPE_CHECKING:  # simulating steps needs no store, whose imports take longer
    from evenrank.datasets.store import SequenceStore

Stores = Sequence["SequenceStore"]
OpenSplit = Callable[[Any], "SequenceStore"]

# Rounds of the Feistel network. Four give a pseudo-random permutation in theory (Luby and Rackoff, 1988); six leave a
# margin for the weaker round function and for the few bits of small domains.
_ROUNDS = 6
_WORD_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: its multiples are spread evenly over 64-bit words
_CHECKED_AT_FIRST = 1 << 20  # positions of a user's order that are checked before the first step


def permute(
    positions: NDArray[np.int64], num_samples: int, *, seed: int, epoch: int, segment_size: int | None = None
) -> NDArray[np.int64]:
    """Return the samples at positions of an epoch's permutation of 0..num_samples-1: int64 of the same shape.

    With a segment size, each consecutive segment of so many samples has a permutation of its own.

    A Feistel network permutes the smallest power of two that is at least `num_samples`, which is at most 2^62. A result
    outside 0..num_samples-1 is permuted again until it is inside (cycle walking; Black and Rogaway, 2002): fewer than
    two passes on average.
    """
    words = np.array(positions, dtype=np.uint64)
    size = num_samples if segment_size is None else segment_size
    key, salt = np.uint64(seed & _WORD_MASK), np.uint64((epoch * _GOLDEN) & _WORD_MASK)
    _permute_in_place(words.reshape(-1), np.uint64(num_samples), np.uint64(size), key, salt)
    return words.view(np.int64)


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of the index-th dataset of a mixture or block of a stream, far from those of its neighbours."""
    return seed + (index + 1) * _GOLDEN


@compiled
def _permute_in_place(
    words: NDArray[np.uint64], num_samples: np.uint64, size: np.uint64, key: np.uint64, salt: np.uint64
) -> None:
    one = np.uint64(1)
    keys = np.empty(_ROUNDS, dtype=np.uint64)
    begin, end, bits = np.uint64(0), np.uint64(0), np.uint64(0)  # of the segment that the keys are of
    for index in range(len(words)):
        word = words[index]
        if word < begin or word >= end:
            segment = word // size
            begin = segment * size
            end = min(begin + size, num_samples)
            bits = np.uint64(2)
            while (end - begin - one) >> bits:
                bits += one
            mixed = mix_word(mix_word(key + segment * np.uint64(_GOLDEN)) ^ salt)
            for number in range(_ROUNDS):
                keys[number] = mix_word(mixed + np.uint64(number + 1) * np.uint64(_GOLDEN))
        word -= begin
        while True:
            # The halves may differ by one bit: each round rewrites one half from the other, then swaps their widths.
            right_bits = bits // np.uint64(2)
            left_bits = bits - right_bits
            left, right = word >> right_bits, word & ((one << right_bits) - one)
            for round_key in keys:
                left, right = right, left ^ (mix_word(right ^ round_key) & ((one << left_bits) - one))
                left_bits, right_bits = right_bits, left_bits
            word = (left << right_bits) | right
            if word < end - begin:
                break
        words[index] = begin + word


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """The rows of a split that are samples: all except a few left out, which alone take memory."""

    num_rows: int
    left_out: NDArray[np.int64]  # [n]: rows that are not samples, ascending

    def __len__(self) -> int:
        return self.num_rows - len(self.left_out)

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of samples with indices in 0..len-1: int64 of the same shape."""
        # left_out 2 3 7: 2 samples precede row 2, also 2 precede row 3, and 5 precede row 7. Sample 4 comes after two
        # rows that are left out, so it is row 6; sample 5 comes after three, so it is row 8.
        samples_before = self.left_out - np.arange(len(self.left_out))
        return indices + np.searchsorted(samples_before, indices, side="right")


class SampleOrder(Protocol):
    """The row at each position of each epoch: a pure function, the same on all ranks."""

    num_samples: int
    """Positions of an epoch."""

    @abstractmethod
    def rows(self, positions: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the rows at positions, each in 0..num_samples-1: int64 of the same shape."""

    def fingerprint(self) -> tuple[object, ...]:
        """Return everything besides seed and epoch that determines the order, for comparison with a saved state."""
        return (type(self).__qualname__, self.num_samples)


class RowOrder(SampleOrder):
    """Ascending rows, in every epoch, or a different permutation of the samples in each. Base of our other orders.

    It permutes them within segments of a share `segment` of them. `settings` join the fingerprint.
    """

    def __init__(
        self, *, samples: Samples, shuffle: bool = False, segment: float = 1.0, settings: tuple[object, ...] = ()
    ) -> None:
        self.num_samples, self._samples, self._shuffle = len(samples), samples, shuffle
        self._segment_size, self._settings = max(1, round(segment * len(samples))), settings

    def rows(self, positions: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the rows at positions."""
        if self._shuffle:
            size = self._segment_size
            positions = permute(positions, self.num_samples, seed=seed, epoch=epoch, segment_size=size)
        return self._samples.rows(positions)

    def fingerprint(self) -> tuple[object, ...]:
        """Return the kind of order and its length."""
        return ("shuffle" if self._shuffle else "rows", self.num_samples, *self._settings)


class _OwnOrder(SampleOrder):
    """An order by a user. Its rows are checked, because compiled loops use them without bounds checks."""

    def __init__(self, name: str, order: SampleOrder, samples: Sequence[Samples]) -> None:
        check_value(f"num_samples of the order {name}", order.num_samples, NonNegative)
        self.num_samples, self._name, self._order = order.num_samples, name, order
        firsts = np.cumsum([0, *(each.num_rows for each in samples)]).tolist()
        self._num_rows = firsts.pop()
        self._left_out = np.concatenate([first + each.left_out for first, each in zip(firsts, samples, strict=True)])
        first_rows = self.rows(np.arange(min(self.num_samples, _CHECKED_AT_FIRST)), seed=0, epoch=0)
        self._hash = hashlib.sha256(first_rows.astype("<i8").tobytes()).hexdigest()

    def rows(self, positions: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        rows = np.asarray(self._order.rows(positions.copy(), seed=seed, epoch=epoch))
        if rows.shape != positions.shape or rows.dtype.kind not in "iu":
            given = f"got {rows.dtype} of shape {rows.shape}"
            raise ConfigError(f"the order {self._name} must return integers of shape {positions.shape}, {given}")
        rows = rows.astype(np.int64, copy=False)
        is_wrong = (rows < 0) | (rows >= self._num_rows) | np.isin(rows, self._left_out)
        by_row = np.argsort(rows, kind="stable")
        is_wrong[by_row[1:]] |= rows[by_row[1:]] == rows[by_row[:-1]]
        for row, position in zip(rows[is_wrong][:1], positions[is_wrong][:1], strict=True):
            raise ConfigError(
                f"the order {self._name} has row {row} at position {position} of epoch {epoch}, which is none of the "
                f"samples in 0..{self._num_rows - 1}, or comes twice; each comes once in an epoch"
            )
        return rows

    def fingerprint(self) -> tuple[object, ...]:
        return (self._name, self.num_samples, self._hash)  # code has no version, so its first rows stand for it


class Order:
    """Says which samples of stored data an epoch has, and in what order they come: `LoaderConfig(order=...)`.

    Derive your own order from this class and define `arrange`. Ranks compare orders by their `repr`.
    """

    shuffle: bool = False
    """Whether samples come in another order in each epoch."""
    targets: ClassVar[str] = ""
    """What messages call its samples if they are parts of rows, which end with targets."""
    has_requests: ClassVar[bool] = False
    """Whether its samples are requests, so that batches have their times."""

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}()"

    def open(self, data: Any, open_split: OpenSplit, max_targets: int) -> tuple["Order", Stores]:
        """Open what `build_loader` was given; return its stores, and the order of them, which has the methods below.

        Samples that are parts of rows have at most `max_targets` targets.
        """
        return self, [open_split(data)]

    def of_epoch(self, epoch: int, stores: Stores) -> Stores:
        """Return the stores whose rows or slices an epoch has: by default all rows, in every one."""
        return stores

    def place(self, epoch: int) -> str:
        """Return what tells an epoch from others that have other samples, for states: the times of a window."""
        return ""

    def following(self, epoch: int, place: str, *, has_begun: bool) -> int:
        """Return the epoch after that of a state, given the next number, its place, and whether it has begun."""
        return epoch

    def after_empty(self, epoch: int, stores: Stores) -> int | None:
        """Return the epoch to go on with if one has no samples; None if there is none."""
        return None

    def arrange(self, stores: Stores, samples: Sequence[Samples]) -> SampleOrder:
        """Return the order of an epoch's samples, given which rows of each store are samples: by default, as they are.

        Rows are numbered through all stores; but for mixtures and requests, there is one. The result has to be the same
        on all ranks, and be picklable if the loader is.
        """
        return RowOrder(samples=samples[0], shuffle=self.shuffle)

    def of(self, stores: Stores, samples: Sequence[Samples]) -> SampleOrder:
        """Return that order, checked if a user has made it: a ConfigError if a row is no sample, or comes twice."""
        made = self.arrange(stores, samples)
        return made if isinstance(made, RowOrder) else _OwnOrder(repr(self), made, samples)


RegisteredOrder = TypeVar("RegisteredOrder", bound=Order | type[Order])
ORDERS: Registry[Any] = Registry(
    "order",
    expected="an Order, or a class of them",
    accepts=lambda made: issubclass(made if isinstance(made, type) else type(made), Order),
)


def register_order(name: str) -> Callable[[RegisteredOrder], RegisteredOrder]:
    """Return a decorator that makes an Order, or a class whose settings have defaults, available as `order=name`.

    It raises a ConfigError if another module has taken the name or the decorated object is no order. The same module
    may replace its order; `ORDERS.unregister(name)` removes one.
    """
    return ORDERS.register(name)


def resolve_order(spec: str | Order, data: object = None) -> Order:
    """Return an order, given itself or its name; data that are a Mixture have their own."""
    if isinstance(data, Order):
        if spec != "shuffle":
            raise ConfigError(f"mixtures are always shuffled; order must be 'shuffle', got {spec!r}")
        return data
    made = ORDERS[spec] if isinstance(spec, str) else spec
    order: Order = construct(made, {}, f"the order {spec!r}") if isinstance(made, type) else made
    return order


ORDERS.register("rows")(Order)


@register_order("shuffle")
class _Shuffled(Order):
    shuffle = True


class StepSchedule(ABC):
    """The positions of an epoch that each step takes, and each rank's share of them before balancing."""

    __slots__ = ()

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Remaining steps, the same on every rank."""

    @abstractmethod
    def position_after(self, step: int) -> int:
        """Return the number of positions that are consumed after a step."""

    @abstractmethod
    def first_position(self, step: int, rank: int) -> int:
        """Return the first position of a rank in a step; may be past the step's end, where the rank has none."""

    @abstractmethod
    def num_loaded(self, step: int) -> NDArray[np.int64]:
        """Return the number of positions of each rank in a step: int64 [world_size]."""

    def positions_of_all(self, steps: range) -> NDArray[np.int64]:
        """Return the positions of all ranks in consecutive steps, step by step and rank by rank: int64 [n]."""
        end = self.position_after(steps[-1])
        return np.arange(min(self.first_position(steps[0], 0), end), end, dtype=np.int64)

    def positions(self, step: int, rank: int) -> NDArray[np.int64]:
        """Return the positions of a rank in a step, ascending: int64 [n]."""
        first, end = self.first_position(step, rank), self.first_position(step, rank + 1)
        step_end = self.position_after(step)
        return np.arange(min(first, step_end), min(end, step_end), dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochSchedule(Settings, StepSchedule):
    """Each step takes the next `world_size * batch_size` positions, rank by rank, of which `start` are consumed before.

    start = 0, world_size = 2, batch_size = 3, num_samples = 10

    step 0: rank 0 gets 0 1 2, rank 1 gets 3 4 5
    step 1: rank 0 gets 6 7 8, rank 1 gets 9
    """

    num_samples: NonNegative
    world_size: Count
    batch_size: Count  # positions per rank and step
    start: NonNegative = 0
    drop_last: bool = False  # leave out a last step that does not fill every rank

    def _check(self) -> None:
        if self.start > self.num_samples:
            raise ConfigError(f"start must be between 0 and num_samples = {self.num_samples}, got {self.start}")

    @property
    def samples_per_step(self) -> int:
        """Positions of a full step over all ranks."""
        return self.world_size * self.batch_size

    @property
    def num_steps(self) -> int:
        """Remaining steps."""
        remaining = self.num_samples - self.start
        return remaining // self.samples_per_step if self.drop_last else -(-remaining // self.samples_per_step)

    def position_after(self, step: int) -> int:
        """Return the number of positions that are consumed after a step."""
        return min(self.num_samples, self.first_position(step + 1, 0))

    def first_position(self, step: int, rank: int) -> int:
        """Return the first position of a rank in a step; may be past the end of the epoch."""
        return self.start + (step * self.world_size + rank) * self.batch_size

    def num_loaded(self, step: int) -> NDArray[np.int64]:
        """Return the number of positions of each rank in a step: `batch_size` while any are left."""
        remaining = self.num_samples - self.first_position(step, 0)
        return np.clip(remaining - self.batch_size * np.arange(self.world_size), 0, self.batch_size)
