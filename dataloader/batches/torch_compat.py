"""Builds batches outside inference mode, so they stay trainable; silences a harmless `torch.fx` warning."""

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator

import torch


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
