"""`--routing`: the rows of keys in sharded tables, and `remap_job`, which copies a checkpoint for another routing."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.routing import DIST_TYPE, MODES, KeyMap, Mode, read_dist_type, remap_checkpoint
from evenrank.dataloader.routing.remap import read_metadata
from evenrank.datasets.schema import ACTION
from hstu.config import feature_of
from trainer.checkpoints import (
    PARTIAL,
    check_files,
    clean,
    complete_checkpoints,
    read_settings,
    write_checksums,
    write_settings,
)
from trainer.lock import FolderLock


def make_key_maps(table_rows: Mapping[str, int], routing: str, ranks: int) -> dict[str, KeyMap]:
    """Return a KeyMap by feature; none for `continuous`, where key k has row k.

    Actions have none either: they are labels too, and their table is small.

    Args:
        table_rows: rows of each sharded table, by feature.
        routing: one of `MODES`.
        ranks: number that the tables are sharded over.
    """
    if routing == "continuous":
        return {}
    mode = cast(Mode, routing)
    return {
        name: KeyMap(num_embeddings=rows, world_size=ranks, mode=mode)
        for name, rows in table_rows.items()
        if name != ACTION
    }


_OF_SHARDED_TABLE = re.compile(r"\.sharded\.embeddings\.(?P<table>[^.]+)\.weight")
"""Weights of tables end so; what the optimizer keeps of them has more behind it."""


def remap_job(out: Path, target: Path, *, routing: str, ranks: int | None = None) -> Path:
    """Write the newest checkpoint of a job to the folder of a new one, with its rows as another routing has them.

    The new job continues where the checkpoint was saved: in the model, the optimizer, and the data.

    Args:
        out: `--out` of the job, which stays as it is.
        target: `--out` of the new job, without checkpoints.
        routing: of the new job.
        ranks: data-parallel ones of the new job, which only `roundrobin` depends on.

    Returns:
        The new checkpoint.

    Raises:
        ConfigError: an argument is wrong or missing, the new job has checkpoints, or the tables are not sharded.
        DataError: there is no checkpoint, another process writes to the folder, or the new one cannot be written.
        StateError: a file of the checkpoint is missing or damaged.
    """
    if routing not in MODES:
        raise ConfigError(f"routing must be one of {', '.join(MODES)}, got {routing!r}")
    if routing == "roundrobin" and ranks is None:
        raise ConfigError("routing = 'roundrobin' depends on the number of ranks; pass the new job's as --ranks")
    if routing != "roundrobin" and ranks is not None:
        raise ConfigError(f"--ranks applies to --routing roundrobin, not to --routing {routing}; leave it out")
    source = _newest(out)
    if complete_checkpoints(target / "checkpoints"):
        raise ConfigError(f"{target} has checkpoints already; choose another folder")
    settings = read_settings(source)
    if settings.get("embeddings") != "sharded":
        raise ConfigError(f"{source} has no sharded tables, so it loads with any number of ranks as it is")
    before = read_dist_type(settings.get(DIST_TYPE), source=str(source))
    tensors = {
        name: (feature_of(match["table"]), entry.size[0])
        for name, entry in read_metadata(source).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and (match := _OF_SHARDED_TABLE.search(name))
    }
    if missing := set(before) - {table for table, _ in tensors.values()}:
        raise DataError(f"{source} has no table {min(missing)!r}, whose keys are mapped; pass an intact checkpoint")
    after = make_key_maps(dict(tensors.values()), routing, ranks or 1)
    tables: dict[str, list[str]] = {}
    for name, (table, _) in tensors.items():
        tables.setdefault(table, []).append(name)
    with FolderLock(target):
        return _write(source, target / "checkpoints" / source.name, settings, tables, before, after)


def _write(
    source: Path,
    new: Path,
    settings: Mapping[str, Any],
    tables: Mapping[str, list[str]],
    before: Mapping[str, KeyMap],
    after: Mapping[str, KeyMap],
) -> Path:
    """Write the new checkpoint; it gets its name once it is complete."""
    partial = new.with_suffix(PARTIAL)
    try:
        clean(new.parent)
        remap_checkpoint(source, partial, tables, before=before, after=after)
        write_settings(partial, settings, after)
        write_checksums(partial, {})
        return partial.rename(new)
    except OSError as error:
        raise DataError(f"{new} could not be written: {error.strerror}; check the space and permissions") from error


def _newest(out: Path) -> Path:
    found = complete_checkpoints(out / "checkpoints")
    if not found:
        raise DataError(f"{out} has no complete checkpoint; pass the --out of a job that has saved one")
    check_files(found[-1])
    return found[-1]
