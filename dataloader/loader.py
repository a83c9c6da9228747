"""`build_loader`: a split of a dataset -> this rank's batches, in an order that can be resumed anywhere."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.batch import JaggedBatch, SequenceBatch
from evenrank.dataloader.collate import SequenceCollate
from evenrank.dataloader.pad import grouped, pad_batch
from evenrank.datasets.errors import ConfigError, StateError
from evenrank.datasets.order import Dealing, permute
from evenrank.datasets.store import SequenceStore, open_store

_STATE_VERSION = 1
# Positions are permuted for this many steps at once: enough to spread NumPy's cost per call over many samples.
_STEPS_PER_BLOCK = 64

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """How a split becomes batches."""

    batch_size: int  # rows of every batch, per rank
    split: str = "train"
    max_history_length: int = 512  # events; longer histories keep their newest
    max_num_candidates: int = 0  # the last events of each user; users with fewer events are left out
    num_tasks: int = 0  # with no candidates, more than 0 makes the history's actions the labels
    candidate_actions: bool = False  # the candidates' actions are part of the `action` feature too
    shuffle: bool = True  # another permutation each epoch; False: the order of the rows
    seed: int = 0
    drop_last: bool = False  # leave out the last step of an epoch if it does not fill every rank
    num_workers: int = 0  # threads that collate ahead; 0: the caller's thread collates
    prefetch: int = 2  # batches that each worker may be ahead
    pin_memory: bool = False  # page-locked batches, for copies to a GPU that overlap with work

    def __post_init__(self) -> None:
        for name, least in (
            ("batch_size", 1),
            ("max_history_length", 0),
            ("max_num_candidates", 0),
            ("num_tasks", 0),
            ("num_workers", 0),
            ("prefetch", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")


def build_loader(path: Path | str, config: LoaderConfig, *, rank: int, world_size: int) -> "SequenceLoader":
    """Open a dataset and return the loader of one rank.

    Args:
        path: the folder that `evenrank preprocess` wrote.
        config: the same on all ranks.
        rank: of this process among those that train on different data, 0..world_size-1.
        world_size: how many there are.

    Raises:
        ConfigError, DataError: with one line that says what is wrong and what to do.

    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must lie in 0..world_size-1, got rank {rank} of {world_size}")
    return SequenceLoader(open_store(path, config.split), config, rank=rank, world_size=world_size)


