"""The tensors of batches: outside inference mode, so that they stay trainable; KeyedJaggedTensors with all caches."""

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Make ordinary tensors, as worker threads do, also within `torch.inference_mode()`.

    Inference tensors cannot be saved for a backward pass, and loaders read ahead: a batch that is made during an
    evaluation may be trained after it.
    """
    has_grad = torch.is_grad_enabled()  # leaving inference mode would enable it
    with torch.inference_mode(False), torch.set_grad_enabled(has_grad):
        yield


@functools.cache
def suppress_fx_tracing_warning() -> None:
    """Silence a harmless `torch.fx` warning triggered by TorchRec; call this before building a batch.

    Since PyTorch 2.13 the first KeyedJaggedTensor of a process causes it. PyTorch gives it once per process, so it is
    given now and dropped. The filter lets through all other records, and is removed after the call.
    """
    from torch.fx import _symbolic_trace

    warn = getattr(_symbolic_trace, "is_fx_tracing_warning", None)
    if warn is None:  # in other versions
        return
    log, this_thread = logging.getLogger(_symbolic_trace.__name__), threading.get_ident()

    def is_other(record: logging.LogRecord) -> bool:
        return record.funcName != "is_fx_tracing_warning" or record.thread != this_thread

    log.addFilter(is_other)
    try:
        warn()
    finally:
        log.removeFilter(is_other)


def keyed_jagged_tensor(
    keys: Sequence[str],
    values: Tensor,
    lengths: NDArray[np.integer] | Tensor,
    length_per_key: list[int] | None = None,
    *,
    weights: Tensor | None = None,
    offsets: Tensor | None = None,
) -> KeyedJaggedTensor:
    """Build a KeyedJaggedTensor with its host-side caches filled, so that no later call has to synchronize.

    The values [sum(lengths)] are key-major: all rows of the first key, then all of the second. Lengths are int64 or
    int32 [K, B], contiguous if they are a tensor; `length_per_key` has their sums over rows, if known, and `offsets`,
    [K * B + 1], where rows begin.
    """
    suppress_fx_tracing_warning()
    if length_per_key is None:
        length_per_key = lengths.sum(1).tolist()
    flat_lengths = (
        torch.from_numpy(np.ascontiguousarray(lengths)) if isinstance(lengths, np.ndarray) else lengths
    ).view(-1)
    return KeyedJaggedTensor(
        keys=list(keys),
        values=values,
        weights=weights,
        lengths=flat_lengths if values.is_cpu else flat_lengths.to(values.device),
        offsets=offsets,
        stride=lengths.shape[1],
        length_per_key=length_per_key,
        offset_per_key=[0, *accumulate(length_per_key)],
    )


def select_rows(value: KeyedJaggedTensor, rows: NDArray[np.int64]) -> tuple[KeyedJaggedTensor, NDArray[np.integer]]:
    """Return these rows [n] of all K keys, and their lengths [K, n] on the host; on a GPU, this synchronizes."""
    device, weights = value.values().device, value.weights_or_none()
    lengths = value.lengths().view(len(value.keys()), -1).cpu().numpy()
    begins = (np.cumsum(lengths) - lengths.reshape(-1)).reshape(lengths.shape)
    selected = lengths[:, rows]
    flat = selected.reshape(-1)
    shifts = np.repeat(begins[:, rows].reshape(-1) - (np.cumsum(flat) - flat), flat)
    indices = torch.from_numpy(shifts + np.arange(len(shifts))).to(device)
    selected_weights = None if weights is None else weights[indices]
    return keyed_jagged_tensor(value.keys(), value.values()[indices], selected, weights=selected_weights), selected


def drop_last(value: KeyedJaggedTensor, key: str, num_values: int, num_real: int) -> KeyedJaggedTensor:
    """Return all keys without the last values of the first `num_real` rows of one, none of which is shorter.

    The values have no weights. Nothing synchronizes with the device if `length_per_key` is known on the host.
    """
    index = value.keys().index(key)
    lengths = value.lengths().view(len(value.keys()), -1)
    dropped = torch.zeros_like(lengths)
    dropped[index, :num_real] = num_values
    kept, length_per_key = lengths - dropped, list(value.length_per_key())
    length_per_key[index] -= num_values * num_real
    num_kept = sum(length_per_key)
    before = (dropped.view(-1).cumsum(0) - dropped.view(-1)).repeat_interleave(kept.view(-1), output_size=num_kept)
    values = value.values()[torch.arange(num_kept, device=before.device) + before]
    return keyed_jagged_tensor(value.keys(), values, kept, length_per_key)


def clone(value: Any) -> Any:
    """Return a tensor or KeyedJaggedTensor that shares no memory with this one."""
    if isinstance(value, Tensor):
        return _clone_tensor(value)
    if not isinstance(value, KeyedJaggedTensor) or value.variable_stride_per_key():
        return value  # the schema refuses it
    weights = value.weights_or_none()
    return KeyedJaggedTensor(
        keys=list(value.keys()),
        values=_clone_tensor(value.values()),
        weights=None if weights is None else _clone_tensor(weights),
        lengths=_clone_tensor(value.lengths()),
        stride=value.stride(),
        length_per_key=value.length_per_key_or_none(),
        offset_per_key=value.offset_per_key_or_none(),
    )


def _clone_tensor(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or tensor.requires_grad or not tensor.numel() or not tensor.is_contiguous():
        return tensor.clone()
    # One memcpy. `clone` distributes it over threads, which takes several times as long while all cores are busy.
    flat = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy().copy())
    return flat.view(tensor.dtype).view(tensor.shape)
