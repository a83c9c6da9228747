"""Errors of reading raw files as one-line `DataError`s that name the file."""

import contextlib
import zlib
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from evenrank.core.errors import DataError, first_line


@contextlib.contextmanager
def reading(*paths: Path | str) -> Iterator[None]:
    """Replace an error of the operating system, a decompressor or Polars by a `DataError` that names `paths`."""
    try:
        yield
    except (pl.exceptions.PolarsError, OSError, EOFError, zlib.error) as error:
        names = ", ".join(map(str, paths))
        # Only errors of the operating system have `strerror`; the others come from the contents of a file.
        if reason := getattr(error, "strerror", None):
            raise DataError(f"{names} cannot be read: {reason}; check the path and its permissions") from error
        raise DataError(f"{names} cannot be read: {first_line(error)}; check that the file is complete") from error


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Prepend the path of a file to the message of a `DataError`, for checks that only know its columns."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
