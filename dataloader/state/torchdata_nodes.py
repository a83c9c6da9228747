"""All that evenrank knows of torchdata: what its nodes and loaders, and PyTorch's, tell of the batches they yield."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torchdata.nodes import BaseNode, Batcher, Loader, Unbatcher
from torchdata.stateful_dataloader import StatefulDataLoader

__all__ = ["BaseNode", "Loader", "batch_size_of", "exact_length", "inner_node"]

_DATA_LOADERS = (DataLoader, StatefulDataLoader)  # derived ones, such as Accelerate's, may skip or divide batches
# Modules of samplers whose lengths are exact; the lengths of others are often estimates.
_EXACT_SAMPLERS = ("torch.utils.data.", "torchdata.stateful_dataloader.")


def inner_node(batches: object) -> BaseNode | None:
    """Return the node that torchdata's Loader, or one of its nodes, reads from; None without one."""
    inner = getattr(batches, "root", getattr(batches, "source", None))
    return inner if isinstance(inner, BaseNode) else None


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
