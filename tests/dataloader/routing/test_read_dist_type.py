"""The key maps that a checkpoint names are those that it was saved with."""

import json
import re

import pytest

from evenrank.core.errors import StateError
from evenrank.dataloader.routing import MODES, KeyMap, dist_type, read_dist_type


@pytest.mark.parametrize("mode", MODES)
def test_read_maps_place_keys_like_those_that_were_saved(mode: str) -> None:
    key_maps = {"item_id": KeyMap(num_embeddings=101, world_size=3, mode=mode)}  # type: ignore[arg-type]
    (found,) = read_dist_type(dist_type(key_maps), source="the checkpoint").values()
    assert found.describe() == key_maps["item_id"].describe()


def test_a_missing_entry_has_no_maps() -> None:
    assert read_dist_type(None, source="the checkpoint") == {}


def test_other_constants_are_refused() -> None:
    entry = KeyMap(num_embeddings=101, world_size=3, mode="hash_roundrobin").describe() | {"constants": [1, 2]}
    with pytest.raises(
        StateError, match=r"^the checkpoint stores item_id with routing hash_roundrobin \(.*use the rel"
    ):
        read_dist_type(json.dumps({"item_id": entry}), source="the checkpoint")


@pytest.mark.parametrize(
    "entry",
    [{"mode": "best", "num_embeddings": 3}, {"mode": "continuous"}, {"mode": "continuous", "num_embeddings": 0}],
)
def test_a_damaged_entry_is_one_line(entry: dict[str, object]) -> None:
    with pytest.raises(StateError, match=re.escape("the checkpoint has a damaged dist_type (")) as caught:
        read_dist_type(json.dumps({"item_id": entry}), source="the checkpoint")
    assert "\n" not in str(caught.value)
