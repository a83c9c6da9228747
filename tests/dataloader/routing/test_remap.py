"""The entry `dist_type` of checkpoints, and tables whose rows move to those of other key maps."""

import itertools
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from evenrank.core.errors import ConfigError, DataError, StateError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.routing import (
    MODES,
    KeyMap,
    check_dist_type,
    dist_type,
    read_dist_type,
    remap,
    remap_checkpoint,
)
from tests.pages import ROOT, blocks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MAPS = [KeyMap(num_embeddings=size, world_size=w, mode=mode) for mode in MODES for size in (9, 10) for w in (2, 4)]


def test_just_maps_to_the_same_rows_are_accepted() -> None:
    for before, now in itertools.product(MAPS, MAPS):
        saved = dist_type({"item_id": before})
        (found,) = read_dist_type(saved, source="it").values()
        assert found.describe() == before.describe()
        same_table = (before.mode, before.num_embeddings) == (now.mode, now.num_embeddings)
        if same_table and (before.mode != "roundrobin" or before.world_size == now.world_size):
            check_dist_type(saved, {"item_id": now}, source="it")
            continue
        refused = rf"^it stores item_id with routing {before.mode} \(.*job uses {now.mode} \("
        with pytest.raises(StateError, match=refused):
            check_dist_type(saved, {"item_id": now}, source="it")


def test_the_entry_has_the_mode_its_constants_and_the_size_of_each_table(caplog: pytest.LogCaptureFixture) -> None:
    hashed = KeyMap(num_embeddings=100, world_size=4, mode="hash_roundrobin")
    text = dist_type({"user_id": KeyMap(num_embeddings=7, world_size=2, mode="roundrobin"), "item_id": hashed})
    entry = json.loads(text)
    assert list(entry) == ["item_id", "user_id"]
    assert entry["user_id"] == {"mode": "roundrobin", "num_embeddings": 7, "world_size": 2}
    assert entry["item_id"].keys() == {"mode", "num_embeddings", "constants"}
    assert 0x243F6A8885A308D3 in entry["item_id"]["constants"]
    entry["item_id"]["constants"][0] += 1
    changed = r"uses hash_roundrobin \(num_embeddings 100\) with other constants; use the same"
    with pytest.raises(StateError, match=changed):
        check_dist_type(json.dumps({"item_id": entry["item_id"]}), {"item_id": hashed}, source="it")
    with pytest.raises(StateError, match=r"^it stores item_id with routing hash_roundrobin \(.*use the rel"):
        read_dist_type(json.dumps(entry), source="it")
    # Keys without a map are continuous.
    continuous = {"user_id": KeyMap(num_embeddings=7, world_size=2, mode="continuous")}
    assert (dist_type({}), read_dist_type(None, source="it")) == ("{}", {})
    check_dist_type("{}", continuous, source="it")
    check_dist_type(dist_type(continuous), {}, source="it")
    check_dist_type(None, {}, source="it", notify=False)
    assert not caplog.records
    with caplog.at_level(logging.WARNING, logger="evenrank"):
        check_dist_type(None, {}, source="the checkpoint")
    (warned,) = caplog.messages
    assert warned.startswith("the checkpoint has no dist_type, so its tables count as continuous: row k has key k, as")


OF_TABLE = st.tuples(st.integers(1, 9), st.sampled_from([None, *MODES]))


@given(num_rows=st.integers(1, 200), before=OF_TABLE, after=OF_TABLE, shape=st.sampled_from([(), (3,), (2, 2)]))
def test_every_key_keeps_its_row(num_rows: int, before: Any, after: Any, shape: Any) -> None:
    maps = [
        mode and KeyMap(num_embeddings=num_rows, world_size=world_size, mode=mode)
        for world_size, mode in (before, after)
    ]
    table = torch.arange(num_rows * torch.Size(shape).numel()).reshape(num_rows, *shape)
    moved, keys = remap(table, *maps), torch.arange(num_rows)
    old_rows, new_rows = (keys if key_map is None else key_map(keys) for key_map in maps)
    assert torch.equal(moved[new_rows], table[old_rows])
    assert torch.equal(remap(moved, maps[1], maps[0]), table)
    with_gradient = table.double().requires_grad_()
    new = remap(with_gradient, *maps)
    assert not new.requires_grad
    new.fill_(-1)
    assert torch.equal(with_gradient.long(), table)


