"""`remap`: moves the rows of a table from one KeyMap to another; `remap_checkpoint`: in a whole checkpoint.

A checkpoint of torch.distributed.checkpoint has whole tensors in any number of parts, so a single process remaps it,
and the new one loads on any number of ranks.
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
from evenrank.dataloader.routing.dist_type import DIST_TYPE, dist_type, read_dist_type
from evenrank.dataloader.routing.key_map import KeyMap

_PART_BYTES = 256 << 20


def remap(table: Tensor, before: KeyMap | None, after: KeyMap | None) -> Tensor:
    """Return a new table in which `after` finds the rows that `before` finds in this: new[after(k)] = old[before(k)].

    Apply it to the weights and to the optimizer state by row alike.

    Args:
        table: [num_embeddings, ...], on any device.
        before: of the job that has trained it; None: `continuous`, key k in row k.
        after: of the job that goes on with it; None: `continuous`.

    Raises:
        ConfigError: a KeyMap is for a table of another size.
    """
    num_rows = len(table) if table.dim() else 0
    for name, key_map in (("before", before), ("after", after)):
        if key_map is not None and key_map.num_embeddings != num_rows:
            raise ConfigError(
                f"{name} is for num_embeddings={key_map.num_embeddings}, the table has the shape {list(table.shape)}; "
                "pass the KeyMap of this table"
            )
    rows = torch.arange(num_rows, device=table.device)
    keys = rows if after is None else after.inverse(rows)
    return table.detach().index_select(0, keys if before is None else before(keys))


def remap_checkpoint(
    source: Path | str,
    target: Path | str,
    tables: Mapping[str, Iterable[str]],
    *,
    before: Mapping[str, KeyMap],
    after: Mapping[str, KeyMap],
    values: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint like another one, in which the rows of some tables are moved from one KeyMap to another.

    Entries `dist_type`, such as that of the loader's state, are replaced by `dist_type(after)`; the loader keeps its
    position. The new checkpoint appears with all of its contents, or not at all. Everything is in host memory at once.

    Args:
        source: folder of the checkpoint, saved by any number of ranks.
        target: folder to write, which must not exist yet.
        tables: by feature, the names in the checkpoint of the tensors [num_embeddings, ...] of its table, none if it
            has no table, including those of the optimizer, such as `...item_id.momentum1` of row-wise Adagrad. Features
            that share a table name the same tensors.
        before: by feature; a feature that is not named is `continuous`.
        after: by feature.
        values: replaces or adds entries by name, such as `{"dist_type": dist_type(after)}` where there was none.

    Raises:
        ConfigError: the target exists; the checkpoint has no such tensor, or a `dist_type` other than `before`;
            `tables` lacks a feature whose KeyMap changes; features that share a table change differently; a KeyMap is
            for a table of another size; or a `dist_type` in `values` differs from `after`.
        StateError: an entry `dist_type` is damaged.
        DataError: the checkpoint is damaged or missing, or the new one cannot be written.
    """
    source, target, values = Path(source), Path(target), values or {}
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another target, or delete it")
    moves = _moves(tables, before, after)
    metadata = read_metadata(source)
    tensors = [name for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)]
    if unknown := [name for name in moves if name not in tensors]:
        raise ConfigError(f"{source} has no tensor {unknown[0]!r}; it has {', '.join(sorted(tensors))}")
    entries = _read(source, metadata)
    for name in _dist_types(entries):
        _check_entry(entries[name], before, "before", source=f"{name} of {source}")
        entries[name] = dist_type(after)
    for name in _dist_types(values):
        _check_entry(values[name], after, "after", source=f"the new {name}")
    for name, feature in moves.items():
        try:
            entries[name] = remap(entries[name], before.get(feature), after.get(feature))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    paths = dict(metadata.planner_data or {})
    for name, value in values.items():
        entries[name] = value
        paths.setdefault(name, tuple(name.split(".")))
    _write(target, entries, paths)


def _moves(
    tables: Mapping[str, Iterable[str]], before: Mapping[str, KeyMap], after: Mapping[str, KeyMap]
) -> dict[str, str]:
    """Return, for each tensor, a feature whose maps its rows follow."""
    described = {name: (_describe(before.get(name)), _describe(after.get(name))) for name in {*before, *after, *tables}}
    for feature, (old, new) in sorted(described.items()):
        if old != new and feature not in tables:
            raise ConfigError(
                f"{feature} changes from {old} to {new}, but `tables` does not name it; add the tensors of its table, "
                "an empty list if it has none"
            )
    changes = {feature: f"changes from {old} to {new}" for feature, (old, new) in described.items() if old != new}
    moves: dict[str, str] = {}
    for feature, names in tables.items():
        for name in names:
            first = moves.setdefault(name, feature)
            if changes.get(first) != changes.get(feature):
                raise ConfigError(
                    f"{name} is the table of {first}, which {changes.get(first, 'stays')}, and of {feature}, which "
                    f"{changes.get(feature, 'stays')}; give all features of a table the same key maps"
                )
    return moves


def _dist_types(entries: Mapping[str, Any]) -> list[str]:
    return [name for name, value in entries.items() if name.split(".")[-1] == DIST_TYPE and isinstance(value, str)]


def _check_entry(entry: str, key_maps: Mapping[str, KeyMap], argument: str, *, source: str) -> None:
    saved = read_dist_type(entry, source=source)
    for feature in sorted({*saved, *key_maps}):
        in_entry, passed = _describe(saved.get(feature)), _describe(key_maps.get(feature))
        if in_entry != passed:
            raise ConfigError(
                f"{source} has {feature} as {in_entry}, but `{argument}` has it as {passed}; pass the key maps that "
                "the entry was made from"
            )


def _describe(key_map: KeyMap | None) -> str:
    if key_map is None or key_map.is_identity:
        return "continuous"
    ranks = f" on {key_map.world_size} ranks" if key_map.mode == "roundrobin" else ""
    return f"{key_map.mode} of {key_map.num_embeddings} rows{ranks}"


def read_metadata(source: Path) -> Metadata:
    """Return the metadata of a checkpoint, whose `state_dict_metadata` has the entries by name."""
    try:
        return FileSystemReader(source).read_metadata()
    except Exception as error:  # it is a pickle, so anything
        raise DataError(
            f"{source} is no checkpoint of torch.distributed.checkpoint ({one_line(error)}); pass the folder with its "
            ".metadata"
        ) from error


def _read(source: Path, metadata: Metadata) -> dict[str, Any]:
    """Return all entries of a checkpoint by name, tensors in one piece."""
    entries: dict[str, Any] = dict.fromkeys(metadata.state_dict_metadata)
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            entries[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
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
    """Writes large tensors in parts, because a rank that loads a few rows reads whole parts."""

    def __init__(self, paths: Mapping[str, Any]) -> None:
        super().__init__()
        self._paths = dict(paths)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in _parts(item)]
        self.plan = dataclasses.replace(plan, items=items, planner_data=self._paths)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
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
