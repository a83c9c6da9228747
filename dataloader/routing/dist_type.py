"""`dist_type`: what a checkpoint says about the rows of its tables, so that they are not read under other keys.

{"item_id": {"mode": "hash_roundrobin", "num_embeddings": 131263, "constants": [...]}}
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from evenrank.core.errors import ConfigError, StateError, one_line
from evenrank.dataloader.routing.key_map import KeyMap

DIST_TYPE = "dist_type"
"""Name of the entry."""

_log = logging.getLogger("evenrank")
_CONTINUOUS = {"mode": "continuous"}


def dist_type(key_maps: Mapping[str, KeyMap]) -> str:
    """Return the entry of a checkpoint whose keys are mapped so: JSON, as text, which every format can hold."""
    return json.dumps({name: key_maps[name].describe() for name in sorted(key_maps)})


def check_dist_type(saved: str | None, key_maps: Mapping[str, KeyMap], *, owner: str) -> None:
    """Check that the keys of a checkpoint are mapped as here. Keys without a map are `continuous`.

    Args:
        saved: the entry; None if the checkpoint has none. It then counts as `continuous` in all keys, with a notice in
            the log `evenrank`.
        key_maps: of this job.
        owner: what has the entry, for messages, such as "the checkpoint".

    Raises:
        StateError: a key is mapped otherwise, or the entry is damaged.

    """
    if saved is None:
        _log.warning(
            "%s has no %s, so its tables count as continuous: row k has key k, as in stock TorchRec", owner, DIST_TYPE
        )
    of_saved = {} if saved is None else _parse(saved, owner)
    of_job = json.loads(dist_type(key_maps))
    for name in sorted({*of_saved, *of_job}):
        before, now = of_saved.get(name, _CONTINUOUS), of_job.get(name, _CONTINUOUS)
        if any(before.get(entry) != now.get(entry) for entry in _decisive(before, now)):
            raise StateError(
                f"{owner} has the rows of {name} by {_show(before)}, this job by {_show(now)}; use the same key_maps, "
                "or change its tables with evenrank.dataloader.routing.remap"
            )


def read_dist_type(saved: str | None, *, owner: str) -> dict[str, KeyMap]:
    """Return the key maps that `dist_type` made the entry of a checkpoint from, to remap its tables.

    Args:
        saved: the entry; None if the checkpoint has none: then no key has a map.
        owner: what has the entry, for messages, such as "the checkpoint".

    Raises:
        StateError: the entry is damaged, or a key is mapped with constants that this release does not have.

    """
    key_maps = {}
    for name, entry in ({} if saved is None else _parse(saved, owner)).items():
        try:
            # Only where the world size matters does the entry have it.
            key_map = KeyMap(
                num_embeddings=entry["num_embeddings"], world_size=entry.get("world_size", 1), mode=entry["mode"]
            )
        except (KeyError, ConfigError) as error:
            raise StateError(f"{owner} has a damaged {DIST_TYPE} ({one_line(error)}); load an intact one") from error
        if key_map.describe() != entry:
            raise StateError(
                f"{owner} has the rows of {name} by {_show(entry)}, which this release computes otherwise; use the "
                "release of evenrank that saved it"
            )
        key_maps[name] = key_map
    return key_maps


def _decisive(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return the names of what has to be equal: all that both say, and the mode; of other modes than continuous all."""
    if before["mode"] == now["mode"] == "continuous":
        return {*before} & {*now}
    return {*before, *now}


def _parse(saved: str, owner: str) -> dict[str, dict[str, Any]]:
    try:
        entries = json.loads(saved)
    except (TypeError, ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("mode"), str) for entry in entries.values()
    ):
        raise StateError(f"{owner} has a damaged {DIST_TYPE}; load an intact one")
    return entries


def _show(entry: Mapping[str, Any]) -> str:
    """Return an entry as text; constants, which are long, only say that they are others."""
    details = [f"{name} {entry[name]!r}" for name in ("num_embeddings", "world_size", "constants") if name in entry]
    return f"{entry['mode']} ({', '.join(details)})" if details else str(entry["mode"])
