"""The rows of a dataset to which events are appended: as events again, or their files as they are."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.datasets.schema import REMEDY, USER_ID, WINDOW, DataFile, sha256_of, user_hash
from evenrank.preprocess.build.buckets import Columns
from evenrank.preprocess.build.splits import EVAL, TRAIN
from evenrank.preprocess.files.table import wrap_read_errors
from evenrank.preprocess.output.writer import split_file


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierRows:
    """The files of a dataset, each of which has a range of user hashes."""

    folder: Path
    files: Mapping[str, DataFile]  # by path
    num_bits: int  # of a hash, which are the number of its range
    dtypes: Mapping[str, str]  # of the columns of events
    keys: Mapping[str, NDArray[np.int64]]  # by column whose ids are dense: of the ids from 1 on
    overlap: int  # events that a window shares with the one before
    is_same: bool  # whether files of ranges without new events stay as they are

    def read(self, index: int, num_bits: int) -> Columns:
        """Return the events of a range, those of a user in their order; `num_bits` is at least what it was."""
        parts = [{name: np.empty(0, dtype=dtype) for name, dtype in self.dtypes.items()}]
        for split in (EVAL, TRAIN):  # whose rows repeat events of eval
            file = self.files.get(split_file(split, index >> (num_bits - self.num_bits)))
            if file is not None:
                events = self._read(file)
                is_in = ~np.isin(events[USER_ID], parts[-1][USER_ID])
                if num_bits > self.num_bits:
                    is_in &= user_hash(events[USER_ID]) >> np.uint64(64 - num_bits) == index
                parts.append({name: values[is_in] for name, values in events.items()})
        return {name: np.concatenate([part[name] for part in parts]) for name in self.dtypes}

    def _read(self, file: DataFile) -> Columns:
        path, lists = self.folder / file.path, [name for name in self.dtypes if name != USER_ID]
        if sha256_of(path) != file.sha256:
            raise DataError(f"{path} does not match its manifest; {REMEDY}")
        with wrap_read_errors(path):
            rows = pl.read_parquet(path, glob=False)
        if WINDOW in rows.columns:
            begin = pl.when(pl.col(WINDOW) > 0).then(self.overlap).otherwise(0)
            rows = rows.with_columns(pl.col(lists).list.slice(begin))
        events = rows.select(USER_ID, *lists).explode(lists)
        columns = {name: events.get_column(name).to_numpy() for name in self.dtypes}
        return columns | {name: keys[columns[name] - 1] for name, keys in self.keys.items()}


def keep_file(old: Path, name: str, new: Path) -> None:
    """Put a file of a folder into another one, perhaps in place of what a killed run has left."""
    path = new / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        os.link(old / name, path)
    except OSError:  # some file systems have no such links
        shutil.copyfile(old / name, path)
