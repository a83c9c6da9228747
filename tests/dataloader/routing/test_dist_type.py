import itertools
import json
import logging

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
    (found,) = read_dist_type(saved, source="the checkpoint").values()
    assert found.describe() == before.describe()
    if _same_rows(before, now):
        check_dist_type(saved, {"item_id": now}, source="the checkpoint")
    else:
        with pytest.raises(StateError, match=rf"routing {before.mode} \(.*this job uses {now.mode} \("):
            check_dist_type(saved, {"item_id": now}, source="the checkpoint")


def test_other_constants_are_another_map() -> None:
    entry = json.loads(dist_type({"item_id": _map("hash_roundrobin")}))
    entry["item_id"]["constants"][0] += 1
    message = r"this job uses hash_roundrobin \(num_embeddings 100\) with other constants; use the same"
    with pytest.raises(StateError, match=message):
        check_dist_type(json.dumps(entry), {"item_id": _map("hash_roundrobin")}, source="the checkpoint")
    message = r"^the checkpoint stores item_id with routing hash_roundrobin \(.*use the rel"
    with pytest.raises(StateError, match=message):
        read_dist_type(json.dumps(entry), source="the checkpoint")


def test_keys_without_a_map_are_continuous_with_a_notice_if_there_is_no_entry(caplog: pytest.LogCaptureFixture) -> None:
    maps = {"user_id": _map("continuous")}
    check_dist_type("{}", maps, source="the checkpoint")
    check_dist_type(dist_type(maps), {}, source="the checkpoint")
    with pytest.raises(StateError) as raised:
        check_dist_type(dist_type({"item_id": _map("roundrobin")}), {}, source="the checkpoint step-7")
    assert str(raised.value) == (
        "the checkpoint step-7 stores item_id with routing roundrobin (num_embeddings 100, world_size 4), but this job "
        "uses continuous; use the same key_maps, or change its tables with evenrank.dataloader.routing.remap"
    )
    assert read_dist_type(None, source="the checkpoint") == {}
    check_dist_type(None, {}, source="the checkpoint", notify=False)
    assert not caplog.records
    with caplog.at_level(logging.WARNING, logger="evenrank"):
        check_dist_type(None, {}, source="the checkpoint")
    assert caplog.messages == [
        "the checkpoint has no dist_type, so its tables count as continuous: row k has key k, as in stock TorchRec"
    ]
    message = r"stores item_id with routing continuous, but this job uses hash_roundrobin \("
    with pytest.raises(StateError, match=message):
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
    for change in ({"mode": "best"}, {"num_embeddings": None}, {"num_embeddings": 0}):
        with pytest.raises(StateError, match=r"^the checkpoint has a damaged dist_type \([^\n]*$"):
            read_dist_type(json.dumps({"item_id": MAPS[0].describe() | change}), source="the checkpoint")