ROWS, DIM = 23, 3
HASHED = KeyMap(num_embeddings=ROWS, world_size=2, mode="hash_roundrobin")
ON_4 = KeyMap(num_embeddings=ROWS, world_size=4, mode="roundrobin")
WEIGHT, MOMENTUM = "model.item_id.weight", "optimizer.state.item_id.weight.item_id.momentum1"
TABLES = {"item_id": [WEIGHT, MOMENTUM]}
BEFORE, AFTER = {"item_id": HASHED}, {"item_id": ON_4}
USERS = KeyMap(num_embeddings=7, world_size=3, mode="roundrobin")


def _state(value: float = 1.0) -> dict[str, Any]:
    """Return a state of a model, an optimizer and a loader; like it, but without its values, for 0."""
    users = value * torch.arange(7, dtype=torch.float64)
    weights = torch.arange(ROWS * DIM, dtype=torch.float32).reshape(ROWS, DIM)
    return {
        "model": {"item_id.weight": value * weights, "dense.weight": torch.full((4, 2), value), "users": users},
        "optimizer": {"state": {"item_id.weight": {"item_id.momentum1": value * weights[:, 0] + value}}},
        "loader": {"position": int(value) * 48, "dist_type": dist_type({"item_id": HASHED})},
        "step": int(value) * 7,
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def _load(path: Path, **changed: Any) -> dict[str, Any]:
    state = {**_state(0), **changed}
    load(state, storage_reader=FileSystemReader(path), no_dist=True)
    return state


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save(_state(), checkpoint_id=tmp_path / "source", no_dist=True)
    return tmp_path / "source"


@pytest.mark.parametrize("part_bytes", [1 << 28, 20], ids=["in one part", "in many parts"])
def test_rows_move_and_everything_else_stays(source: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    monkeypatch.setitem(remap_checkpoint.__globals__, "_PART_BYTES", part_bytes)
    target = source.with_name("target")
    # A feature without a table may change, and entries that the checkpoint lacks be added.
    tables = {**TABLES, "friend_id": [], "user_id": ["model.users"]}
    after = {**AFTER, "friend_id": ON_4, "user_id": USERS}
    remap_checkpoint(source, target, tables, before=BEFORE, after=after, values={"loader.new": [1, 2]})
    expected = _state()
    expected["loader"] |= {"dist_type": dist_type(after), "new": [1, 2]}
    expected["model"]["item_id.weight"] = remap(expected["model"]["item_id.weight"], HASHED, ON_4)
    expected["model"]["users"] = remap(expected["model"]["users"], None, USERS)
    momentum = expected["optimizer"]["state"]["item_id.weight"]
    momentum["item_id.momentum1"] = remap(momentum["item_id.momentum1"], HASHED, ON_4)
    assert _equal(_load(target, loader={**_state(0)["loader"], "new": []}), expected)
    assert _equal(_load(source), _state())
    before, changed = (FileSystemReader(path).read_metadata() for path in (source, target))
    assert (before.planner_data or {}).items() <= (changed.planner_data or {}).items()
    weight: Any = changed.state_dict_metadata["model.item_id.weight"]
    assert [chunk.sizes[0] for chunk in weight.chunks] == ([ROWS] if part_bytes > 20 else [1] * ROWS)
    assert sorted(path.name for path in source.parent.iterdir()) == ["source", "target"]


OTHER = KeyMap(num_embeddings=ROWS, world_size=1, mode="hash_roundrobin")
IS_HASHED, IS_ON_4 = "hash_roundrobin of 23 rows", "roundrobin of 23 rows on 4 ranks"
OF_TWO = {**TABLES, "user_id": ["model.item_id.weight"]}
BOTH = {"item_id": ON_4, "user_id": ON_4}
OF_BOTH = {"new.dist_type": dist_type(BOTH)}
TENSORS = "it has model.dense.weight, model.item_id.weight, model.users, optimizer.state"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"before": {}}, f"loader.dist_type of SOURCE has item_id as {IS_HASHED}, but `before` has it as conti"),
    ({"before": {**BEFORE, "user_id": OTHER}}, f"user_id changes from {IS_HASHED} to continuous, but `tabl"),
    ({"tables": {}}, f"item_id changes from {IS_HASHED} to {IS_ON_4}, but `tables` does not name it; add "),
    ({"values": OF_BOTH}, f"the new new.dist_type has user_id as {IS_ON_4}, but `after` has it as continuous; pass"),
    # Of two tables of one size, each has its own maps.
    ({"tables": OF_TWO}, f"which changes from {IS_HASHED} to {IS_ON_4}, and of user_id, which stays; give all"),
    ({"tables": OF_TWO, "after": BOTH}, f"and of user_id, which changes from continuous to {IS_ON_4}; give all"),
    ({"tables": {**TABLES, "user_id": ["x.weight"]}}, f"SOURCE has no tensor 'x.weight'; {TENSORS}"),
    ({"tables": {**TABLES, "user_id": ["step"]}}, f"SOURCE has no tensor 'step'; {TENSORS}"),
]


