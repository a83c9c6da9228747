"""What a training step is fed: jagged batches of a fixed number of rows, the real ones first.

    batch_size = 4, num_real = 2            row      0        1    2   3
    features["item_id"]                             [7 3 9] [4]  [ ] [ ]
    sample_ids                                        12      5   -1  -1

Every KeyedJaggedTensor and every dense tensor has `batch_size` rows. The first `num_real` are samples; the others are
padding: length 0 in every key, the declared fill in dense fields. Only `num_real` tells them apart: a real sample may
have length 0 too.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

FIELD_SEPARATOR = "."


def host(default: Any = dataclasses.MISSING) -> Any:
    """Declare a field that stays on the host: a fact about the batch, not a tensor of it."""
    return field(default=default, metadata={"host": True})


def dense(fill: float = 0, default: Any = dataclasses.MISSING) -> Any:
    """Declare a dense tensor field [batch_size, ...] and the value of its padding rows."""
    return field(default=default, metadata={"fill": fill})


@dataclass(kw_only=True, eq=False, repr=False)
class JaggedBatch(Pipelineable):  # type: ignore[misc]
    """Base of all batches; TorchRec's pipelines take them. Derive a dataclass from it and add fields; each is one of

    - a KeyedJaggedTensor of `batch_size` rows for each key,
    - a dense tensor [batch_size, ...] (declare it with `dense(fill=...)` if its padding is not 0),
    - None, where a batch lacks it, on all ranks alike,
    - a fact that stays on the host, declared with `host()`.
    """

    batch_size: int = host()  # rows, per rank
    num_real: int = host()  # the first rows are samples, 0..batch_size
    epoch: int = host(0)
    step: int = host(0)  # of the iteration that yielded it, from 0; the same on all ranks
    position: int = host(0)  # positions of the epoch's order that all ranks have consumed once this step is done
    loss_tokens: int = host(0)  # on this rank
    world_loss_tokens: int | None = host(None)  # over all ranks; None as long as no balancer has counted them
    max_lengths: Mapping[str, int] | None = host(None)  # longest row per key, named as `BatchSchema.named` does

    def loss_key(self) -> tuple[str, str] | None:
        """Name the field and the key whose lengths are the number of loss tokens; None: each sample counts one."""
        return None

    def tensors(self) -> Iterator[tuple[str, "KeyedJaggedTensor | Tensor | None"]]:
        """Yield the name and the value of every field that is not a host's fact, in declared order."""
        for entry in dataclasses.fields(self):
            if not entry.metadata.get("host"):
                yield entry.name, getattr(self, entry.name)

    def __repr__(self) -> str:
        shown = [f"num_real={self.num_real}/{self.batch_size}", f"epoch={self.epoch}", f"step={self.step}"]
        for name, value in self.tensors():
            if isinstance(value, KeyedJaggedTensor):
                counts = zip(value.keys(), value.length_per_key(), strict=True)
                shown.append(f"{name}=[{', '.join(f'{key}: {count:,}' for key, count in counts)}]")
            elif value is not None:
                shown.append(f"{name}={list(value.shape)}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the batch on another device; what is known on the host stays known without synchronising."""
        target = torch.device(device)
        return self._map(lambda tensor: tensor.to(target, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return the batch in page-locked memory, also inside KeyedJaggedTensors."""
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the caching allocator that `stream` uses the batch's memory."""
        for _, value in self.tensors():
            if value is not None:
                value.record_stream(stream)

    def _map(self, function: Callable[[Any], Any]) -> Self:
        changed = {name: function(value) for name, value in self.tensors() if value is not None}
        return dataclasses.replace(self, **changed)


@dataclass(kw_only=True, eq=False, repr=False)
class SequenceBatch(JaggedBatch):
    """Histories and candidates of a sequential recommender."""

    features: KeyedJaggedTensor  # int64; the contextual features, `item_id` (history, then candidates), `action`
    labels: KeyedJaggedTensor | None = None  # int64; key `label`: the candidates' actions, or the history's
    num_candidates: Tensor = dense()  # int64 [batch_size]: how many of the last item ids are candidates
    sample_ids: Tensor = dense(fill=-1)  # int64 [batch_size]: row number in the split

    def loss_key(self) -> tuple[str, str] | None:
        """Each label is a loss token; without labels, each item id."""
        return ("features", "item_id") if self.labels is None else ("labels", "label")


@dataclass(kw_only=True, eq=False, repr=False)
class SemanticIdBatch(JaggedBatch):
    """Histories as semantic ids: each event is `levels` tokens, one of each level's codebook; the last event is the
    target.
    """

    features: KeyedJaggedTensor  # int64; the contextual features, `semantic_id` (levels tokens an event of the history)
    labels: KeyedJaggedTensor  # int64; key `label`: the target's codes, `levels` of them in every real row
    sample_ids: Tensor = dense(fill=-1)  # int64 [batch_size]: row number in the split

    def loss_key(self) -> tuple[str, str] | None:
        """Each of the target's codes is a loss token."""
        return ("labels", "label")


def keyed_jagged_tensor(
    keys: Sequence[str],
    values: Tensor,
    lengths: NDArray[np.integer],
    weights: Tensor | None = None,
    *,
    length_per_key: list[int] | None = None,
) -> KeyedJaggedTensor:
    """Build a KeyedJaggedTensor with its host-side caches, so that nothing downstream synchronises to learn them.

    Args:
        keys: names of the K features.
        values: [sum(lengths)], key-major: all rows of the first key, then all of the second.
        lengths: int64 or int32 [K, B].
        weights: as `values`, or None.
        length_per_key: the sums of `lengths` over rows, if they are known.

    """
    if length_per_key is None:
        length_per_key = lengths.sum(axis=1).tolist()
    return KeyedJaggedTensor(
        keys=list(keys),
        values=values,
        weights=weights,
        lengths=torch.from_numpy(np.ascontiguousarray(lengths)).view(-1),
        stride=lengths.shape[1],
        length_per_key=length_per_key,
        offset_per_key=[0, *accumulate(length_per_key)],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldSpec:
    """What all ranks' batches must agree on in one field."""

    name: str
    keys: tuple[str, ...] | None  # of a KeyedJaggedTensor; None for a dense tensor
    dtype: torch.dtype | None  # of the values; None where the field is None
    shape: tuple[int, ...] = ()  # of one row of a dense tensor, or of one value of a jagged one
    lengths_dtype: torch.dtype | None = None  # None for a dense tensor
    weights_dtype: torch.dtype | None = None  # None where there are no weights; they are one number a value
    fill: float = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSchema:
    """All that a rank needs to know of the others' batches before data move; compared between ranks at the start."""

    batch_type: type[JaggedBatch]
    batch_size: int
    fields: tuple[FieldSpec, ...]
    loss_key: tuple[str, str] | None

    @property
    def jagged_keys(self) -> tuple[tuple[str, str], ...]:
        """Field and key of every jagged feature, in the order in which lengths are exchanged."""
        return tuple((spec.name, key) for spec in self.fields for key in spec.keys or ())

    def named(self, lengths: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Give lengths [K, ...] their keys' names; a key that an earlier field has too is called `field.key`."""
        named: dict[str, NDArray[np.int64]] = {}
        for (name, key), row in zip(self.jagged_keys, lengths, strict=True):
            named[key if key not in named else f"{name}{FIELD_SEPARATOR}{key}"] = row
        return named

    def max_lengths(self, lengths: NDArray[np.int64]) -> dict[str, int]:
        """Return the longest row of each key, given lengths [K, B]."""
        return {name: int(row.max(initial=0)) for name, row in self.named(lengths).items()}

    def differences(self, other: "BatchSchema") -> list[str]:
        """Say in which fields another schema differs, each as `field: what this has, what the other has`."""
        found = []
        for what in ("batch_type", "batch_size", "loss_key"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                found.append(f"{what}: {mine} and {theirs}")
        own, others = ({spec.name: spec for spec in schema.fields} for schema in (self, other))
        for name in dict.fromkeys([*own, *others]):
            # A fill that is not a number is not equal to itself once it comes from another rank.
            if own.get(name) != others.get(name) and repr(own.get(name)) != repr(others.get(name)):
                found.append(f"{name}: {_describe(own.get(name))} and {_describe(others.get(name))}")
        return found


def _describe(spec: FieldSpec | None) -> str:
    if spec is None or spec.dtype is None:
        return "None"
    weights = "" if spec.weights_dtype is None else f" with {spec.weights_dtype} weights"
    keys = "" if spec.keys is None else f" of keys {', '.join(spec.keys)}"
    return f"{spec.dtype}{list(spec.shape) if spec.shape else ''}{keys}{weights}"


def schema_of(batch: JaggedBatch) -> BatchSchema:
    """Read a batch's schema off its fields.

    Raises:
        TypeError, ValueError: a field is of a kind that batches do not have, or has another number of rows.

    """
    specs = []
    fills = {entry.name: entry.metadata.get("fill", 0) for entry in dataclasses.fields(batch)}
    for name, value in batch.tensors():
        if value is None:
            specs.append(FieldSpec(name=name, keys=None, dtype=None))
        elif isinstance(value, KeyedJaggedTensor):
            if not value.keys():
                raise ValueError(f"{name} must have a key; where a batch lacks it, it is None")
            if value.variable_stride_per_key() or value.stride() != batch.batch_size:
                raise ValueError(f"{name} must have batch_size = {batch.batch_size} rows in every key")
            _check_on_cpu(name, value.values())
            weights = value.weights_or_none()
            if weights is not None and weights.dim() != 1:
                raise ValueError(f"{name} must have one weight for each value, theirs is of shape {weights.shape}")
            specs.append(
                FieldSpec(
                    name=name,
                    keys=tuple(value.keys()),
                    dtype=value.values().dtype,
                    shape=tuple(value.values().shape[1:]),
                    lengths_dtype=value.lengths().dtype,
                    weights_dtype=None if weights is None else weights.dtype,
                )
            )
        elif isinstance(value, Tensor):
            _check_on_cpu(name, value)
            if value.dim() == 0 or value.shape[0] != batch.batch_size:
                raise ValueError(f"{name} must have batch_size = {batch.batch_size} rows, its shape is {value.shape}")
            specs.append(
                FieldSpec(name=name, keys=None, dtype=value.dtype, shape=tuple(value.shape[1:]), fill=fills[name])
            )
        else:
            raise TypeError(
                f"{name} must be a KeyedJaggedTensor, a tensor or None, or be declared with host(); it is {type(value)}"
            )
    return BatchSchema(
        batch_type=type(batch), batch_size=batch.batch_size, fields=tuple(specs), loss_key=batch.loss_key()
    )


def _check_on_cpu(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.requires_grad:
        found = "one that requires a gradient" if tensor.requires_grad else f"on {tensor.device}"
        raise ValueError(f"{name} must be a tensor on the CPU that requires no gradient, it is {found}")


def check_contents(batch: JaggedBatch) -> None:
    """Check that lengths add up to what is there, so that nothing outside of it is ever read.

    Raises:
        ValueError: they do not, or `num_real` is out of range; the message names the field.

    """
    if not 0 <= batch.num_real <= batch.batch_size:
        raise ValueError(f"num_real must lie in 0..batch_size = {batch.batch_size}, it is {batch.num_real}")
    for name, value in batch.tensors():
        if not isinstance(value, KeyedJaggedTensor):
            continue
        lengths = value.lengths().view(len(value.keys()), batch.batch_size).numpy()
        total, count = int(lengths.sum()), len(value.values())
        if lengths.size and int(lengths.min()) < 0:
            raise ValueError(f"{name} has a negative length, {int(lengths.min())}")
        weights = value.weights_or_none()
        if total != count or (weights is not None and len(weights) != count):
            weighted = "" if weights is None else f" and {len(weights)} weights"
            raise ValueError(f"{name} has lengths of {total} in all, but {count} values{weighted}")
        if int(lengths[:, batch.num_real :].sum()):
            raise ValueError(f"{name} has padding rows that are not empty; the first num_real rows are the real ones")


def lengths_of(batch: JaggedBatch) -> NDArray[np.int64]:
    """Return the lengths of all jagged keys of a batch on the CPU: int64 [K, batch_size], in schema order."""
    rows = [
        value.lengths().view(len(value.keys()), batch.batch_size).numpy()
        for _, value in batch.tensors()
        if isinstance(value, KeyedJaggedTensor)
    ]
    if not rows:
        return np.zeros((0, batch.batch_size), dtype=np.int64)
    return np.concatenate(rows).astype(np.int64, copy=False)
