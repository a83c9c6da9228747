"""What the loaders of all ranks must have in common, so that together they train each sample once."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from torchdata.nodes import BaseNode

from evenrank.core.errors import ConfigError
from evenrank.dataloader.collate.semantic_ids import CodeTable
from evenrank.dataloader.state.node import HasRankInvariants

PER_RANK = frozenset({"num_workers", "prefetch", "persistent_workers", "pin_memory"})
"""Settings that decide on how fast batches are made, not on what is in them; ranks may differ in these."""
# Compared by what was read: the file may be at another path on another host.
_CODES = frozenset({"codes", "codebook_sizes"})


def shared_settings(*records: Any) -> dict[str, Any]:
    """Return the settings that must be the same on all ranks, by name, as plain values that can be compared.

    Args:
        records: dataclasses of settings. All of their fields count but those of PER_RANK, so that a new setting is
            compared unless it says otherwise.

    """
    settings: dict[str, Any] = {}
    for record in records:
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            if isinstance(value, CodeTable):
                settings["codes"] = value.describe()
            elif field.name not in PER_RANK | _CODES:
                settings[field.name] = _plain(value)
    return settings


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Mapping):
        return tuple((name, _plain(value[name])) for name in sorted(value))
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def name_of(function: object) -> str | None:
    """Return the name of a function, or of the class of another callable; None for None.

    Their arguments are left out, as a transform may well be told its rank.
    """
    while isinstance(function, partial):
        function = function.func
    return None if function is None else getattr(function, "__qualname__", type(function).__qualname__)


def find_rank_invariants(batches: object) -> Mapping[str, Any]:
    """Return the identity of a loader, or of that at the source of a chain of torchdata nodes; empty without one."""
    if isinstance(batches, HasRankInvariants):
        return batches.rank_invariants()
    for name in ("root", "source"):  # of torchdata's Loader, and of its nodes
        if isinstance(inner := getattr(batches, name, None), BaseNode):
            return find_rank_invariants(inner)
    return {}


def check_world_size(identity: Mapping[str, Any], world_size: int) -> None:
    """Check that a loader was created for the ranks that balance together.

    Raises:
        ConfigError: it was created for another number of ranks.

    """
    if identity.get("world_size", world_size) != world_size:
        raise ConfigError(
            f"the loader was created for world_size {identity['world_size']}, but {world_size} ranks balance together; "
            f"create it with world_size={world_size}, the number of ranks of the Balancer's group"
        )
