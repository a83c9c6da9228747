"""Jagged batches with a fixed number of rows, samples first.

    batch_size = 4, num_real = 2            row      0        1    2   3
    features["item_id"]                             [7 3 9] [4]  [ ] [ ]
    sample_ids                                        12      5   -1  -1

Every KeyedJaggedTensor and every dense tensor has `batch_size` rows. The first `num_real` rows are samples, the others
padding: length 0 in every key, the declared fill value in dense fields. Only `num_real` distinguishes them, because a
sample may have length 0 too. With `pad_tokens_to`, padding rows have values: zeros, in features alone; there are more
rows than `batch_size` of the loader; and a loss must leave out the values that are not real, see `real_values`.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable
from typing_extensions import TypeVar

from evenrank.core.errors import ConfigError
from evenrank.dataloader.batches.tensors import clone, drop_last, select_rows
from evenrank.dataloader.batches.token_padding import TokenPadding

Batch = TypeVar("Batch", bound="JaggedBatch", default="SequenceBatch")


class LossKey(NamedTuple):
    """The jagged key whose lengths count the loss tokens of a batch."""

    field: str
    """Name of a KeyedJaggedTensor of the batch."""
    key: str
    skip: int = 0
    """Leading tokens of each row that have no loss: 1 where tokens are predicted from their predecessors, else 0."""


def loss_tokens(
    loss_key: LossKey | None, lengths: Mapping[tuple[str, str], NDArray[np.int64]], is_real: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the loss tokens of each row, given lengths by field and key, all of one shape; 0 where it is not real."""
    if loss_key is None:
        return is_real.astype(np.int64)
    return np.where(is_real, np.maximum(lengths[loss_key.field, loss_key.key] - loss_key.skip, 0), 0)


def check_loss_key(loss_key: LossKey | None, jagged_keys: Collection[tuple[str, str]]) -> None:
    """Raise a ConfigError unless this is a LossKey of these fields and keys, or None."""
    if loss_key is None:
        return
    if not isinstance(loss_key, LossKey) or loss_key.skip not in (0, 1):
        raise ConfigError(f"the loss key must be a LossKey with a skip of 0 or 1, or None; got {loss_key!r}")
    if (loss_key.field, loss_key.key) not in jagged_keys:
        known = ", ".join(f"{field}.{key}" for field, key in jagged_keys) or "none"
        raise ConfigError(f"the batch has no {loss_key}; its jagged keys are {known}")


def host(default: Any = dataclasses.MISSING, *, in_schema: bool = False) -> Any:
    """Declare a field that stays on the host: metadata of the batch, not one of its tensors.

    A field that is `in_schema` is hashable and equal in all batches of all ranks, which compare it.
    """
    return field(default=default, metadata={"host": True, "in_schema": in_schema})


