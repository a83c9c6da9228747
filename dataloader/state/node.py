"""`EpochNode`: base of loaders and of Balancer, which are iterables of epochs and nodes of torchdata at once.

Also all that evenrank knows of torchdata: what its nodes and loaders, and PyTorch's, tell of the batches they yield.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Protocol, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset
from torchdata.nodes import BaseNode, Batcher, Loader, Unbatcher
from torchdata.stateful_dataloader import StatefulDataLoader

from evenrank.dataloader.batches.batch import Batch, JaggedBatch
from evenrank.dataloader.state.resume_point import CurrentPosition, ResumePoint

_DATA_LOADERS = (DataLoader, StatefulDataLoader)  # derived ones, such as Accelerate's, may skip or divide batches
# Modules of samplers whose lengths are exact; the lengths of others are often estimates.
_EXACT_SAMPLERS = ("torch.utils.data.", "torchdata.stateful_dataloader.")


class EpochNode(BaseNode[Batch], Generic[Batch]):  # type: ignore[misc]
    """Batches, epoch after epoch.

    As an iterable, each iteration is one epoch, or the rest of one after `load_state_dict`. As a torchdata node,
    `reset(None)` begins the next epoch, also in states, and `reset(state)` continues exactly there, even if nothing is
    left.
    """

    _current: CurrentPosition

    def __init__(self) -> None:
        super().__init__()
        self._epoch_iterator: Iterator[Batch] | None = None  # of the node; iterators of the iterable are their own
        self._reset_to: ResumePoint | None = None  # within an epoch, by `reset(state)`

    @abstractmethod
    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the next epoch."""

    @abstractmethod
    def state_dict(self, *, after: JaggedBatch | None = None) -> dict[str, Any]:
        """Return the position after a batch that was handed out, as values that any checkpoint format can hold.

        Only `after.epoch` and `after.position` are used; None: the batch handed out last.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, from the next iteration on, at the position that `state_dict` returned."""

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or continue at a state. Called by torchdata."""
        super().reset(initial_state)
        self._epoch_iterator = None
        if initial_state is None:
            self._start_next(skip_rest=self._current.next is self._reset_to)
            return
        self.load_state_dict(initial_state)
        after, following = self._current.after_last, self._current.next
        self._reset_to = following if after.position and following.epoch == after.epoch else None
        if self._current.next.epoch > initial_state.get("epoch", math.inf):  # nothing is left of that epoch
            self._epoch_iterator = iter(())

    def _start_next(self, *, skip_rest: bool) -> None:
        """Make `state_dict` return where the next iteration begins; with `skip_rest`, with the epoch after that one."""
        self._current.start_next(skip_rest=skip_rest)

    def next(self) -> Batch:
        """Return the next batch of the epoch, or raise StopIteration. Called by torchdata."""
        if self._epoch_iterator is None:
            self._epoch_iterator = iter(self)
        return next(self._epoch_iterator)

    def get_state(self) -> dict[str, Any]:
        """Return `state_dict()`. Called by torchdata."""
        return self.state_dict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_epoch_iterator": None}  # iterators cannot be pickled


@runtime_checkable
class HasRankInvariants(Protocol):
    """Batches that describe the settings they depend on; a Balancer compares them between ranks."""

    def rank_invariants(self) -> Mapping[str, Any]:
        """Return picklable settings, by name, that must be equal on all ranks; only `rank` is the rank's own number."""


@runtime_checkable
class KnowsPositions(Protocol):
    """A batch sampler that knows the position after each of its steps."""

    def with_positions(self, loader: Any) -> Any:
        """Return the batches of a DataLoader over it, with `state_dict(after=...)`, as a loader of evenrank has it."""


def find_rank_invariants(batches: object) -> Mapping[str, Any]:
    """Return the invariants of a loader, or of the loader at the source of torchdata nodes; empty without one."""
    if isinstance(batches, HasRankInvariants):
        return batches.rank_invariants()
    inner = inner_node(batches)
    return {} if inner is None else find_rank_invariants(inner)


def inner_node(batches: object) -> BaseNode | None:
    """Return the node that torchdata's Loader, or one of its nodes, reads from; None without one."""
    inner = getattr(batches, "root", getattr(batches, "source", None))
    return inner if isinstance(inner, BaseNode) else None


def in_epochs(batches: object) -> Any:
    """Return batches that can be iterated over epoch after epoch: torchdata's Loader over a node that is not ours."""
    return Loader(batches) if isinstance(batches, BaseNode) and not isinstance(batches, EpochNode) else batches


def batch_size_of(batches: Any) -> int:
    """Return the `batch_size` of a DataLoader, or of the Batcher of nodes; 0 without one."""
    if type(batches) in _DATA_LOADERS or isinstance(batches, Batcher):
        return batches.batch_size or 0
    if isinstance(batches, Unbatcher) or getattr(batches, "prebatch", None) is not None:  # its source has other batches
        return 0
    inner = inner_node(batches)
    return 0 if inner is None else batch_size_of(inner)


def exact_length(batches: object) -> int | None:
    """Return the number of batches that an epoch of a DataLoader must have; None if that is uncertain."""
    if type(batches) not in _DATA_LOADERS:
        return None
    loader: DataLoader[Any] = batches  # type: ignore[assignment]
    batches_of = getattr(loader.batch_sampler, "sampler", None)  # of a batch sampler that was passed to the loader
    samplers = [sampler for sampler in (loader.batch_sampler, batches_of, loader.sampler) if sampler is not None]
    is_exact = all(type(sampler).__module__.startswith(_EXACT_SAMPLERS) for sampler in samplers)
    return None if isinstance(loader.dataset, IterableDataset) or not is_exact else len(loader)
