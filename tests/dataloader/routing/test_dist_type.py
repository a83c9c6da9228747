"""A checkpoint says how its tables' keys are mapped, and is not read under another mapping."""

import itertools
import json
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import StateError
from evenrank.dataloader.routing import MODES, KeyMap, check_dist_type, dist_type, read_dist_type


def _map(mode: str, size: int = 100, ranks: int = 4) -> KeyMap:
    return KeyMap(num_embeddings=size, world_size=ranks, mode=mode)  # type: ignore[arg-type]


MAPS = [_map(mode, size, ranks) for mode in MODES for size in (100, 101) for ranks in (2, 4)]


def _same_rows(first: KeyMap, second: KeyMap) -> bool:
    """Return whether both put all keys into the same rows of the same table."""
    if (first.mode, first.num_embeddings) != (second.mode, second.num_embeddings):
        return False
    return first.mode != "roundrobin" or first.world_size == second.world_size


def test_the_entry_has_the_mode_its_constants_and_the_size_of_each_table() -> None:
    entry = json.loads(dist_type({"user_id": _map("roundrobin", 7, 2), "item_id": _map("hash_roundrobin")}))
    assert list(entry) == ["item_id", "user_id"]
    assert entry["user_id"] == {"mode": "roundrobin", "num_embeddings": 7, "world_size": 2}
    assert entry["item_id"].keys() == {"mode", "num_embeddings", "constants"}
    assert 0x243F6A8885A308D3 in entry["item_id"]["constants"]
    assert dist_type({}) == "{}"


@pytest.mark.parametrize(("before", "now"), list(itertools.product(MAPS, MAPS)))
def test_just_maps_to_the_same_rows_are_accepted(before: KeyMap, now: KeyMap) -> None:
    saved = dist_type({"item_id": before})
    if _same_rows(before, now):
        check_dist_type(saved, {"item_id": now}, source="the checkpoint")
    else:
        with pytest.raises(StateError, match=rf"routing {before.mode} \(.*this job uses {now.mode} \("):
            check_dist_type(saved, {"item_id": now}, source="the checkpoint")


def test_the_message_says_both() -> None:
    with pytest.raises(StateError) as raised:
        check_dist_type(dist_type({"item_id": _map("roundrobin")}), {}, source="the checkpoint step-7")
    assert str(raised.value) == (
        "the checkpoint step-7 stores item_id with routing roundrobin (num_embeddings 100, world_size 4), but this job "
        "uses continuous; use the same key_maps, or change its tables with evenrank.dataloader.routing.remap"
    )


def test_other_constants_are_another_map() -> None:
    entry = json.loads(dist_type({"item_id": _map("hash_roundrobin")}))
    entry["item_id"]["constants"][0] += 1
    with pytest.raises(
        StateError, match=r"this job uses hash_roundrobin \(num_embeddings 100\) with other constants; use the same"
    ):
        check_dist_type(json.dumps(entry), {"item_id": _map("hash_roundrobin")}, source="the checkpoint")


def test_keys_without_a_map_are_continuous() -> None:
    maps = {"user_id": _map("continuous")}
    check_dist_type("{}", maps, source="the checkpoint")
    check_dist_type(dist_type(maps), {}, source="the checkpoint")


def test_a_checkpoint_without_the_entry_counts_as_continuous_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="evenrank"):
        check_dist_type(None, {}, source="the checkpoint")
    assert [record.getMessage() for record in caplog.records] == [
        "the checkpoint has no dist_type, so its tables count as continuous: row k has key k, as in stock TorchRec"
    ]
    caplog.clear()
    check_dist_type(None, {}, source="the checkpoint", notify=False)
    assert not caplog.records
    with pytest.raises(
        StateError, match=r"stores item_id with routing continuous, but this job uses hash_roundrobin \("
    ):
        check_dist_type(None, {"item_id": _map("hash_roundrobin")}, source="the checkpoint")


@given(text=st.one_of(st.text(), st.sampled_from(["[]", "3", '{"item_id": 3}', '{"item_id": {}}', "[" * 100_000])))
def test_damaged_entries_are_refused(text: str) -> None:
    try:
        is_entry = json.loads(text) == {}
    except (ValueError, RecursionError):
        is_entry = False
    if not is_entry:
        with pytest.raises(StateError, match=r"^the checkpoint has a damaged dist_type; load an intact one$"):
            check_dist_type(text, {}, source="the checkpoint")


@pytest.mark.parametrize("mode", MODES)
def test_read_maps_place_keys_like_those_that_were_saved(mode: str) -> None:
    key_maps = {"item_id": _map(mode, 101, 3)}
    (found,) = read_dist_type(dist_type(key_maps), source="the checkpoint").values()
    assert found.describe() == key_maps["item_id"].describe()


def test_a_missing_entry_has_no_maps() -> None:
    assert read_dist_type(None, source="the checkpoint") == {}


def test_other_constants_are_refused() -> None:
    entry = _map("hash_roundrobin").describe() | {"constants": [1, 2]}
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
