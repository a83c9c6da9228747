"""What other people's loaders can be and yield, with the remedy where it is something else."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader.batches.batch import JaggedBatch


def check_batches(batches: object) -> None:
    """Raise a ConfigError with the remedy if an object cannot be an iterable of batches."""
    if isinstance(batches, str | Path):
        path = repr(str(batches))
        raise ConfigError(f"batches is a path, {path}; pass build_loader(path, config, rank=..., world_size=...)")
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        raise ConfigError(
            f"batches is a {type(batches).__name__}, a Dataset of samples; pass "
            "DataLoader(dataset, batch_size=..., collate_fn=JaggedCollate({...}))"
        )
    is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if isinstance(batches, JaggedBatch | Mapping | Tensor) or not is_iterable:
        kind = type(batches).__name__
        raise ConfigError(f"batches must be an iterable of JaggedBatches, such as a loader; got a {kind}")


def check_batch(batch: object) -> None:
    """Raise a ConfigError with the remedy if a loader yields something else than batches."""
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
