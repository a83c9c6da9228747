"""For training loops: scaled losses, metrics over all ranks, FLOPs, times of layers, watchdogs."""

from evenrank.core import optional_imports
from evenrank.core.optional_imports import check_torch

check_torch()

# The names of `__init__.pyi` are imported at their first use: importing the package does not wait for torch.
__getattr__, __dir__, __all__ = optional_imports.attach_stub(__name__, __file__)
