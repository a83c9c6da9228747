import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.routing import MODES, KeyMap, dist_type, remap, remap_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _map_of(num_rows: int, world_size: int, mode: str | None) -> KeyMap | None:
    return mode and KeyMap(num_embeddings=num_rows, world_size=world_size, mode=mode)  # type: ignore[return-value,arg-type]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


MAPS = st.tuples(st.integers(1, 9), st.sampled_from([None, *MODES]))


@given(num_rows=st.integers(1, 200), before=MAPS, after=MAPS, shape=st.sampled_from([(), (3,), (2, 2)]))
def test_every_key_keeps_its_row(num_rows: int, before: Any, after: Any, shape: Any) -> None:
    maps = [_map_of(num_rows, *one) for one in (before, after)]
    table = torch.arange(num_rows * torch.Size(shape).numel()).reshape(num_rows, *shape)
    moved = remap(table, *maps)
    for key in range(num_rows):
        one = torch.tensor([key])
        old_row, new_row = (key if key_map is None else int(key_map(one)) for key_map in maps)
        assert torch.equal(moved[new_row], table[old_row])
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
    tables, after = (
        {**TABLES, "friend_id": [], "user_id": ["model.users"]},
        {**AFTER, "friend_id": ON_4, "user_id": USERS},
    )
    values = {"loader.new": [1, 2]}
    remap_checkpoint(source, target, tables, before=BEFORE, after=after, values=values)
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
IS_HASHED = "hash_roundrobin of 23 rows"
IS_ON_4 = "roundrobin of 23 rows on 4 ranks"
OF_TWO = {**TABLES, "user_id": ["model.item_id.weight"]}
BOTH = {"item_id": ON_4, "user_id": ON_4}
OF_BOTH = {"new.dist_type": dist_type(BOTH)}
TENSORS = "it has model.dense.weight, model.item_id.weight, model.users, optimizer.state"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"before": {}}, f"loader.dist_type of SOURCE has item_id as {IS_HASHED}, but `before` has it as conti"),
        ({"before": {**BEFORE, "user_id": OTHER}}, f"user_id changes from {IS_HASHED} to continuous, but `tabl"),
        ({"tables": {}}, f"item_id changes from {IS_HASHED} to {IS_ON_4}, but `tables` does not name it; add "),
        (
            {"tables": {}, "after": {}},
            f"item_id changes from {IS_HASHED} to continuous, but `tables` does not name it;",
        ),
        (
            {"values": OF_BOTH},
            f"the new new.dist_type has user_id as {IS_ON_4}, but `after` has it as continuous; pass",
        ),
        # Of two tables of one size, each has its own maps.
        ({"after": BOTH}, f"user_id changes from continuous to {IS_ON_4}, but "),
        ({"tables": OF_TWO}, f"which changes from {IS_HASHED} to {IS_ON_4}, and of user_id, which stays; give all"),
        ({"tables": OF_TWO, "after": BOTH}, f"and of user_id, which changes from continuous to {IS_ON_4}; give all"),
        ({"tables": {**TABLES, "user_id": ["x.weight"]}}, f"SOURCE has no tensor 'x.weight'; {TENSORS}"),
        ({"tables": {**TABLES, "user_id": ["step"]}}, f"SOURCE has no tensor 'step'; {TENSORS}"),
    ],
)
def test_maps_that_do_not_fit_are_refused(source: Path, changes: dict[str, Any], message: str) -> None:
    target = source.with_name("target")
    arguments: dict[str, Any] = {"tables": TABLES, "before": BEFORE, "after": AFTER, **changes}
    with pytest.raises(ConfigError, match=re.escape(message.replace("SOURCE", str(source)))):
        remap_checkpoint(source, target, **arguments)
    assert not target.exists()


def test_what_cannot_be_read_or_written_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    def check_refused(error: type[Exception], message: str, path: Path = source) -> None:
        with pytest.raises(error, match=message) as caught:
            remap_checkpoint(path, target, TABLES, before=BEFORE, after=AFTER)
        assert "\n" not in str(caught.value)

    target = source.with_name("target")
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
