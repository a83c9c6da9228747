"""A warning of PyTorch about TorchRec, which no user can do anything about."""

import functools
import logging
import threading

_WARNS = "is_fx_tracing_warning"


@functools.cache
def use_up_fx_warning() -> None:
    """Make `torch.fx` give its warning about `is_fx_tracing` now, and drop it; call this before building a batch.

    Since PyTorch 2.13 the first KeyedJaggedTensor of each process causes this warning, because TorchRec's classes call
    that function. PyTorch gives it once per process, so it is not repeated afterwards. Nothing else is dropped: the
    filter is there during this call only, and lets through what other functions and threads log.
    """
    from torch.fx import _symbolic_trace

    warn = getattr(_symbolic_trace, _WARNS, None)
    if warn is None:  # in other versions
        return
    log, this_thread = logging.getLogger(_symbolic_trace.__name__), threading.get_ident()

    def is_other(record: logging.LogRecord) -> bool:
        return record.funcName != _WARNS or record.thread != this_thread

    log.addFilter(is_other)
    try:
        warn()
    finally:
        log.removeFilter(is_other)
