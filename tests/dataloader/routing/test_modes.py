import dataclasses
from typing import Any, cast

import pytest

from evenrank.core.errors import ConfigError
from evenrank.dataloader.routing import Routing
from evenrank.dataloader.routing.key_map import check_routing, rows_per_rank


def test_ranges_cover_a_table_of_any_size() -> None:
    assert [rows_per_rank(rows, 4) for rows in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "modulo"}, "must be one of continuous, roundrobin, hash_roundrobin, got 'modulo'"),
        ({"mode": "continuous"}, "needs num_embeddings"),
        ({"mode": "continuous", "num_embeddings": 0}, "at least 1 and below 2\\^63, got 0"),
        ({"mode": "roundrobin", "num_embeddings": 2**63}, f"got {2**63}"),
        ({"mode": "roundrobin", "num_embeddings": True}, "got True"),
        ({"mode": "roundrobin", "num_embeddings": 2.0}, "got 2.0"),
    ],
)
def test_a_routing_checks_itself(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Routing(**arguments)


@pytest.mark.parametrize("world_size", [0, -1, 2**63, 2.0, True])
def test_a_world_size_is_checked(world_size: Any) -> None:
    with pytest.raises(ConfigError, match=f"world_size must be .*, got {world_size}"):
        check_routing(world_size, "roundrobin", None)


def test_a_routing_is_frozen_and_can_be_a_key_of_a_dict() -> None:
    routing = Routing(mode="continuous", num_embeddings=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cast(Any, routing).mode = "roundrobin"
    assert {routing: 1}[Routing(mode="continuous", num_embeddings=5)] == 1
