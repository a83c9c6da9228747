"""Convert raw interaction logs to Parquet files with one row per user."""

from evenrank.core import optional_imports

# The names of `__init__.pyi` are imported at their first use: showing the help of the command line, or reading
# DATASETS, does not wait for Polars, pyarrow and Numba.
__getattr__, __dir__, __all__ = optional_imports.attach_stub(__name__, __file__)
