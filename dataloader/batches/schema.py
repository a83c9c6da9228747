"""The schema that the batches of all ranks share; checks of a batch, and of what other people's loaders yield."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.compiled import compiled
from evenrank.core.errors import ConfigError
from evenrank.dataloader.batches.batch import JaggedBatch, LossKey, check_loss_key, name_keys


class FieldSpec(NamedTuple):
    """The properties of a field that must be the same on all ranks."""

    name: str
    keys: tuple[str, ...] | None
    """Keys of a KeyedJaggedTensor; None for a dense tensor."""
    dtype: torch.dtype | None
    """Of the values; None if the field is None."""
    shape: tuple[int, ...] = ()
    """Of one row of a dense tensor, or of one value of a jagged tensor."""
    lengths_dtype: torch.dtype | None = None
    weights_dtype: torch.dtype | None = None
    fill: float = 0
    """Value of the padding rows of a dense tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSchema:
    """The properties of batches that all ranks share; they are compared before the first step."""

    batch_type: type[JaggedBatch]
    batch_size: int
    """Rows of a batch, per rank."""
    fields: tuple[FieldSpec, ...]
    """The tensor fields, in declared order."""
    loss_key: LossKey | None
    length_limits: tuple[tuple[str, int], ...] = ()
    """By name, sorted."""
    shared: tuple[tuple[str, Any], ...] = ()
    """The values of fields that are declared with `host(in_schema=True)`, by name."""

    jagged_keys: tuple[tuple[str, str], ...] = field(init=False, repr=False, compare=False)
    """Field and key of each of the K jagged features, in the order of the rows of lengths [K, ...]."""
    key_names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Their names, see `name_keys`."""

    def __post_init__(self) -> None:
        keys = tuple((spec.name, key) for spec in self.fields for key in spec.keys or ())
        object.__setattr__(self, "jagged_keys", keys)
        object.__setattr__(self, "key_names", tuple(name_keys(keys)))
        check_loss_key(self.loss_key, keys)

    def lengths_by_key(self, lengths: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Return the rows of lengths [K, ...], by name."""
        return dict(zip(self.key_names, lengths, strict=True))

    def differences(self, other: "BatchSchema") -> list[str]:
        """Return the differences from another schema, each as `field: this schema's value and the other's`."""
        values: list[tuple[str, Any, Any]] = [
            # By name, because classes that a JaggedCollate makes of other tensors are told apart by these.
            ("batch_type", repr(self.batch_type), repr(other.batch_type)),
            ("batch_size", self.batch_size, other.batch_size),
            ("loss_key", self.loss_key, other.loss_key),
        ]
        limits = _pair(dict(self.length_limits), dict(other.length_limits))
        values += [(f"length limit of {key}", *of_key) for key, *of_key in limits]
        values += _pair(dict(self.shared), dict(other.shared))
        differences = [f"{name}: {value} and {of_other}" for name, value, of_other in values if value != of_other]
        specs, other_specs = ({spec.name: spec for spec in schema.fields} for schema in (self, other))
        for name, spec, other_spec in _pair(specs, other_specs):
            # A NaN fill value from another rank is never equal to this rank's, but their representations are.
            if spec != other_spec and repr(spec) != repr(other_spec):
                differences.append(f"{name}: {_describe_field(spec)} and {_describe_field(other_spec)}")
        return differences


def _pair(values: Mapping[str, Any], others: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, values.get(name), others.get(name)) for name in dict.fromkeys([*values, *others])]


def _describe_field(spec: FieldSpec | None) -> str:
    if spec is None or spec.dtype is None:
        return "None"
    weights = "" if spec.weights_dtype is None else f" with {spec.weights_dtype} weights"
    keys = "" if spec.keys is None else f" of keys {', '.join(spec.keys)}"
    return f"{spec.dtype}{list(spec.shape) if spec.shape else ''}{keys}{weights}"


def schema_of(batch: JaggedBatch) -> BatchSchema:
    """Return the schema of a batch; a TypeError or ValueError if a field has an unsupported type or number of rows."""
    batch_type: Any = type(batch)
    fills, limits = batch.fill_values(), batch.length_limits
    return _schema(
        batch_type=batch_type,
        batch_size=batch.batch_size,
        fields=tuple(_spec_of(name, value, batch.batch_size, fills[name]) for name, value in batch.tensors()),
        loss_key=batch.loss_key(),
        length_limits=tuple(sorted(limits.items())) if limits else (),
        shared=tuple((name, getattr(batch, name)) for name in _names_of_shared(batch_type)),
    )


_schema = functools.lru_cache(BatchSchema)  # the batches of a loader have one schema, and each is compared with it


@functools.cache
def _names_of_shared(batch_type: Any) -> tuple[str, ...]:
    return tuple(entry.name for entry in dataclasses.fields(batch_type) if entry.metadata.get("in_schema"))