def test_what_does_not_fit_or_cannot_be_read_or_written_leaves_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    def check_refused(error: type[Exception], message: str, path: Path = source, **changes: Any) -> None:
        with pytest.raises(error, match=message) as caught:
            remap_checkpoint(path, target, **{"tables": TABLES, "before": BEFORE, "after": AFTER, **changes})
        assert "\n" not in str(caught.value)

    target = source.with_name("target")
    for changes, message in REFUSED:
        check_refused(ConfigError, re.escape(message.replace("SOURCE", str(source))), **changes)
    missing = r"missing is no checkpoint of torch\.distributed\.checkpoint \(FileNotFound"
    check_refused(DataError, missing, source.with_name("missing"))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fail)
        check_refused(DataError, r"could not be written \(rank 0: OSError: .*No space left")
    (part,) = source.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:100])
    check_refused(DataError, "source cannot be read")
    assert [path.name for path in source.parent.iterdir()] == ["source"]
    target.mkdir()
    check_refused(ConfigError, "target exists already; choose another target, or delete it")
    assert list(target.iterdir()) == []


def test_the_code_of_the_page_checks_and_remaps_checkpoints(small_dataset: Path, tmp_path: Path) -> None:
    _, _, _, check, change = blocks(ROOT / "docs" / "how-to" / "routing.md")
    items = KeyMap(num_embeddings=501, world_size=4, mode="hash_roundrobin")
    config = LoaderConfig(batch_size=32, key_maps={"item_id": items})
    plain, mapped = (
        build_loader(small_dataset, c, rank=0, world_size=1) for c in (LoaderConfig(batch_size=32), config)
    )
    next(iter(plain))
    weight, momentum, name = torch.rand(501, 4), torch.rand(501), "embeddings.sharded.embeddings.item_id.weight"
    model = {name: weight}
    of_job = {"config": config, "model": SimpleNamespace(state_dict=lambda: model), "loader": mapped}
    exec(check, {**of_job, "path": tmp_path / "checked"})
    optimizer = {"state": {name: {"item_id.momentum1": momentum}}}
    state = {"model": model, "optimizer": optimizer, "loader": plain.state_dict(), "dist_type": dist_type({})}
    save(state, checkpoint_id=tmp_path / "source", no_dist=True)
    exec(change, {"source": tmp_path / "source", "target": tmp_path / "target", "items": items, "dist_type": dist_type})
    loaded: dict[str, Any] = {
        "model": {name: torch.zeros_like(weight)},
        "optimizer": {"state": {name: {"item_id.momentum1": torch.zeros_like(momentum)}}},
        "loader": mapped.state_dict(),
        "dist_type": "",
    }
    load(loaded, checkpoint_id=tmp_path / "target", no_dist=True)
    assert loaded["dist_type"] == dist_type({"item_id": items})
    assert torch.equal(loaded["model"][name], remap(weight, None, items))
    assert torch.equal(loaded["optimizer"]["state"][name]["item_id.momentum1"], remap(momentum, None, items))
    mapped.load_state_dict(loaded["loader"])
    assert mapped.remaining_batches() == len(mapped) - 1
