"""`build_loader`: datasets -> this rank's batches, in an order that can be resumed anywhere."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, StateError
from evenrank.dataloader.batch import JaggedBatch
from evenrank.dataloader.collate.sequences import Collate
from evenrank.dataloader.collate.spans import pick_rows
from evenrank.dataloader.config import ReadConfig
from evenrank.dataloader.samples import Mixture, find_samples, make_order
from evenrank.dataloader.workers import Workers
from evenrank.datasets.order import Dealing
from evenrank.datasets.store import SequenceStore, open_store

_STATE_VERSION = 1
_WORD = 0xFFFFFFFFFFFFFFFF

Batch = TypeVar("Batch", bound=JaggedBatch)
# Changes a batch in a worker, with random numbers that depend on the batch alone.
Transform = Callable[[Batch, np.random.Generator], Batch]

_log = logging.getLogger("evenrank")


def build_loader(
    data: Path | str | Mixture,
    config: ReadConfig[Batch],
    *,
    rank: int,
    world_size: int,
    transform: Transform[Batch] | None = None,
) -> "Loader[Batch]":
    """Open a dataset and return the loader of one rank.

    Args:
        data: the folder that `evenrank preprocess` wrote, or a Mixture of such folders.
        config: the same on all ranks. Its type says what batches are: LoaderConfig or SemanticIdConfig.
        rank: of this process among those that train on different data, 0..world_size-1.
        world_size: how many there are.
        transform: called with each padded batch and a random generator, in a worker if there are any; returns the
            batch to hand out, of the same schema. The generator's seed follows from the loader's, the epoch and the
            batch's position, so what it draws does not depend on the workers.

    Raises:
        ConfigError, DataError: with one line that says what is wrong and what to do.

    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must lie in 0..world_size-1, got rank {rank} of {world_size}")
    folders, mixture = ([*data.weights], data) if isinstance(data, Mixture) else ([data], None)
    stores = [open_store(folder, config.split) for folder in folders]
    collate = config.make_collate()
    return Loader(stores, collate, config, rank=rank, world_size=world_size, mixture=mixture, transform=transform)


class Loader(Generic[Batch]):
    """Iterates over one rank's batches of an epoch; each iteration after the first is the next epoch.

    Every rank yields the same number of batches. Where the samples of the last step do not fill it, late ranks get
    fewer, or none: `num_real` tells. A loader can be pickled; where it arrives it maps the same files.

    Attributes:
        num_samples: samples of an epoch, over all ranks.
        left_out: per reason, the rows that make no samples, ascending; int64.

    """

    def __init__(
        self,
        stores: Sequence[SequenceStore],
        collate: Collate[Batch],
        config: ReadConfig[Batch],
        *,
        rank: int,
        world_size: int,
        mixture: Mixture | None = None,
        transform: Transform[Batch] | None = None,
    ) -> None:
        self._stores = tuple(stores)
        self._collate = collate
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._mixture = mixture
        self._transform = transform
        self._workers = Workers(config.num_workers, ahead=config.num_workers, persistent=config.persistent_workers)
        self._samples, self.left_out = find_samples(self._stores, collate)
        self._order = make_order(config.order, self._stores, self._samples, mixture)
        self.num_samples = self._order.num_samples
        self._seed = config.seed
        self._start = (0, 0)  # epoch and position where the next iteration begins
        self._after_last = (0, 0)  # epoch and position after the batch that was yielded last
        if rank == 0:
            for reason, rows in self.left_out.items():
                if len(rows):
                    _log.warning("%s of %s rows are left out: %s", len(rows), sum(map(len, self._stores)), reason)

    @property
    def num_dropped(self) -> int:
        """Rows of the split that make no samples."""
        return sum(len(samples.left_out) for samples in self._samples)

    def __len__(self) -> int:
        """Batches that the next iteration yields."""
        return self._dealing(self._start[1]).num_steps

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, from 0."""
        return self._start[0]

    def collate(self, sample_ids: NDArray[np.int64]) -> Batch:
        """Make a batch, without padding, of any samples: int64 [n], as in the `sample_ids` of batches."""
        (batch,) = self._collate(pick_rows(self._stores, sample_ids), sample_ids, batch_size=len(sample_ids))
        return batch

    def __iter__(self) -> Iterator[Batch]:
        epoch, start = self._start
        self._start = (epoch + 1, 0)
        dealing, seed = self._dealing(start), self._seed
        size = self._config.batch_size

        def make(steps: range) -> list[Batch]:
            ids = self._sample_ids(dealing, steps, epoch=epoch, seed=seed)
            picks = pick_rows(self._stores, ids)
            batches = self._collate(picks, ids, batch_size=size, num_batches=len(steps))
            for step, batch in zip(steps, batches, strict=True):
                batch.epoch, batch.step, batch.position = epoch, step, dealing.position_after(step)
            if self._transform is not None:
                places = (dealing.first_position(step, self._rank) for step in steps)
                rngs = (np.random.default_rng([seed & _WORD, epoch, place]) for place in places)
                batches = [self._transform(batch, rng) for batch, rng in zip(batches, rngs, strict=False)]
            return [batch.pin_memory() for batch in batches] if self._config.pin_memory else batches

        at_once = self._config.prefetch
        blocks = (
            range(first, min(first + at_once, dealing.num_steps)) for first in range(0, dealing.num_steps, at_once)
        )
        for batch in chain.from_iterable(self._workers.map(make, blocks)):
            self._after_last = (batch.epoch, batch.position)
            yield batch

    def _dealing(self, start: int) -> Dealing:
        return Dealing(
            num_samples=self.num_samples,
            world_size=self._world_size,
            batch_size=self._config.batch_size,
            start=start,
            drop_last=self._config.drop_last,
        )

    def _sample_ids(self, dealing: Dealing, steps: range, *, epoch: int, seed: int) -> NDArray[np.int64]:
        """Return this rank's samples in these steps, one step's behind the other's: int64."""
        positions = np.concatenate([dealing.positions(step, self._rank) for step in steps])
        return self._order.rows(positions, seed=seed, epoch=epoch)

    def close(self) -> None:
        """End the threads that `persistent_workers` keeps."""
        self._workers.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_order"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Made anew rather than copied: an order may hold a column of the store.
        self._order = make_order(self._config.order, self._stores, self._samples, self._mixture)

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
        hashed = hashlib.sha256()
        for store, samples in zip(self._stores, self._samples, strict=True):
            hashed.update(f"{store.manifest.content_hash} {store.split} {len(samples.left_out)} ".encode())
            hashed.update(samples.left_out.astype("<i8").tobytes())
        hashed.update(repr((self._collate.filters(), self._order.identity())).encode())
        return hashed.hexdigest()
