"""`JaggedCollate`: anyone's samples, as dicts of arrays -> JaggedBatches."""

import copyreg
import dataclasses
import functools
import keyword
from abc import ABCMeta
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError, DataError, one_line
from evenrank.core.rules import Count
from evenrank.core.settings import check_types
from evenrank.dataloader.batches.batch import (
    JaggedBatch,
    LossKey,
    check_loss_key,
    dense,
    longest_rows,
    loss_tokens,
)
from evenrank.dataloader.batches.padding import pad_batch, pad_tokens
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor, outside_inference_mode
from evenrank.dataloader.batches.token_padding import PaddedKey, TokenPadding, TokenSteps

_NARROWED: dict[str, Any] = {"d": np.float32, "D": np.complex64}  # dtypes of Python's numbers, as in torch by default


class Jagged(NamedTuple):
    """How a JaggedCollate stores values of which each sample has any number; see `jagged`."""

    dtype: torch.dtype
    field: str
    max_length: int | None


def jagged(dtype: torch.dtype = torch.int64, *, field: str = "features", max_length: int | None = None) -> Jagged:
    """Declare values of which each sample has any number, for a JaggedCollate.

    Args:
        dtype: of the values; the same for all keys of a field.
        field: the KeyedJaggedTensor of the batch that the key belongs to.
        max_length: most values that a sample may have, for `length_limits` of the batches; None: any number.
    """
    check_types(jagged, locals())
    return Jagged(dtype, field, max_length)


class _CollatedType(ABCMeta):
    """Type of the classes of collated batches, so that these are pickled as what they were made of."""

    _made_of: tuple[Any, ...]


copyreg.pickle(_CollatedType, lambda made: (_collated_type, made._made_of))


class _Collated(JaggedBatch, metaclass=_CollatedType):
    _made_of = ((), None)


_collated_types: dict[str, Any] = {}  # what was made of the same is the same, also where it was unpickled


def _collated_type(fills: Sequence[tuple[str, float]], loss_key: LossKey | None) -> Any:
    """Return the class of batches of tensors with these names, in this order, and fill values."""
    if (key := repr((fills, loss_key))) not in _collated_types:
        members = {"__module__": __name__, "_made_of": (fills, loss_key), "loss_key": lambda _: loss_key}
        made = dataclasses.make_dataclass(
            "CollatedBatch",
            [(name, Any, dense(fill)) for name, fill in fills],
            bases=(_Collated,),
            namespace=members,
            kw_only=True,
            eq=False,
            repr=False,
        )
        return _collated_types.setdefault(key, made)  # as another thread may have made it
    return _collated_types[key]


