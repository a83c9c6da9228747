"""`StepsInHand`: windows and packed steps of any loader's batches, of which several steps are loaded at a time.

Their samples come in the order of the loaded steps, in each rank by rank, then by rows. A window is of `window` loaded
steps. Packed steps take as many of the first samples as fit; what more loaded samples could join waits for them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import StateError
from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.costs.cost import COST_BITS, cost_shift
from evenrank.dataloader.balance.exchange.exchange import Handle
from evenrank.dataloader.balance.packing import clip_tokens, pack_in_hand
from evenrank.dataloader.balance.partition.strategies import real_rows
from evenrank.dataloader.balance.plan import assign_to_steps
from evenrank.dataloader.balance.ranks.metadata import StepMetadata, common_word
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.state.resume_point import Left
from evenrank.datasets.order import derive_seed

MOST_IN_HAND = 64
"""Loaded steps after which samples wait no longer for others, with which they could be packed."""

Rows = NDArray[np.bool_]
"""bool [n, W, B]: of the rows of n loaded steps."""


class StepsInHand:
    """Makes steps of loaded ones, of n steps of W ranks with B rows each, in one iteration; the same on all ranks.

    Args:
        config: how steps are made.
        position: before the first step that is loaded.
        seed: of the order of samples.
        resumed: what is left of the first steps, of a loaded state.
        trained: samples trained before, for positions in packed steps of a loader that does not count samples; None: it
            does.
        is_each_position: whether each position is a sample, unless a step has fewer.
    """

    def __init__(
        self,
        config: BalanceConfig,
        *,
        position: int,
        seed: int,
        resumed: Left | None,
        trained: int | None,
        is_each_position: bool,
    ) -> None:
        self._config = config
        self.cost = config.cost  # by which the steps in hand were loaded
        self._position = position  # before them
        self._seed = seed
        self._resumed = resumed
        self._trained = trained
        self._is_each_position = is_each_position
        self._num_made = 0
        self._num_taken = 0  # of the samples in hand, if steps are packed
        self.known: StepMetadata | None = None  # [n, W]
        self.batches: list[JaggedBatch] = []  # [n], of this rank

    def add(self, known: StepMetadata, batches: Sequence[JaggedBatch]) -> None:
        """Take steps that were loaded, [n, W]."""
        self.known = known if self.known is None else np.concatenate([self.known, known])
        self.batches += batches

    def make(self, *, is_last: bool) -> list[Handle]:
        """Return the steps that are made of those in hand, which stay there; `is_last`: no more will be loaded."""
        if (known := self.known) is None:
            return []
        batch_size = known["costs"].shape[-1]
        is_real = np.stack([real_rows(batch_size, len(step), step["num_real"]) for step in known])
        untrained = self._untrained(known, is_real)
        if not self._config.pack:
            return self._window(known, is_real, untrained)
        if untrained is not None:
            self._num_taken = int(np.count_nonzero(is_real & ~untrained))
        return self._pack(known, is_real, is_last=is_last or len(known) >= MOST_IN_HAND, is_end=is_last)

    def _made(self, of: StepMetadata, rows: NDArray[np.int64], position: int, left: Left) -> Handle:
        """Return a step of these rows, in the place of a loaded one, [W]; `position` and `left` are those after it."""
        fields = {"epoch": common_word(of, "epoch"), "step": self._num_made, "position": position}
        self._num_made += 1
        step = Handle(None, rows=rows, left=left, fields=fields | {"plan_hash": common_word(of, "plan_hash") or None})
        step.known = of
        return step

    def _untrained(self, known: StepMetadata, is_real: Rows) -> Rows | None:
        """Return what a loaded state says of the first steps in hand, when they come; None: nothing."""
        resumed, self._resumed = self._resumed, None
        if resumed is None or (rows := resumed.rows) is None:
            return None
        if rows.shape[1:] == is_real.shape[1:] and not rows[len(is_real) :].any():
            untrained = is_real.copy()
            untrained[: len(rows)] = rows[: len(is_real)]
            if not (untrained & ~is_real).any():
                return untrained
        raise StateError(
            "the state is in the middle of steps that were made of other batches; load it with the data, the "
            "batch_size and the transform that it was saved with"
        )

    def drop(self) -> None:
        """Leave out the loaded steps that nothing is left of."""
        if self.known is None:
            return
        ends = np.cumsum(self.known["num_real"].sum(axis=1))
        first = len(ends)
        if self._config.pack and self._num_taken < ends[-1]:
            first = int(np.searchsorted(ends, self._num_taken, side="right"))
            self._num_taken -= int(ends[first - 1]) if first else 0
        else:
            self._num_taken = 0
        if first:
            self._position = common_word(self.known[first - 1], "position")
        self.known, self.batches = self.known[first:] if first < len(ends) else None, self.batches[first:]

    def _positions(self, known: StepMetadata) -> NDArray[np.int64]:
        """Return the positions before the steps in hand, and after each: int64 [n + 1]."""
        return np.array([self._position, *(common_word(step, "position") for step in known)])

    def _window(self, known: StepMetadata, is_real: Rows, resumed: Rows | None) -> list[Handle]:
        (num_steps, world_size, batch_size), positions = is_real.shape, self._positions(known)
        per_step, counts = is_real[0].size, np.count_nonzero(is_real, axis=(1, 2))
        step_of = np.where(is_real, np.arange(num_steps)[:, np.newaxis, np.newaxis], -1)
        epoch, seed = common_word(known[0], "epoch"), derive_seed(self._seed, self._position)

        def assign(rows: Rows, steps: NDArray[np.int64]) -> None:
            """Assign the samples in these rows to these steps."""
            costs, tokens = (known[name][rows].astype(np.int64) for name in ("costs", "tokens"))
            # So that those of all steps can be summed, as where a rank plans alone.
            shifts = [cost_shift(self.cost, count * per_step) for count in (len(steps), 1)]
            costs >>= shifts[0] - shifts[1]
            most = len(steps) * per_step * int(costs.max(initial=0))
            costs >>= max(0, most.bit_length() - COST_BITS)
            options = {"seed": seed, "epoch": epoch, "batch_size": batch_size}
            step_of[rows] = steps[assign_to_steps(costs, tokens, len(steps), world_size, self._config, **options)]

        is_each = self._is_each_position and np.array_equal(np.diff(positions), counts)
        # Few samples stay together and, as where a rank plans alone, the last ones of an epoch.
        joint = np.flatnonzero(counts == per_step if is_each else 2 * counts >= per_step)
        if len(joint) > 1:
            assign(is_real & np.isin(np.arange(num_steps), joint)[:, np.newaxis, np.newaxis], joint)
        first = 0
        if resumed is not None:
            firsts = [number for number in range(num_steps + 1) if np.array_equal(step_of >= number, resumed)]
            if firsts:
                first = firsts[0]
            else:  # the job that saved the state has assigned them differently
                first = num_steps - -(-int(np.count_nonzero(resumed)) // per_step)
                step_of[:] = -1
                assign(resumed, np.arange(first, num_steps))
        by_rank = step_of.transpose(1, 0, 2).reshape(-1)
        made = []
        for number in range(first, num_steps):
            begin, end, is_left = self._position, int(positions[-1]), step_of > number
            left = Left(end)
            if number < num_steps - 1:
                left = Left(begin, self._config.window, is_left, number + 1, has_positions=is_each)
            position = end - int(np.count_nonzero(is_left)) if is_each else int(positions[number + 1])
            made.append(self._made(known[number], np.flatnonzero(by_rank == number), position, left))
        return made

    def _pack(self, known: StepMetadata, is_real: Rows, *, is_last: bool, is_end: bool) -> list[Handle]:
        (_, world_size, batch_size), positions = is_real.shape, self._positions(known)
        samples = np.flatnonzero(is_real)[self._num_taken :]  # into [n, W, B]
        if not len(samples):
            return []
        max_tokens, on_overflow = self._config.max_tokens_per_rank, self._config.on_overflow
        assert max_tokens is not None  # BalanceConfig has checked it
        tokens = known["tokens"].reshape(-1)[samples].astype(np.int64)
        limited = clip_tokens(
            tokens, max_tokens, on_overflow, lambda i: _name(known, np.unravel_index(samples[i], is_real.shape))
        )
        ends_of_steps = np.cumsum(np.count_nonzero(is_real, axis=(1, 2)))
        made, first = [], 0
        for end in pack_in_hand(limited, world_size, batch_size, max_tokens, is_last=is_last).tolist():
            number, rank, row = np.unravel_index(samples[first:end], is_real.shape)
            rows = np.sort((rank * len(known) + number) * batch_size + row)
            taken = self._num_taken + end
            loaded = int(np.searchsorted(ends_of_steps, taken))  # which has the last sample
            before, after = positions[loaded : loaded + 2].tolist()
            num_real = int(np.count_nonzero(is_real[loaded]))
            done = taken - int(ends_of_steps[loaded]) + num_real  # of the samples of that step
            if done == num_real:
                position = int(positions[-1]) if is_end and taken == ends_of_steps[-1] else after
            else:
                position = before + done
            left = Left(position)
            if done < num_real and not (self._is_each_position and after - before == num_real):
                untrained = is_real[loaded] & (np.cumsum(is_real[loaded]).reshape(is_real[0].shape) > done)
                left = Left(before, rows=untrained[np.newaxis])
            if self._trained is not None:
                self._trained += end - first
                position = self._trained
            made.append(self._made(known[loaded], rows, position, left))
            first = end
        self._num_taken += first
        return made


def _name(known: StepMetadata, place: Sequence[np.integer]) -> str:
    number, rank, row = (int(index) for index in place)
    step, epoch = (common_word(known[number], name) for name in ("step", "epoch"))
    return f"row {row} of the batch of rank {rank} in step {step} of epoch {epoch}"
