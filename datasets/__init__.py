"""Sequence Parquet -> samples: the format, the memory-mapped store, and the order in which samples come."""

from evenrank.core import optional_imports

# The names of `__init__.pyi` are imported at their first use: what only reads a manifest or draws from a distribution
# does not wait for pyarrow and Numba.
__getattr__, __dir__, __all__ = optional_imports.attach_stub(__name__, __file__)