class JaggedCollate:
    """Makes a JaggedBatch of samples that are dicts of arrays; the `collate_fn` of a DataLoader.

        collate = JaggedCollate({"item_id": jagged(), "label": dense(dtype=torch.float32)})
        batch = collate([{"item_id": [7, 3, 9], "label": 1}, {"item_id": [4], "label": 0}])
        batch.features["item_id"].lengths()  # [3, 1]
        batch.label  # [1., 0.]

    Args:
        declarations: for each name that the batch has, `jagged()`, or `dense()`: one array per sample of the same
            shape, or a number. Samples may have other names too, which are left out. A dense `num_candidates` tells
            costs how many of the last items are candidates.
        batch_size: pad to this many rows; None: as many rows as samples, and one row of padding without samples. A
            Balancer pads shorter batches itself.
        loss_key: the key whose lengths count the loss tokens, such as `LossKey("features", "item_id")`; None: each
            sample is one loss token.
        pad_tokens_to: see LoaderConfig; of the keys of the field `features`, each by itself. Keys with a `max_length`
            of 1 have one value in padding rows.

    Raises:
        ConfigError: a declaration is invalid, or `loss_key` is not among the jagged keys.
    """

    def __init__(
        self,
        declarations: Mapping[str, Any],
        *,
        batch_size: Count | None = None,
        loss_key: LossKey | None = None,
        pad_tokens_to: TokenSteps | None = None,
    ) -> None:
        check_types(JaggedCollate, {"batch_size": batch_size, "pad_tokens_to": pad_tokens_to})
        self._batch_size = batch_size
        self._loss_key = loss_key
        self._jagged: dict[str, dict[str, Jagged]] = {}  # by field and key
        self._limits: dict[str, int] = {}  # by jagged key
        self._dense: dict[str, Mapping[str, Any]] = {}
        for name, declaration in declarations.items():
            if isinstance(declaration, Jagged):
                self._add_jagged(name, declaration)
            elif isinstance(declaration, dataclasses.Field) and "fill" in declaration.metadata:
                self._dense[name] = dict(declaration.metadata)
            else:
                raise ConfigError(f"{name!r} must be jagged() or dense(), got {declaration!r}")
        for name in (*self._jagged, *self._dense):
            is_name = name.isidentifier() and not keyword.iskeyword(name)
            if not is_name or hasattr(_Collated, name) or name in JaggedBatch.__dataclass_fields__:
                raise ConfigError(f"a batch cannot have a tensor called {name!r}; rename it")
            if name in self._jagged and name in self._dense:
                raise ConfigError(f"{name!r} is declared as dense and as the field of jagged keys; rename one of them")
        check_loss_key(loss_key, [(field, key) for field, keys in self._jagged.items() for key in keys])
        fills = dict.fromkeys(self._jagged, 0.0) | {name: d["fill"] for name, d in self._dense.items()}
        self._batch_type = _collated_type(tuple(fills.items()), loss_key)
        limits = ((key, declared.max_length) for key, declared in self._jagged.get("features", {}).items())
        keys = tuple(PaddedKey("features", key, int(limit == 1), limit) for key, limit in limits)
        self._padding = None if pad_tokens_to is None else TokenPadding(steps=pad_tokens_to, keys=keys)

    def _add_jagged(self, name: str, declaration: Jagged) -> None:
        if declaration.dtype == torch.bfloat16:
            raise ConfigError(f"{name!r} cannot be jagged({declaration.dtype}), which NumPy lacks; use torch.float32")
        of_field = self._jagged.setdefault(declaration.field, {})
        of_field[name] = declaration
        first, dtype = next((key, declared.dtype) for key, declared in of_field.items())
        if declaration.dtype != dtype:
            same_field = f"{first!r} of the same field is {dtype}"
            raise ConfigError(f"{name!r} is {declaration.dtype}, but {same_field}; pass one of them another field=")
        if declaration.max_length is not None:
            self._limits[name] = declaration.max_length

    @outside_inference_mode()
    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Any:
        """Return the batch of these samples.

        Raises:
            DataError: a sample lacks a name, or its value does not fit the declaration.
        """
        values: dict[str, KeyedJaggedTensor | Tensor] = {}
        lengths: dict[tuple[str, str], NDArray[np.int64]] = {}
        for field, keys in self._jagged.items():
            flat, counts = _concatenate(samples, keys)
            values[field] = keyed_jagged_tensor(list(keys), torch.from_numpy(flat), counts)
            lengths |= {(field, key): of_key for key, of_key in zip(keys, counts, strict=True)}
        for name, declared in self._dense.items():
            values[name] = _stack(_column(samples, name), name, declared["dtype"], declared["shape"])
        batch = self._batch_type(
            batch_size=len(samples),
            num_real=len(samples),
            loss_tokens=int(loss_tokens(self._loss_key, lengths, np.ones(len(samples), dtype=np.bool_)).sum()),
            max_lengths=longest_rows(lengths),
            length_limits=dict(self._limits) or None,
            **values,
        )
        # TorchRec takes no batch without rows.
        return pad_tokens(pad_batch(batch, self._batch_size or max(len(samples), 1)), self._padding)