def _spec_of(name: str, value: object, batch_size: int, fill: float) -> FieldSpec:
    if value is None:
        return FieldSpec(name=name, keys=None, dtype=None)
    if isinstance(value, KeyedJaggedTensor):
        if not value.keys():
            raise ValueError(f"{name} must have at least one key; set the field to None if batches lack it")
        if value.variable_stride_per_key() or value.stride() != batch_size:
            raise ValueError(f"{name} must have batch_size = {batch_size} rows in every key")
        _check_on_cpu(name, value.values())
        weights = value.weights_or_none()
        if weights is not None and weights.dim() != 1:
            raise ValueError(f"{name} must have one weight per value, got weights of shape {tuple(weights.shape)}")
        return FieldSpec(
            name=name,
            keys=tuple(value.keys()),
            dtype=value.values().dtype,
            shape=tuple(value.values().shape[1:]),
            lengths_dtype=value.lengths().dtype,
            weights_dtype=None if weights is None else weights.dtype,
        )
    if isinstance(value, Tensor):
        _check_on_cpu(name, value)
        shape = tuple(value.shape)
        if not shape or shape[0] != batch_size:
            raise ValueError(f"{name} must have batch_size = {batch_size} rows, its shape is {shape}")
        return FieldSpec(name=name, keys=None, dtype=value.dtype, shape=shape[1:], fill=fill)
    raise TypeError(
        f"{name} must be a KeyedJaggedTensor, a tensor or None, or be declared with host(); got {type(value)}"
    )


def _check_on_cpu(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.requires_grad:
        on_device = f"is on {tensor.device}; move it, or leave out the device of the loader's config"
        actual = "requires a gradient; detach it" if tensor.requires_grad else on_device
        raise ValueError(f"{name} must be on the CPU and require no gradient, but it {actual}")


def check_contents(batch: JaggedBatch, schema: BatchSchema) -> NDArray[np.int64]:
    """Return `lengths_of` a batch; an error if it has another schema, or lengths that do not match its values.

    It may have fewer rows. The compiled loops that copy values check no bounds.
    """
    if (own := schema_of(batch)) != schema:
        own = dataclasses.replace(own, batch_size=schema.batch_size)
        if own != schema and (differences := schema.differences(own)):
            raise ValueError(f"a batch differs from the first one: {'; '.join(differences)}")
    if batch.batch_size > schema.batch_size:
        raise ConfigError(
            f"a batch has {batch.batch_size} rows, but balanced batches have {schema.batch_size}: BalanceConfig's "
            "batch_size, or the most of the first batches; pass the most rows that a batch can have as batch_size"
        )
    if not 0 <= batch.num_real <= batch.batch_size:
        raise ValueError(f"num_real must be between 0 and batch_size = {batch.batch_size}, got {batch.num_real}")
    lengths = lengths_of(batch)
    least, longest, totals, in_padding = describe_lengths(lengths, batch.num_real).tolist()
    first_key = 0
    for name, value in batch.tensors():
        if not isinstance(value, KeyedJaggedTensor):
            continue
        keys = slice(first_key, first_key := first_key + len(value.keys()))
        if (negative := min(least[keys])) < 0:
            raise ValueError(f"{name} has a negative length, {negative}")
        length_sum, num_values, weights = sum(totals[keys]), len(value.values()), value.weights_or_none()
        if length_sum != num_values or (weights is not None and len(weights) != num_values):
            weighted = "" if weights is None else f" and {len(weights)} weights"
            raise ValueError(f"{name} has lengths that sum to {length_sum}, but {num_values} values{weighted}")
        if any(in_padding[keys]):
            raise ValueError(
                f"{name} has padding rows that are not empty; put samples in the first num_real = {batch.num_real} rows"
            )
    if limits := batch.length_limits:
        for name, length in zip(schema.key_names, longest, strict=True):
            if length > limits.get(name, length):
                raise ValueError(
                    f"{name} has a row of {length} values, more than its limit, {limits[name]}; a transform that makes "
                    "rows longer must replace length_limits too"
                )
    return lengths


def lengths_of(batch: JaggedBatch) -> NDArray[np.int64]:
    """Return the lengths of all jagged keys of a batch on the CPU: int64 [K, batch_size], in schema order."""
    jagged = [value for _, value in batch.tensors() if isinstance(value, KeyedJaggedTensor)]
    lengths = np.empty((sum(len(value.keys()) for value in jagged), batch.batch_size), dtype=np.int64)
    end = 0
    for value in jagged:
        rows = lengths[end : (end := end + len(value.keys()))]
        rows[:] = value.lengths().view(rows.shape).numpy()
    return lengths


@compiled
def describe_lengths(lengths: NDArray[np.int64], num_real: int) -> NDArray[np.int64]:
    """Return, for each key, the least length or 0, the longest, the sum of all, and that of padding: int64 [4, K]."""
    described = np.zeros((4, len(lengths)), dtype=np.int64)
    for key in range(len(lengths)):
        for row in range(lengths.shape[1]):
            length = lengths[key, row]
            described[0, key] = min(described[0, key], length)
            described[1, key] = max(described[1, key], length)
            described[2, key] += length
            described[3, key] += length if row >= num_real else 0
    return described


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
