"""Padding of batches to `batch_size` rows and to totals of tokens; empty batches for ranks without more data."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterDataPipe
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.core.rules import Count
from evenrank.core.settings import check_types
from evenrank.dataloader.batches.batch import Batch, JaggedBatch
from evenrank.dataloader.batches.schema import BatchSchema, FieldSpec, lengths_of, schema_of
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor, outside_inference_mode
from evenrank.dataloader.batches.token_padding import TokenPadding

Sample = TypeVar("Sample")


@outside_inference_mode()
def pad_batch(batch: Batch, batch_size: int) -> Batch:
    """Return the batch padded to `batch_size` rows: length 0 in every key, the fill value in dense fields.

    Raises:
        ConfigError: the batch has more rows.
    """
    num_padding = batch_size - batch.batch_size
    if num_padding < 0:
        raise ConfigError(f"a batch of {batch.batch_size} rows cannot be padded to {batch_size}; raise batch_size")
    if num_padding == 0:
        return batch
    fills = batch.fill_values()
    padded: dict[str, Any] = {}
    for name, value in batch.tensors():
        if isinstance(value, KeyedJaggedTensor):
            lengths = value.lengths().view(len(value.keys()), batch.batch_size).numpy()
            lengths = np.pad(lengths, ((0, 0), (0, num_padding)))
            padded[name] = keyed_jagged_tensor(value.keys(), value.values(), lengths, weights=value.weights_or_none())
        elif isinstance(value, Tensor):
            padded[name] = torch.cat([value, value.new_full((num_padding, *value.shape[1:]), fills[name])])
    return batch.replace(batch_size=batch_size, **padded)


@outside_inference_mode()
def pad_tokens(batch: Batch, padding: TokenPadding | None) -> Batch:
    """Return a batch on the CPU with further padding rows, and values in all of them; itself if it has them already.

    Raises:
        ConfigError: a key has more values than the largest total.
    """
    if padding is None or batch.token_padding is not None:
        return batch
    schema, limits, end = schema_of(batch), batch.length_limits or {}, 0
    keys_of = dict(zip(schema.key_names, schema.jagged_keys, strict=True))
    padding = padding.within({keys_of[name]: limit for name, limit in limits.items() if name in keys_of})
    batch = pad_batch(batch, batch.batch_size + padding.rows)
    lengths = lengths_of(batch)
    padding.fill(schema.jagged_keys, lengths, batch.num_real)
    changes: dict[str, Any] = {"token_padding": padding}
    if batch.max_lengths is not None:
        changes["max_lengths"] = dict(zip(schema.key_names, lengths.max(axis=1).tolist(), strict=True))
    for name, keys in ((spec.name, spec.keys) for spec in schema.fields if spec.keys):
        value, of_field = getattr(batch, name), lengths[end : (end := end + len(keys))]
        counts, weights = of_field.sum(axis=1).tolist(), value.weights_or_none()
        values, weights = (_append_zeros(each, value.length_per_key(), counts) for each in (value.values(), weights))
        of_field = of_field.astype(value.lengths().numpy().dtype)
        changes[name] = keyed_jagged_tensor(keys, values, of_field, counts, weights=weights)
    return batch.replace(**changes)


def _append_zeros(values: Any, old_counts: list[int], counts: list[int]) -> Any:
    """Return the values of all keys, [sum(counts), ...], with zeros after those of each; None for None."""
    if values is None or counts == old_counts:
        return values
    pieces = zip(values.split(old_counts), old_counts, counts, strict=True)
    return torch.cat([part for of, old, new in pieces for part in (of, of.new_zeros(new - old, *of.shape[1:]))])


@outside_inference_mode()
def without_token_padding(batch: Batch) -> Batch:
    """Return a batch as it was before `pad_tokens`, but for `token_padding`: its padding rows are empty again."""
    if (padding := batch.token_padding) is None:
        return batch
    rows = max(batch.batch_size - padding.rows, batch.num_real)
    return pad_batch(batch.index_select(range(batch.num_real)), rows)


@outside_inference_mode()
def empty_batch(schema: BatchSchema) -> JaggedBatch:
    """Return a batch of this schema without samples, for a rank that has run out of data."""
    tensors: dict[str, Any] = {spec.name: _empty_field(spec, schema.batch_size) for spec in schema.fields}
    return schema.batch_type(
        batch_size=schema.batch_size,
        num_real=0,
        max_lengths=dict.fromkeys(schema.key_names, 0),
        length_limits=dict(schema.length_limits) or None,
        **tensors,
        **dict(schema.shared),
    )


def _empty_field(spec: FieldSpec, batch_size: int) -> "KeyedJaggedTensor | Tensor | None":
    if spec.dtype is None:
        return None
    if spec.keys is None:
        return torch.full((batch_size, *spec.shape), spec.fill, dtype=spec.dtype, device="cpu")
    values = torch.empty((0, *spec.shape), dtype=spec.dtype, device="cpu")
    weights = None if spec.weights_dtype is None else torch.empty(0, dtype=spec.weights_dtype, device="cpu")
    lengths = torch.zeros((len(spec.keys), batch_size), dtype=spec.lengths_dtype, device="cpu").numpy()
    return keyed_jagged_tensor(spec.keys, values, lengths, weights=weights)


class PaddedBatches(IterDataPipe, Generic[Sample, Batch]):  # type: ignore[type-arg]
    """Batches of exactly `batch_size` rows over any iterable of samples; the last one is padded.

    Iterate over this DataPipe directly, not through a DataLoader: a DataLoader over a DataPipe creates a process group
    of its own, and hangs if one rank does not take part.

    Args:
        samples: of any type that `collate` accepts; iterated over once per iteration over the batches.
        batch_size: rows of every batch.
        collate: makes a batch of up to batch_size samples, with one row each; of none, if there are no samples at all
            but `num_batches` asks for batches: `JaggedCollate` then needs each dtype and shape.
        drop_last: leave out a last group that is smaller than `batch_size`.
        num_batches: yield empty batches after the last sample until there are this many, so that all ranks take as
            many steps. A Balancer does so itself.

    Raises:
        ConfigError: `batch_size` is below 1; while iterating, `collate` has made more rows or no batch of no samples.
    """

    def __init__(
        self,
        samples: Iterable[Sample],
        *,
        batch_size: Count,
        collate: Callable[[Sequence[Sample]], Batch],
        drop_last: bool = False,
        num_batches: int | None = None,
    ) -> None:
        check_types(PaddedBatches, locals())
        self._samples = samples
        self._batch_size = batch_size
        self._collate = collate
        self._drop_last = drop_last
        self._num_batches = num_batches

    def __len__(self) -> int:
        """Return the number of batches; raises a TypeError if the samples have no length."""
        num_full, num_left = divmod(len(cast(Sized, self._samples)), self._batch_size)
        return max(num_full + (num_left > 0 and not self._drop_last), self._num_batches or 0)

    def __iter__(self) -> Iterator[Batch]:
        iterator = iter(self._samples)
        num_yielded = 0
        schema = None
        while group := list(islice(iterator, self._batch_size)):
            if len(group) < self._batch_size and self._drop_last:
                break
            batch = self._padded(self._collate(group))
            if self._num_batches is not None and schema is None:
                schema = schema_of(batch)
            yield batch
            num_yielded += 1
        for _ in range(num_yielded, self._num_batches or 0):
            if schema is None:
                batch = self._padded(self._collate([]))
                schema = schema_of(batch)
            else:
                batch = self._padded(cast(Batch, empty_batch(schema)))
            yield batch

    def _padded(self, batch: Batch) -> Batch:
        if (padding := batch.token_padding) is not None:  # of fewer rows
            batch = without_token_padding(batch).replace(token_padding=None)
        return pad_tokens(pad_batch(batch, self._batch_size), padding)