def _column(samples: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    try:
        return [sample[name] for sample in samples]
    except (KeyError, IndexError, TypeError):
        index, sample = next((i, s) for i, s in enumerate(samples) if not isinstance(s, Mapping) or name not in s)
        has = f"it has {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else f"it is a {type(sample)}"
        raise _bad_sample(index, f"no {name!r}: {has}; samples must be dicts with all names") from None


def _concatenate(
    samples: Sequence[Mapping[str, Any]], keys: Mapping[str, Jagged]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return all samples' values of each of K keys, and how many each sample has: int64 [K, n]."""
    columns = {key: _column(samples, key) for key in keys}
    (dtype, *_), *_ = keys.values()
    parts: list[Any] = []
    lengths = np.ones((len(keys), len(samples)), dtype=np.int64)
    for column, of_key in zip(columns.values(), lengths, strict=True):
        try:
            of_key[:] = np.fromiter(map(len, column), np.int64, len(column))
        except TypeError:  # numbers
            parts.append(_join(np.stack, column, dtype))
        else:  # without empty lists, which are of floats
            parts += column if of_key.all() else [value for value in column if len(value) or np.ndim(value) != 1]
    flat = _join(np.concatenate, parts, dtype)
    limits = zip((declared.max_length for declared in keys.values()), lengths, strict=True)
    is_long = any(limit is not None and of_key.max(initial=0) > limit for limit, of_key in limits)
    if flat is None or flat.shape != (lengths.sum(),) or is_long:
        arrays = [_as_arrays(columns[key], key, declared) for key, declared in keys.items()]
        flat = np.concatenate([np.empty(0, dtype=_numpy_dtype(dtype)), *chain.from_iterable(arrays)])
        lengths = np.array([[len(array) for array in of_key] for of_key in arrays], dtype=np.int64)
    return flat, lengths


def _as_arrays(column: Sequence[Any], name: str, declared: Jagged) -> list[NDArray[Any]]:
    """Return each sample's values, or raise an error that names the sample whose values do not fit."""
    arrays = [np.atleast_1d(_as_array(value, name, index, declared.dtype)) for index, value in enumerate(column)]
    for index, array in enumerate(arrays):
        if array.ndim != 1:
            raise _bad_sample(index, f"{name!r} of shape {array.shape}; jagged values must have one dimension")
        if declared.max_length is not None and len(array) > declared.max_length:
            values = f"{len(array)} values of {name!r}, more than its max_length, {declared.max_length}"
            raise _bad_sample(index, f"{values}; cut them, or raise it")
    return arrays


def _stack(column: Sequence[Any], name: str, dtype: torch.dtype | None, shape: tuple[int, ...] | None) -> Tensor:
    """Return the samples' values: [n, *shape]."""
    if not column:
        if dtype is None or shape is None:
            raise ConfigError(f"a batch without samples needs dense(dtype=..., shape=...) of {name!r}; declare both")
        return torch.empty((0, *shape), dtype=dtype, device="cpu")
    common = dtype
    types = {getattr(value, "dtype", type(value)) for value in column}
    if dtype is None and len(types) == 1 and types.isdisjoint({list, tuple}):
        common = _as_tensor(column[0], name, 0, None).dtype
    stacked = None if common is None else _join(np.stack, column, common)
    if stacked is not None and (shape is None or stacked.shape[1:] == shape):
        return torch.from_numpy(stacked)
    tensors = [_as_tensor(value, name, index, dtype) for index, value in enumerate(column)]
    expected = (tuple(tensors[0].shape) if shape is None else shape, tensors[0].dtype)
    for index, tensor in enumerate(tensors):
        if (actual := (tuple(tensor.shape), tensor.dtype)) != expected:
            differs = f"{name!r} of shape {actual[0]} and {actual[1]}, expected {expected[0]} and {expected[1]}"
            raise _bad_sample(index, f"{differs}; declare it as jagged(), or with dense(dtype=..., shape=...)")
    return torch.stack(tensors)


def _join(function: Any, column: Sequence[Any], dtype: torch.dtype) -> NDArray[Any] | None:
    """Return np.concatenate or np.stack of all samples' values; None: they have to be looked at one by one."""
    if dtype == torch.bfloat16:
        return None
    target = _numpy_dtype(dtype)
    try:
        # Each is converted to a float by itself. To an integer it would be without an error, so its range is checked.
        joined = function(column, dtype=None if target.kind in "iu" else target)
    except (TypeError, ValueError, RuntimeError):
        return None
    return joined.astype(target, copy=False) if _fits(joined, target) else None


def _as_tensor(value: Any, name: str, index: int, dtype: torch.dtype | None) -> Tensor:
    if dtype is not None and dtype != torch.bfloat16:
        return torch.from_numpy(np.asarray(_as_array(value, name, index, dtype)))
    try:
        if dtype is None and _is_of_python(value):
            array = np.asarray(value)  # does not depend on torch's default dtype
            return torch.from_numpy(array.astype(_NARROWED.get(array.dtype.char, array.dtype)))
        return torch.as_tensor(value, dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_numbers(value, name, index, error) from None


def _is_of_python(value: Any) -> bool:
    """Return whether no part of a value has a dtype of its own."""
    if isinstance(value, list | tuple):
        return all(map(_is_of_python, value))
    return not isinstance(value, Tensor | np.ndarray | np.generic)


def _as_array(value: Any, name: str, index: int, dtype: torch.dtype) -> NDArray[Any]:
    """Return a sample's value with this dtype, and raise if it would become another value."""
    target = _numpy_dtype(dtype)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise _not_numbers(value, name, index, error) from None
    if not _fits(array, target):
        values = f"{name!r} of dtype {array.dtype} with values that do not fit {dtype}"
        raise _bad_sample(index, f"{values}; declare another dtype")
    return array.astype(target)


def _fits(array: NDArray[Any], target: np.dtype[Any]) -> bool:
    if not array.size or not np.can_cast(array.dtype, target, "same_kind"):
        return not array.size
    if target.kind not in "iu" or np.can_cast(array.dtype, target):
        return True
    limits = np.iinfo(target)
    return bool(limits.min <= int(array.min()) and int(array.max()) <= limits.max)


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype


def _not_numbers(value: Any, name: str, index: int, error: Exception) -> DataError:
    values = f"{name!r} of type {type(value).__name__} that is no array of numbers ({one_line(error)})"
    return _bad_sample(index, f"{values}; convert it in the dataset")


def _bad_sample(index: int, problem: str) -> DataError:
    return DataError(f"sample {index} of a batch has {problem}")
