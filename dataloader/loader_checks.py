"""Checks of what a Balancer is given as a loader, and of what that yields."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.batch import JaggedBatch

# Modules of samplers whose lengths are exact; those of others are often estimates.
_EXACT_SAMPLERS = ("torch.utils.data.", "torchdata.stateful_dataloader.")


def check_batches(batches: object) -> None:
    """Check that an object may be an iterable of batches.

    Raises:
        ConfigError: it is something else; the message says what to pass instead.

    """
    if isinstance(batches, str | Path):
        raise ConfigError(
            f"batches is a path, {str(batches)!r}; pass build_loader(path, config, rank=..., world_size=...)"
        )
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        raise ConfigError(
            f"batches is a {type(batches).__name__}, a Dataset of samples; pass "
            "DataLoader(dataset, batch_size=..., collate_fn=JaggedCollate({...}))"
        )
    is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if isinstance(batches, JaggedBatch | Mapping | Tensor) or not is_iterable:
        raise ConfigError(
            f"batches must be an iterable of JaggedBatches, such as a loader; got a {type(batches).__name__}"
        )


def check_batch(batch: object) -> None:
    """Check that a loader yields batches.

    Raises:
        ConfigError: it yields something else; the message says how to make batches of it.

    """
    if isinstance(batch, JaggedBatch):
        return
    if isinstance(batch, KeyedJaggedTensor):
        raise ConfigError(
            "the loader yields KeyedJaggedTensors; derive a dataclass from JaggedBatch with a field for them, and "
            "yield that"
        )
    names = f" of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
    raise ConfigError(
        f"the loader yields a {type(batch).__name__}{names} instead of a JaggedBatch; pass its DataLoader "
        "collate_fn=JaggedCollate({...}), or, if these are samples, pass PaddedBatches(samples, batch_size=..., "
        "collate=JaggedCollate({...}))"
    )


def exact_length(batches: object) -> int | None:
    """Return how many batches an epoch of a DataLoader must have; None: that is not certain."""
    if type(batches) not in (DataLoader, StatefulDataLoader):  # derived ones, such as Accelerate's, may skip batches
        return None
    loader: DataLoader[Any] = batches  # type: ignore[assignment]
    batches_of = getattr(loader.batch_sampler, "sampler", None)  # of a batch sampler that was passed to the loader
    samplers = [sampler for sampler in (loader.batch_sampler, batches_of, loader.sampler) if sampler is not None]
    is_exact = all(type(sampler).__module__.startswith(_EXACT_SAMPLERS) for sampler in samplers)
    return None if isinstance(loader.dataset, IterableDataset) or not is_exact else len(loader)


def check_all_came(num_batches: int, expected: int | None) -> None:
    """Check that a DataLoader has yielded all of its batches: it takes a StopIteration of user code for its own end.

    Raises:
        DataError: it has yielded fewer.

    """
    if expected is not None and num_batches < expected:
        raise DataError(
            f"the DataLoader ended after {num_batches} of {expected} batches: its dataset or collate_fn raised "
            "StopIteration, as next() does without a default, or its state is damaged; pass a default, raise another "
            "error, or load another state"
        )
