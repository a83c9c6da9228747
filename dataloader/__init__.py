"""Samples -> balanced batches."""

from evenrank.core import optional_imports
from evenrank.core.optional_imports import check_torch

check_torch()

# The names of `__init__.pyi` are imported at their first use: code that only computes costs or plans
# (`evenrank.dataloader.balance.partition`) does not wait for torch and TorchRec, and runs without them.
__getattr__, __dir__, __all__ = optional_imports.attach_stub(__name__, __file__)