def dense(
    fill: float = 0,
    default: Any = dataclasses.MISSING,
    *,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """Declare a dense tensor [batch_size, ...]: a field of a batch class, or an entry of a JaggedCollate.

    Args:
        fill: value of its padding rows.
        default: of the field.
        dtype: for a JaggedCollate; None: that of the first sample's array or tensor; Python's floats become float32.
        shape: of a row, for a JaggedCollate; None: that of the first sample's value.
    """
    row_shape = None if shape is None else tuple(shape)
    return field(default=default, metadata={"fill": fill, "dtype": dtype, "shape": row_shape})


@functools.cache
def _fill_values(batch_type: Any) -> Mapping[str, float]:
    return {entry.name: entry.metadata.get("fill", 0) for entry in dataclasses.fields(batch_type)}


@functools.cache
def _tensor_names(batch_type: Any) -> tuple[str, ...]:
    return tuple(entry.name for entry in dataclasses.fields(batch_type) if not entry.metadata.get("host"))


@dataclass(kw_only=True, eq=False, repr=False)
class JaggedBatch(Pipelineable):  # type: ignore[misc]
    """Base of all batches, which TorchRec's pipelines accept. Derive a dataclass from it and add fields. Each is one of

    - a KeyedJaggedTensor with `batch_size` rows in each key,
    - a dense tensor [batch_size, ...] (declare it with `dense(fill=...)` if its padding is not 0),
    - None, if the batches of all ranks lack it,
    - metadata that stays on the host, declared with `host()`.
    """

    batch_size: int = host()
    """Rows, per rank."""
    num_real: int = host()
    """How many of the first rows are samples, 0..batch_size."""
    epoch: int = host(0)
    """Epoch of the loader, from 0."""
    step: int = host(0)
    """Step of the iteration that yielded the batch, from 0; the same on all ranks."""
    position: int = host(0)
    """Positions of the epoch's order that all ranks have consumed after this step; streams count steps instead."""
    loss_tokens: int = host(0)
    """Loss tokens of this rank's batch."""
    world_loss_tokens: int | None = host(None)
    """Loss tokens of all ranks in this step, or in all that `training.accumulate` joins; None before a Balancer."""
    world_task_tokens: Tensor | None = host(None)
    """Loss tokens of each task, or sums of their weights, from `training.accumulate`: [tasks], on the device that
    trains; None: each loss token counts for all tasks."""
    dp_size: int | None = host(None)
    """Ranks over which the loss tokens are counted; None before a Balancer."""
    plan_hash: int | None = host(None)
    """63-bit hash of which rank trains on which sample, equal on all ranks, where each plans alone, or of the mark of a
    followed log; otherwise None."""
    max_lengths: Mapping[str, int] | None = host(None)
    """Longest row of each key; named as by `BatchSchema.lengths_by_key`."""
    length_limits: Mapping[str, int] | None = host(None)
    """Longest that a row of each key can be in any batch of any rank, for buffers and CUDA graphs of a fixed size;
    named as `max_lengths`, without keys that have no known limit. None: no key has one."""
    token_padding: TokenPadding | None = host(None, in_schema=True)
    """The totals that its values are padded to; None: its padding rows are empty."""

    def loss_key(self) -> LossKey | None:
        """Return the key whose lengths count the loss tokens; None: each sample is one loss token."""
        return None

    def tensors(self) -> Iterator[tuple[str, "KeyedJaggedTensor | Tensor | None"]]:
        """Yield name and value of every field that is not declared with `host()`, in declared order."""
        batch_type: Any = type(self)
        for name in _tensor_names(batch_type):
            yield name, getattr(self, name)

    def fill_values(self) -> Mapping[str, float]:
        """Return the fill value of the padding rows of every field, by name."""
        batch_type: Any = type(self)
        return _fill_values(batch_type)

    def replace(self, **changes: Any) -> Self:
        """Return a batch with other values of these fields, by name."""
        return dataclasses.replace(self, **changes)

    def real_values(self, key: str, *, field: str = "features") -> Tensor:
        """Return which values of a key are of samples, not of padding rows: bool [values], on the batch's device.

        They come first. It does not synchronize. Call it outside of compiled code, because `num_real` varies.
        """
        jagged = getattr(self, field)[key]
        places = torch.arange(len(jagged.values()), device=jagged.values().device)
        is_real: Tensor = places < jagged.offsets()[self.num_real]
        return is_real

    def index_select(self, rows: Sequence[int] | NDArray[np.integer] | Tensor) -> Self:
        """Return the batch of these rows, in this order; on a GPU, this synchronizes.

        `loss_tokens` and `max_lengths` are of these rows; other metadata are kept.

        Args:
            rows: [n], each in 0..batch_size-1, in any order and number, but padding only after the last sample.

        Raises:
            IndexError: a row is out of range.
            ValueError: padding comes before a sample.
        """
        chosen = np.asarray(rows.cpu() if isinstance(rows, Tensor) else rows, dtype=np.int64).reshape(-1)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < self.batch_size:
            raise IndexError(f"rows must be in 0..{self.batch_size - 1}, got {chosen.min()} to {chosen.max()}")
        is_real = chosen < self.num_real
        num_real = int(is_real.sum())
        if not is_real[:num_real].all():
            raise ValueError(f"rows have padding, {self.num_real} and above, before a sample; put padding last")
        tensors: dict[str, Any] = {}
        lengths: dict[tuple[str, str], NDArray[np.int64]] = {}
        for name, value in self.tensors():
            if isinstance(value, KeyedJaggedTensor):
                tensors[name], counts = select_rows(value, chosen)
                lengths |= {(name, key): counts[index] for index, key in enumerate(value.keys())}
            elif value is not None:
                tensors[name] = value[torch.from_numpy(chosen).to(value.device)]
        return self.replace(
            batch_size=len(chosen),
            num_real=num_real,
            loss_tokens=int(loss_tokens(self.loss_key(), lengths, is_real).sum()),
            max_lengths=longest_rows(lengths),
            **tensors,
        )

    def slice(self, start: int, stop: int) -> Self:
        """Return the batch of rows start..stop-1, where bounds count as in a Python slice; see `index_select`."""
        return self.index_select(range(self.batch_size)[start:stop])

    def __repr__(self) -> str:
        parts = [f"num_real={self.num_real}/{self.batch_size}", f"epoch={self.epoch}", f"step={self.step}"]
        for name, value in self.tensors():
            if isinstance(value, KeyedJaggedTensor):
                counts = zip(value.keys(), value.length_per_key(), strict=True)
                parts.append(f"{name}=[{', '.join(f'{key}: {count:,}' for key, count in counts)}]")
            elif value is not None:
                parts.append(f"{name}={list(value.shape)}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the batch on a device, itself if it is there; host-side caches are kept, without synchronization."""
        target = torch.device(device)
        if all(value is None or _device_of(value) == target for _, value in self.tensors()):
            return self

        def move(value: Any) -> Any:
            moved = value.to(target, non_blocking=non_blocking)
            if isinstance(moved, KeyedJaggedTensor) and moved is not value:
                moved._jt_dict = None  # cached by `to_dict`; TorchRec passes it on with tensors of the old device
            return moved

        task_tokens = self.world_task_tokens
        return self._map(move).replace(world_task_tokens=None if task_tokens is None else move(task_tokens))

    def clone(self) -> Self:
        """Return a batch whose tensors share no memory with those of this one."""
        return self._map(clone)

    def pin_memory(self) -> Self:
        """Return the batch in pinned memory, including the tensors inside KeyedJaggedTensors."""
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Record for the caching allocator that `stream` uses the batch's tensors."""
        for value in (*(value for _, value in self.tensors()), self.world_task_tokens):
            if value is not None:
                value.record_stream(stream)

    def _map(self, function: Callable[[Any], Any]) -> Self:
        return self.replace(**{name: function(value) for name, value in self.tensors() if value is not None})


def _device_of(value: KeyedJaggedTensor | Tensor) -> torch.device:
    return value.device() if isinstance(value, KeyedJaggedTensor) else value.device


@dataclass(kw_only=True, eq=False, repr=False)
class SequenceBatch(JaggedBatch):
    """Histories and candidates of a sequential recommender."""

    features: KeyedJaggedTensor
    """int64; keys: `user_id` if configured, the contextual features, `item_id` (history, then candidates), `action`,
    any extra events of integers.
    """
    float_features: KeyedJaggedTensor | None = None
    """float32; keys: the contextual features and extra events of floats."""
    labels: KeyedJaggedTensor | None = None
    """int64; key `label`: the actions of the candidates, or of the history, or another column of these events."""
    float_labels: KeyedJaggedTensor | None = None
    """float32; key `label`: a column of floats of these events, NaN where it is missing."""
    weights: KeyedJaggedTensor | None = None
    """float32; key `weight`: of each label, 0 where the float is missing."""
    known: KeyedJaggedTensor | None = None
    """int64; key `known`: of each float that is not missing, its place among those of its sample. None: the column has
    no missing values."""
    negatives: KeyedJaggedTensor | None = None
    """int64; key `item_id`: equally many of each sample; see `Negatives`."""
    log_q: KeyedJaggedTensor | None = None
    """float32: natural logarithm of the probability to draw an item; keys: `negative`, of `negatives`, 0 of hard ones;
    `positive`, of the candidates or, without candidates, of all items but the first."""
    candidate_sets: KeyedJaggedTensor | None = None
    """int64; key `item_id`: the items that the targets of each sample are ranked among, in the order of the file."""
    num_candidates: Tensor = dense()
    """int64 [batch_size]: how many of the last item ids are candidates."""
    request_ts_ms: Tensor | None = dense(default=None)
    """int64 [batch_size]: time of the request, in milliseconds since 1970; None except with `order=Requests()`."""
    sample_ids: Tensor = dense(fill=-1)
    """int64 [batch_size]: row of the split; -1 in padding rows."""

    @property
    def any_labels(self) -> KeyedJaggedTensor | None:
        """The labels or, without these, the labels of floats: equally many; None where items are predicted."""
        return self.float_labels if self.labels is None else self.labels

    def loss_key(self) -> LossKey | None:
        """Return the key of known labels if some may be missing, else the key of everything that is predicted.

        Labels are predicted, else labels of floats, else item ids, each from its predecessor.
        """
        if self.known is not None:
            return LossKey("known", "known")
        if self.any_labels is None:
            return LossKey("features", "item_id", skip=1)
        return LossKey("float_labels" if self.labels is None else "labels", "label")


@dataclass(kw_only=True, eq=False, repr=False)
class SemanticIdBatch(JaggedBatch):
    """Histories as semantic ids: each event is `levels` tokens, one per codebook; the last event is the target."""

    features: KeyedJaggedTensor
    """int64; keys: `user_id` if configured, the contextual features, `semantic_id` (`levels` tokens per event of the
    history), `candidate_id` if configured (the `levels` tokens of the target).
    """
    float_features: KeyedJaggedTensor | None = None
    """float32; keys: the contextual features of floats."""
    labels: KeyedJaggedTensor
    """int64; key `label`: `levels` codes of each labeled event: the target or, with labels for the history, every event
    but the first of a history, in time order.
    """
    request_ts_ms: Tensor | None = dense(default=None)
    """int64 [batch_size]: time of the request, in milliseconds since 1970; None except with `order=Requests()`."""
    sample_ids: Tensor = dense(fill=-1)
    """int64 [batch_size]: row of the split; -1 in padding rows."""
    candidate_levels: int = host(0, in_schema=True)
    """Codes of a target: `levels`, or as many as `retain_candidate_hierarchies` has left."""

    def loss_key(self) -> LossKey | None:
        """Return the labels' key: each code of a labeled event is a loss token."""
        return LossKey("labels", "label")

    def retain_candidate_hierarchies(self, num_levels: int) -> Self:
        """Return the batch with the first `num_levels` codes of each target alone, in labels and `candidate_id`.

        levels = 3, num_levels = 1      candidate_id  d1 d2 d3               becomes  d1
                                        label         c1 c2 c3 d1 d2 d3               c1 c2 c3 d1

        Labels of the history stay. This works on any device, without synchronization. To train on such batches, call it
        in the loader's transform: after a Balancer, `world_loss_tokens` is unknown, None.

        Raises:
            ConfigError: `num_levels` is not in 1..candidate_levels.
        """
        if not 1 <= num_levels <= self.candidate_levels:
            raise ConfigError(
                f"num_levels must be between 1 and candidate_levels = {self.candidate_levels}, got {num_levels}"
            )
        cut = self.candidate_levels - num_levels
        if not cut:
            return self
        keys = ("candidate_id", "label")

        def shorten(longest: Mapping[str, int] | None) -> Mapping[str, int] | None:
            return longest and {name: size - cut * (name in keys and size > 0) for name, size in longest.items()}

        rows = self.num_real if self.token_padding is None else self.batch_size  # whose padding has candidates too
        has_candidates = keys[0] in self.features.keys()  # noqa: SIM118  # a KeyedJaggedTensor
        return self.replace(
            features=drop_last(self.features, keys[0], cut, rows) if has_candidates else self.features,
            labels=drop_last(self.labels, keys[1], cut, self.num_real),
            candidate_levels=num_levels,
            loss_tokens=self.loss_tokens - cut * self.num_real,
            world_loss_tokens=None,
            world_task_tokens=None,
            max_lengths=shorten(self.max_lengths),
            length_limits=shorten(self.length_limits),
        )


def longest_rows(lengths: Mapping[tuple[str, str], NDArray[np.integer]]) -> dict[str, int]:
    """Return the longest row of each key, named by `name_keys`, given lengths per field and key."""
    longest = (int(lengths_of_key.max(initial=0)) for lengths_of_key in lengths.values())
    return dict(zip(name_keys(tuple(lengths)), longest, strict=True))


def name_keys(jagged_keys: Sequence[tuple[str, str]]) -> list[str]:
    """Return one name per field and key: the key, or `field.key` if an earlier field has the same key."""
    names: list[str] = []
    for field_name, key in jagged_keys:
        names.append(f"{field_name}.{key}" if key in names else key)
    return names
