"""`dist_type`: the key maps that a checkpoint's tables were trained with, so that no row is read under another key.

{"item_id": {"mode": "hash_roundrobin", "num_embeddings": 131263, "constants": [...]}}
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from evenrank.core.errors import ConfigError, StateError, escape_controls, one_line
from evenrank.dataloader.routing.key_map import KeyMap

DIST_TYPE = "dist_type"
"""Name of the entry."""
_log = logging.getLogger("evenrank")
_CONTINUOUS = {"mode": "continuous"}


def dist_type(key_maps: Mapping[str, KeyMap]) -> str:
    """Return the entry of a checkpoint for these key maps: JSON, as text, which every format can hold."""
    return json.dumps({name: key_maps[name].describe() for name in sorted(key_maps)})


def check_dist_type(saved: str | None, key_maps: Mapping[str, KeyMap], *, source: str, notify: bool = True) -> None:
    """Check that a checkpoint has the key maps of this job. Features without a map are `continuous`.

    Args:
        saved: the entry; None if the checkpoint has none: then all features count as `continuous`.
        key_maps: of this job.
        source: of the entry, for messages, such as "the checkpoint".
        notify: whether to log, to the logger `evenrank`, that there is no entry; one rank is enough.

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
