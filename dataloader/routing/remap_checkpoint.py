"""`remap_checkpoint`: the same for tables in a checkpoint of torch.distributed.checkpoint, in a single process.

Such a checkpoint has whole tensors in any number of parts, so the new one loads on any number of ranks.
"""

import dataclasses
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from evenrank.core.errors import ConfigError, DataError, one_line
from evenrank.dataloader.routing.dist_type import DIST_TYPE, read_dist_type
from evenrank.dataloader.routing.key_map import KeyMap
from evenrank.dataloader.routing.remap import remap

_PART_BYTES = 256 << 20


def remap_checkpoint(
    source: Path | str,
    target: Path | str,
    tables: Mapping[str, tuple[KeyMap | None, KeyMap | None]],
    *,
    values: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint like another one, in which the rows of some tables are moved from one KeyMap to another.

    It appears with all of its contents, or not at all. Everything is in host memory at once. Of the folder, only what
    torch.distributed.checkpoint has written is read.

    Args:
        source: folder of the checkpoint, saved by any number of ranks; it stays as it is.
        target: folder to write, which must not exist yet.
        tables: for tensors [num_embeddings, ...], by name in the checkpoint, where rows are now and where they are to
            be, as for `remap`. Optimizers have tensors by row too, such as `...item_id.momentum1` of row-wise Adagrad.
        values: replaces or adds entries by name, such as `{"loader.dist_type": dist_type(key_maps)}` for the loader's
            state, which keeps its position. Where this replaces a `dist_type`, the tables have to be those that it
            changes.

    Raises:
        ConfigError: the target exists, the checkpoint has no such tensor, a KeyMap is for a table of another size, or
            `tables` are not what a replaced `dist_type` changes.
        StateError: an entry `dist_type` is damaged.
        DataError: the checkpoint is damaged or missing, or the new one cannot be written.

    """
    source, target = Path(source), Path(target)
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another target, or delete it")
    metadata = read_metadata(source)
    tensors = [name for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)]
    if unknown := [name for name in tables if name not in tensors]:
        raise ConfigError(f"{source} has no tensor {unknown[0]!r}; it has {', '.join(sorted(tensors))}")
    entries = _read(source, metadata)
    for name, value in (values or {}).items():
        if name.split(".")[-1] == DIST_TYPE and isinstance(entries.get(name), str):
            _check_changes(tables, entries[name], value, source=f"{name} of {source}")
    for name, (before, after) in tables.items():
        try:
            entries[name] = remap(entries[name], before, after)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    paths = dict(metadata.planner_data or {})
    for name, value in (values or {}).items():
        entries[name] = value
        paths.setdefault(name, tuple(name.split(".")))
    _write(target, entries, paths)


def _check_changes(
    tables: Mapping[str, tuple[KeyMap | None, KeyMap | None]], saved: str, new: str, *, source: str
) -> None:
    """Check that the tables change as an entry `dist_type` does that is replaced."""
    before, after = read_dist_type(saved, source=source), read_dist_type(new, source="its replacement")
    of_entry = _changes((before.get(name), after.get(name)) for name in {*before, *after})
    of_tables = _changes(tables.values())
    for old, new_map in sorted(of_tables ^ of_entry):
        is_table = (old, new_map) in of_tables
        raise ConfigError(
            f"{'a table' if is_table else source} changes from {old} to {new_map}, but "
            f"{source + ' does not' if is_table else 'no table does'}; pass every table that changes, with the key map "
            "that the checkpoint has for it"
        )


def _changes(pairs: Iterable[tuple[KeyMap | None, KeyMap | None]]) -> set[tuple[str, str]]:
    described = {(_describe(before), _describe(after)) for before, after in pairs}
    return {(before, after) for before, after in described if before != after}


def _describe(key_map: KeyMap | None) -> str:
    if key_map is None or key_map.is_identity:
        return "continuous"
    ranks = f" on {key_map.world_size} ranks" if key_map.mode == "roundrobin" else ""
    return f"{key_map.mode} of {key_map.num_embeddings} rows{ranks}"


def read_metadata(source: Path) -> Metadata:
    """Return what a checkpoint says about its entries: `state_dict_metadata` has them by name.

    Raises:
        DataError: the folder is no checkpoint.

    """
    try:
        return FileSystemReader(source).read_metadata()
    except Exception as error:  # it is a pickle, so anything
        raise DataError(
            f"{source} is no checkpoint of torch.distributed.checkpoint ({one_line(error)}); pass the folder with its "
            ".metadata"
        ) from error


def _read(source: Path, metadata: Metadata) -> dict[str, Any]:
    """Return all entries of a checkpoint by name, tensors in one piece."""
    entries: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings(action="ignore"):  # that there is no process group
            load(entries, storage_reader=FileSystemReader(source), planner=planner, no_dist=True)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise DataError(f"{source} cannot be read ({_reason(error)}); pass an intact checkpoint") from error
    return entries


def _write(target: Path, entries: dict[str, Any], paths: Mapping[str, Any]) -> None:
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    try:
        with warnings.catch_warnings(action="ignore"):
            save(entries, storage_writer=FileSystemWriter(partial), planner=_InParts(paths), no_dist=True)
        partial.rename(target)
    except (Exception, CheckpointException) as error:
        raise DataError(
            f"{target} could not be written ({_reason(error)}); check the space and the permissions of its folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _InParts(DefaultSavePlanner):
    """Writes large tensors in parts: a rank that loads a few rows reads each part that has some of them as a whole.

    Args:
        paths: where each entry is in the nested state dict that was saved, as the checkpoint says.

    """

    def __init__(self, paths: Mapping[str, Any]) -> None:
        super().__init__()
        self._paths = dict(paths)

    def create_local_plan(self) -> SavePlan:
        """Return the default plan, of the entries as they were named, with several items for a large tensor."""
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(
            plan, items=[part for item in plan.items for part in _parts(item)], planner_data=self._paths
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return what to write for an item."""
        if write_item.type != WriteItemType.SHARD:
            return super().resolve_data(write_item)
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        whole: Tensor = self.state_dict[write_item.index.fqn]
        return whole.narrow(0, chunk.offsets[0], chunk.sizes[0])


def _parts(item: WriteItem) -> Iterator[WriteItem]:
    """Divide the rows of a tensor into parts of about `_PART_BYTES`; yield anything smaller as it is."""
    data = item.tensor_data
    if data is None or not data.size or data.size.numel() * data.properties.dtype.itemsize <= _PART_BYTES:
        yield item
        return
    num_rows, shape = data.size[0], data.size[1:]
    rows_at_once = max(1, _PART_BYTES // (shape.numel() * data.properties.dtype.itemsize))
    for first in range(0, num_rows, rows_at_once):
        chunk = ChunkStorageMetadata(
            offsets=torch.Size([first, *(0 for _ in shape)]),
            sizes=torch.Size([min(rows_at_once, num_rows - first), *shape]),
        )
        yield dataclasses.replace(
            item,
            index=dataclasses.replace(item.index, offset=chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=dataclasses.replace(data, chunk=chunk),
        )


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # of this process, the only one
        return one_line(error.failures[0][0])
    return one_line(error)
