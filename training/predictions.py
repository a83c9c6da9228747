"""`PredictionWriter`: the predictions of an evaluation as Parquet files, one per rank, each sample once.

    OUT/part-00000.parquet ...      of each rank with samples, a row per sample: sample_id, user_id, item_id, score
    OUT/_predictions.json           the number of samples, and the rows of each file

They are written to .OUT.partial beside it, which becomes OUT when all ranks are done: whatever is in OUT is complete.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from torch import Tensor

from evenrank.core.errors import ConfigError, DataError, RankError, first_line
from evenrank.core.files import write_text
from evenrank.core.settings import check_types
from evenrank.dataloader.balance.ranks.agree import compare_settings, gather_checked, raise_reported_errors, reported
from evenrank.dataloader.balance.ranks.process_group import Group, process_group_of
from evenrank.dataloader.collate.gather import group_by_store
from evenrank.dataloader.loader import Loader
from evenrank.datasets.schema import ITEM_ID, USER_ID

_MANIFEST = "_predictions.json"  # a name that readers of folders skip
_BYTES_AT_ONCE = 1 << 25  # of a row group


class PredictionWriter:
    """Writes the predictions of the next iteration of a loader, in a `with` statement. Collective, as is its end.

    Users and items become those of the log where the dataset has vocabularies, which are then in memory; null is
    unknown. After an error in the body of the statement, or a killed process, another writer begins anew.

    Args:
        folder: that all ranks share.
        loader: of `build_loader`, also if a Balancer hands out its batches.
        overwrite: replace the predictions in the folder, at the end.
        group: the data-parallel ranks, as for `accumulate`.

    Raises:
        ConfigError: the folder has predictions, or something else.
        RankError: another rank failed or has other arguments; at the end, also if a sample is missing or there twice.
    """

    def __init__(
        self, folder: Path | str, loader: Loader[Any], *, overwrite: bool = False, group: Group | None = None
    ) -> None:
        check_types(PredictionWriter, {"folder": folder, "loader": loader, "overwrite": overwrite})
        self._group, self._path, self._overwrite = process_group_of(group), Path(folder).absolute(), overwrite
        self._rank = 0 if self._group is None else self._group.rank()
        self._partial = self._path.with_name(f".{self._path.name}.partial")
        self._raw_ids: dict[str, pa.Array | None] = {}
        self._num_rows = 0
        self._tables: list[pa.Table] = []  # to be written together
        self._writer: pq.ParquetWriter | None = None
        self._error: Exception | None = None
        compare_settings(lambda: self._begin(loader), self._group)

    def _begin(self, loader: Loader[Any]) -> Mapping[str, Any]:
        self._stores, self._num_samples, self._epoch = loader.stores, loader.num_samples, loader.epoch
        self._is_seen = np.zeros(sum(map(len, self._stores)), dtype=np.bool_)
        for name in (USER_ID, ITEM_ID):  # of the vocabulary that extends the others
            largest = max(self._stores, key=lambda store: store.manifest.vocabulary_sizes.get(name, 0))
            self._raw_ids[name] = largest.raw_ids(name)
        is_complete = (self._path / _MANIFEST).is_file()
        if self._path.exists() and not (is_complete and self._overwrite):
            found = (
                "has predictions; pass overwrite=True" if is_complete else "is there, without predictions; remove it"
            )
            raise ConfigError(f"{self._path} {found}, or choose another folder")
        if self._rank == 0:
            with self._named_errors():
                shutil.rmtree(self._partial, ignore_errors=True)
                self._partial.mkdir(parents=True)
        return {"folder": str(self._path), "epoch": self._epoch, "num_samples": self._num_samples}

    def write(self, batch: Any, items: Tensor, scores: Tensor) -> None:
        """Add the samples of a batch, without its padding; on a GPU, this synchronizes.

        In a process group, the end of the `with` statement raises its errors, on all ranks: none waits for another.

        Args:
            batch: a SequenceBatch or SemanticIdBatch of the iteration.
            items: ids as in batches, [batch_size], or the best k of each sample, [batch_size, k]; also without padding.
            scores: of the same shape; stored as float32.

        Raises:
            ConfigError: shapes differ, items are not those of the dataset, or the batch is of another epoch.
            DataError: the file cannot be written.
        """
        self._try(lambda: self._add(batch, items, scores))

    def _add(self, batch: Any, items: Tensor, scores: Tensor) -> None:
        n, shape, size = batch.num_real, list(items.shape), batch.batch_size
        if batch.epoch != self._epoch:
            raise ConfigError(
                f"a batch of epoch {batch.epoch} is not of {self._epoch}; make a writer for each iteration"
            )
        if shape != list(scores.shape) or shape[:1] not in ([n], [size]) or len(shape) > 2 or items.is_floating_point():
            found = f"{items.dtype} {shape} and scores {list(scores.shape)}"
            raise ConfigError(f"items and scores must be [{size}] or [{size}, k], items integers, got {found}")
        ids, users = batch.sample_ids[:n].cpu().numpy(), np.empty(n, dtype=np.int64)
        for store, rows, samples in group_by_store(self._stores, ids):
            users[samples] = store.columns[USER_ID][store.rows_of(rows)]
        best, scores = items[:n].long().flatten().cpu().numpy(), scores[:n].detach().float().flatten()
        columns = {ITEM_ID: self._raw(ITEM_ID, best), "score": pa.array(scores.cpu().numpy())}
        if len(shape) == 2:
            offsets = pa.array(np.arange(n + 1, dtype=np.int32) * np.int32(shape[1]))
            columns = {name: pa.ListArray.from_arrays(offsets, values) for name, values in columns.items()}
        self._tables.append(pa.table({"sample_id": ids, USER_ID: self._raw(USER_ID, users), **columns}))
        self._is_seen[ids], self._num_rows = True, self._num_rows + n
        if sum(table.nbytes for table in self._tables) >= _BYTES_AT_ONCE:
            self._flush()

    def _raw(self, name: str, ids: NDArray[np.int64]) -> pa.Array:
        """Return the ids of the log for those of batches."""
        maps, raw_ids = self._stores[0].column_maps, self._raw_ids[name]
        ids = maps[name].inverse(ids) if name in maps else ids
        if raw_ids is None:
            return pa.array(ids)
        if len(ids) and not 0 <= ids.min() <= ids.max() <= len(raw_ids):
            found = f"{name} {ids.min()} to {ids.max()}"
            raise ConfigError(f"predictions have {found}, the dataset 0 to {len(raw_ids)}; pass ids as in batches")
        return raw_ids.take(pa.array(ids - 1, mask=ids == 0))

    def _flush(self) -> None:
        if self._tables:
            table = pa.concat_tables(self._tables)
            self._tables.clear()
            self._writer = self._writer or pq.ParquetWriter(self._partial / _part(self._rank), table.schema)
            self._writer.write_table(table)

    def _try(self, call: Callable[[], object]) -> None:
        """Make a call, unless an earlier one has failed; keep its error for all ranks."""
        try:
            if self._error is None:
                with self._named_errors():
                    call()
        except Exception as error:
            self._error = error
        if self._error is not None and self._group is None:
            raise self._error

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            fault = f"predictions cannot be written to {self._partial} ({first_line(error)})"
            remedy = "check its space and permissions, and pass items and scores of one shape"
            raise DataError(f"{fault}; {remedy}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._try(self._flush)
        if self._writer is not None:
            self._try(self._writer.close)
        if kind is None:
            self._check()

    def _check(self) -> None:
        schema = None if self._writer is None else str(self._writer.schema)
        own = reported(self._error), self._num_rows, schema, np.packbits(self._is_seen)
        errors, rows, schemas, seen = zip(*gather_checked({}, own, self._group), strict=True)
        raise_reported_errors(errors)
        if len({*schemas} - {None}) > 1:
            raise RankError(f"ranks have written other columns to {self._partial}; pass items and scores of one shape")
        num_seen = int(np.unpackbits(np.bitwise_or.reduce(seen)).sum())
        if not sum(rows) == num_seen == self._num_samples:
            raise RankError(
                f"{self._partial} has {sum(rows):,} predictions of {num_seen:,} samples, the epoch has "
                f"{self._num_samples:,} samples; write each batch of a whole iteration once, with drop_last=False"
            )
        compare_settings(lambda: self._complete({_part(rank): n for rank, n in enumerate(rows) if n}), self._group)

    def _complete(self, files: Mapping[str, int]) -> Mapping[str, Any]:
        if self._rank == 0:
            for path in (self._partial / name for name in files):
                if not path.is_file() or pq.read_metadata(path).num_rows != files[path.name]:
                    raise DataError(f"{path} is not there as it was written; choose a folder that all ranks share")
            with self._named_errors():
                write_text(
                    self._partial / _MANIFEST, json.dumps({"samples": self._num_samples, "files": files}, indent=2)
                )
                old = self._path.with_name(f".{self._path.name}.old")
                shutil.rmtree(old, ignore_errors=True)
                if self._path.exists():
                    self._path.rename(old)
                self._partial.rename(self._path)
                shutil.rmtree(old, ignore_errors=True)
        return {}


def _part(rank: int) -> str:
    return f"part-{rank:05}.parquet"
