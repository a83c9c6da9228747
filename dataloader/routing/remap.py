"""Tables in checkpoints: `dist_type`, the key maps that they were trained with; `remap`, which moves their rows.

The entry `dist_type` of a checkpoint keeps rows from being read under other keys:

    {"item_id": {"mode": "hash_roundrobin", "num_embeddings": 131263, "constants": [...]}}

A checkpoint of torch.distributed.checkpoint has whole tensors in any number of parts, so a single process remaps it,
and the new one loads on any number of ranks.
"""

import contextlib
import dataclasses
import json
import logging
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

from evenrank.core.errors import ConfigError, DataError, EvenrankError, RankError, StateError, escape_controls, one_line
from evenrank.dataloader.routing.key_map import KeyMap

DIST_TYPE = "dist_type"
"""Name of the entry."""
_log = logging.getLogger("evenrank")
_CONTINUOUS = {"mode": "continuous"}
_PART_BYTES = 256 << 20


def dist_type(key_maps: Mapping[str, KeyMap]) -> str:
    """Return the entry of a checkpoint for these key maps: JSON, as text, which every format can hold."""
    return json.dumps({name: key_maps[name].describe() for name in sorted(key_maps)})


def check_dist_type(
    saved: str | None, key_maps: Mapping[str, KeyMap], *, source: str, notify: bool = True, may_grow: bool = False
) -> None:
    """Check that a checkpoint has the key maps of this job. Features without a map are `continuous`.

    Args:
        saved: the entry; None if the checkpoint has none: then all features count as `continuous`.
        key_maps: of this job.
        source: of the entry, for messages, such as "the checkpoint".
        notify: whether to log, to the logger `evenrank`, that there is no entry; one rank is enough.
        may_grow: whether tables may have more rows than in the checkpoint; `continuous` keys keep their rows.

    Raises:
        StateError: a feature has another map, or the entry is damaged.
    """
    if saved is None and notify:
        _log.warning(
            "%s has no %s, so its tables count as continuous: row k has key k, as in stock TorchRec",
            escape_controls(source),
            DIST_TYPE,
        )
    saved_entries = {} if saved is None else _parse(saved, source)
    entries = json.loads(dist_type(key_maps))
    for name in sorted({*saved_entries, *entries}):
        before, now = saved_entries.get(name, _CONTINUOUS), entries.get(name, _CONTINUOUS)
        # Of continuous maps, only entries that both have must be equal.
        both = before["mode"] == now["mode"] == "continuous"
        decisive = {*before} & {*now} if both else {*before, *now}
        if both and may_grow:
            continue
        if different := {entry for entry in decisive if before.get(entry) != now.get(entry)}:
            constants = " with other constants" if different == {"constants"} else ""
            raise StateError(
                f"{source} stores {name} with routing {_show(before)}, but this job uses {_show(now)}{constants}; use "
                "the same key_maps, or change its tables with evenrank.dataloader.routing.remap"
            )


def read_dist_type(saved: str | None, *, source: str) -> dict[str, KeyMap]:
    """Return the key maps of a checkpoint, to remap its tables; the arguments are those of `check_dist_type`.

    Raises:
        StateError: the entry is damaged, or a map has constants that this release does not have.
    """
    key_maps = {}
    for name, entry in ({} if saved is None else _parse(saved, source)).items():
        try:
            # Only entries that depend on the world size have it.
            key_map = KeyMap(
                num_embeddings=entry["num_embeddings"], world_size=entry.get("world_size", 1), mode=entry["mode"]
            )
        except (KeyError, ConfigError) as error:
            raise StateError(f"{source} has a damaged {DIST_TYPE} ({one_line(error)}); load an intact one") from error
        if key_map.describe() != entry:
            raise StateError(
                f"{source} stores {name} with routing {_show(entry)}, which this release computes differently; use "
                "the release of evenrank that saved it"
            )
        key_maps[name] = key_map
    return key_maps


def _parse(saved: str, source: str) -> dict[str, dict[str, Any]]:
    try:
        entries = json.loads(saved)
    except (TypeError, ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("mode"), str) for entry in entries.values()
    ):
        raise StateError(f"{source} has a damaged {DIST_TYPE}; load an intact one")
    return entries


def _show(entry: Mapping[str, Any]) -> str:
    """Return an entry as text, without the constants, which are long."""
    details = [f"{name} {entry[name]!r}" for name in ("num_embeddings", "world_size") if name in entry]
    return f"{entry['mode']} ({', '.join(details)})" if details else str(entry["mode"])


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
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    if unknown := [name for name in moves if name not in tensors]:
        raise ConfigError(f"{source} has no tensor {unknown[0]!r}; it has {', '.join(sorted(tensors))}")
    entries: dict[str, Any] = dict.fromkeys(metadata.state_dict_metadata) | tensors
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with naming_checkpoint(DataError, f"{source} cannot be read", "pass an intact checkpoint"):
        load(entries, storage_reader=FileSystemReader(source), planner=planner, no_dist=True)
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
    changes: dict[str, str] = {}
    for feature in sorted({*before, *after, *tables}):
        old, new = _describe(before.get(feature)), _describe(after.get(feature))
        changes[feature] = "stays" if old == new else f"changes from {old} to {new}"
        if old != new and feature not in tables:
            raise ConfigError(
                f"{feature} {changes[feature]}, but `tables` does not name it; add the tensors of its table, an empty "
                "list if it has none"
            )
    moves: dict[str, str] = {}
    for feature, names in tables.items():
        for name in names:
            first = moves.setdefault(name, feature)
            if changes[first] != changes[feature]:
                raise ConfigError(
                    f"{name} is the table of {first}, which {changes[first]}, and of {feature}, which "
                    f"{changes[feature]}; give all features of a table the same key maps"
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


@contextlib.contextmanager
def naming_checkpoint(kind: type[EvenrankError], fault: str, remedy: str) -> Iterator[None]:
    """Replace an error of torch.distributed.checkpoint by one line; its warnings are about its own internals."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except RankError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is no Exception; metadata is a pickle, so anything
        raise kind(f"{fault} ({one_line(error)}); {remedy}") from error


def read_metadata(source: Path) -> Metadata:
    """Return the metadata of a checkpoint, whose `state_dict_metadata` has the entries by name."""
    fault = f"{source} is no checkpoint of torch.distributed.checkpoint"
    with naming_checkpoint(DataError, fault, "pass the folder with its .metadata"):
        return FileSystemReader(source).read_metadata()


def _write(target: Path, entries: dict[str, Any], paths: Mapping[str, Any]) -> None:
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    remedy = "check the space and the permissions of its folder"
    try:
        with naming_checkpoint(DataError, f"{target} could not be written", remedy):
            save(entries, storage_writer=FileSystemWriter(partial), planner=_InParts(paths), no_dist=True)
            partial.rename(target)
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
    num_rows, *shape = data.size
    rows_at_once = max(1, _PART_BYTES * num_rows // (data.size.numel() * data.properties.dtype.itemsize))
    for first in range(0, num_rows, rows_at_once):
        sizes = torch.Size([min(rows_at_once, num_rows - first), *shape])
        chunk = ChunkStorageMetadata(offsets=torch.Size([first, *(0 for _ in shape)]), sizes=sizes)
        yield dataclasses.replace(
            item,
            index=dataclasses.replace(item.index, offset=chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=dataclasses.replace(data, chunk=chunk),
        )