class SequenceLoader:
    """Iterates over one rank's batches of an epoch; each iteration after the first is the next epoch.

    Every rank yields the same number of batches. Where the samples of the last step do not fill it, late ranks get
    fewer, or none: `num_real` tells.

    Attributes:
        num_samples: rows of the split that have enough events, over all ranks.
        num_dropped: rows that do not.
        collate: makes a batch, not padded, of any rows of the split.

    """

    def __init__(self, store: SequenceStore, config: LoaderConfig, *, rank: int, world_size: int) -> None:
        self._store = store
        self._config = config
        self._rank = rank
        self._world_size = world_size
        # Row numbers of the samples; None where all rows are samples.
        self._rows: NDArray[np.int64] | None = None
        if config.max_num_candidates:
            enough = store.lengths >= config.max_num_candidates
            self._rows = None if enough.all() else np.flatnonzero(enough)
        self.num_samples = len(store) if self._rows is None else len(self._rows)
        self.num_dropped = len(store) - self.num_samples
        self.collate = SequenceCollate(
            store=store,
            max_history_length=config.max_history_length,
            num_candidates=config.max_num_candidates,
            label_history=config.num_tasks > 0,
            candidate_actions=config.candidate_actions,
        )
        self._seed = config.seed
        self._start = (0, 0)  # epoch and position where the next iteration begins
        self._after_last = (0, 0)  # epoch and position after the batch that was yielded last

    def __len__(self) -> int:
        """Batches that the next iteration yields."""
        return self._dealing(self._start[1]).num_steps

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, from 0."""
        return self._start[0]

    def __iter__(self) -> Iterator[SequenceBatch]:
        epoch, start = self._start
        self._start = (epoch + 1, 0)
        dealing = self._dealing(start)
        rows = chain.from_iterable(self._row_blocks(dealing, epoch))
        groups = grouped(rows, self._config.batch_size, num_groups=dealing.num_steps)
        batches = self._apply(self._collate_padded, groups)
        for step, batch in enumerate(batches):
            numbered = replace(batch, epoch=epoch, step=step, position=dealing.position_after(step))
            self._after_last = (epoch, numbered.position)
            yield numbered.pin_memory() if self._config.pin_memory else numbered

    def _collate_padded(self, rows: Sequence[int]) -> SequenceBatch:
        return pad_batch(self.collate(rows), self._config.batch_size)

    def _dealing(self, start: int) -> Dealing:
        return Dealing(
            num_samples=self.num_samples,
            world_size=self._world_size,
            batch_size=self._config.batch_size,
            start=start,
            drop_last=self._config.drop_last,
        )

    def _row_blocks(self, dealing: Dealing, epoch: int) -> Iterator[list[int]]:
        for first in range(0, dealing.num_steps, _STEPS_PER_BLOCK):
            steps = range(first, min(first + _STEPS_PER_BLOCK, dealing.num_steps))
            positions = np.concatenate([dealing.positions(step, self._rank) for step in steps])
            if self._config.shuffle and self.num_samples:
                positions = permute(positions, self.num_samples, seed=self._seed, epoch=epoch)
            yield (positions if self._rows is None else self._rows[positions]).tolist()

    def _apply(self, function: Callable[[In], Out], items: Iterable[In]) -> Iterable[Out]:
        if self._config.num_workers == 0:
            return map(function, items)
        return _map_ahead(function, items, self._config.num_workers, self._config.prefetch)

    def state_dict(self, *, after: JaggedBatch | None = None) -> dict[str, Any]:
        """Return the position after a given batch, or after the one yielded last.

        The state is the same whichever rank is asked, and can be loaded with any other world size, batch size and
        number of workers. Pass `after` where something pulls batches ahead of training.
        """
        epoch, position = self._after_last if after is None else (after.epoch, after.position)
        return {
            "version": _STATE_VERSION,
            "epoch": epoch,
            "position": position,
            "seed": self._seed,
            "num_samples": self.num_samples,
            "fingerprint": self._fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, with the next iteration, after the position that `state_dict` returned.

        Where nothing is left of that epoch, the next iteration is the next epoch.

        Raises:
            StateError: the state is damaged, or belongs to other data or filters, or to another version.

        """
        if state.get("version") != _STATE_VERSION:
            raise StateError(f"the loader's state has version {state.get('version')!r}, {_STATE_VERSION} is expected")
        for name in ("epoch", "position", "num_samples", "seed"):
            value = state.get(name)
            if not isinstance(value, int) or (value < 0 and name != "seed"):
                raise StateError(f"the loader's state has {name} {value!r}; load one that state_dict returned")
        if state["num_samples"] != self.num_samples or state.get("fingerprint") != self._fingerprint():
            raise StateError(
                f"the loader's state belongs to other data or filters: it has {state['num_samples']:,} samples and "
                f"fingerprint {str(state.get('fingerprint'))[:12]}, this loader {self.num_samples:,} and "
                f"{self._fingerprint()[:12]}; load the state with the dataset and the filters it was saved with"
            )
        if state["position"] > self.num_samples:
            raise StateError(f"the loader's state has position {state['position']} of {self.num_samples} samples")
        self._seed = state["seed"]
        self._start = self._after_last = (state["epoch"], state["position"])
        if state["position"] and self._dealing(state["position"]).num_steps == 0:
            self._start = (state["epoch"] + 1, 0)

    def identity(self) -> dict[str, int | str]:
        """Say what must be the same on all ranks, and `rank`, which must be the rank's own."""
        return {
            "rank": self._rank,
            "world_size": self._world_size,
            "seed": self._seed,
            "drop_last": self._config.drop_last,
            "num_samples": self.num_samples,
            "fingerprint": self._fingerprint(),
        }

    def _fingerprint(self) -> str:
        """Hash what decides which samples there are and in which order: the content and the filters."""
        deciding = (
            self._store.manifest.content_hash,
            self._config.split,
            self._config.max_num_candidates,
            self._config.shuffle,
        )
        return hashlib.sha256(repr(deciding).encode()).hexdigest()


def _map_ahead(function: Callable[[In], Out], items: Iterable[In], num_workers: int, prefetch: int) -> Iterator[Out]:
    """Like `map`, computed ahead in threads, in order; an exception comes where its result would have come."""
    pending: deque[Future[Out]] = deque()
    executor = ThreadPoolExecutor(num_workers, thread_name_prefix="evenrank-loader")
    try:
        for item in items:
            pending.append(executor.submit(function, item))
            if len(pending) > num_workers * prefetch:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)
