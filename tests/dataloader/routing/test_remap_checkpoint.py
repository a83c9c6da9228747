"""Remapped checkpoints load like the ones they were made from, except for the rows that have moved."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.routing import KeyMap, dist_type, remap, remap_checkpoint
from evenrank.dataloader.routing import remap_checkpoint as function

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROWS, DIM = 23, 3
HASHED = KeyMap(num_embeddings=ROWS, world_size=2, mode="hash_roundrobin")
ON_4 = KeyMap(num_embeddings=ROWS, world_size=4, mode="roundrobin")
TABLES = {"model.item_id.weight": (HASHED, ON_4), "optimizer.state.item_id.weight.item_id.momentum1": (HASHED, ON_4)}


def _state(value: float = 1.0) -> dict[str, Any]:
    """Return a state of a model, an optimizer and a loader; like it, but without its values, for 0."""
    weights = torch.arange(ROWS * DIM, dtype=torch.float32).reshape(ROWS, DIM)
    return {
        "model": {"item_id.weight": value * weights, "dense.weight": torch.full((4, 2), value, dtype=torch.float64)},
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


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("part_bytes", [1 << 28, 20], ids=["in one part", "in many parts"])
def test_rows_move_and_everything_else_stays(source: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    monkeypatch.setitem(function.__globals__, "_PART_BYTES", part_bytes)
    target = source.with_name("target")
    remap_checkpoint(source, target, TABLES, values={"loader.dist_type": dist_type({"item_id": ON_4})})
    expected = _state()
    expected["loader"]["dist_type"] = dist_type({"item_id": ON_4})
    expected["model"]["item_id.weight"] = remap(expected["model"]["item_id.weight"], HASHED, ON_4)
    momentum = expected["optimizer"]["state"]["item_id.weight"]
    momentum["item_id.momentum1"] = remap(momentum["item_id.momentum1"], HASHED, ON_4)
    assert not torch.equal(
        momentum["item_id.momentum1"], _state()["optimizer"]["state"]["item_id.weight"]["item_id.momentum1"]
    )
    assert _equal(_load(target), expected)
    assert _equal(_load(source), _state())
    before, after = (FileSystemReader(path).read_metadata() for path in (source, target))
    assert after.planner_data == before.planner_data
    weight = after.state_dict_metadata["model.item_id.weight"]
    assert isinstance(weight, TensorStorageMetadata)
    assert [chunk.sizes[0] for chunk in weight.chunks] == ([ROWS] if part_bytes > 20 else [1] * ROWS)
    assert sorted(path.name for path in source.parent.iterdir()) == ["source", "target"]


@pytest.mark.parametrize(
    ("tables", "new", "message"),
    [
        (
            {"model.item_id.weight": (None, ON_4)},
            {"item_id": ON_4},
            "a table changes from continuous to roundrobin of 23",
        ),
        (
            {},
            {"item_id": ON_4},
            "source changes from hash_roundrobin of 23 rows to roundrobin of 23 rows on 4 ranks, but",
        ),
        (
            TABLES,
            {"item_id": HASHED},
            "a table changes from hash_roundrobin of 23 rows to roundrobin of 23 rows on 4 r",
        ),
        (
            TABLES,
            {},
            "source changes from hash_roundrobin of 23 rows to continuous, but no table does; pass every table",
        ),
    ],
)
def test_tables_that_are_not_those_of_the_entry_are_refused(
    source: Path, tables: dict[str, Any], new: dict[str, KeyMap], message: str
) -> None:
    target = source.with_name("target")
    with pytest.raises(ConfigError, match=re.escape(message)):
        remap_checkpoint(source, target, tables, values={"loader.dist_type": dist_type(new)})
    assert not target.exists()


def test_an_entry_that_the_checkpoint_lacks_can_be_added(source: Path) -> None:
    target = source.with_name("target")
    remap_checkpoint(source, target, {}, values={"loader.new": [1, 2]})
    loaded = _load(target, loader={"position": 0, "new": []})
    assert loaded["loader"] == {"position": 48, "new": [1, 2]}


def test_a_name_that_is_no_tensor_is_refused_with_those_that_are(source: Path) -> None:
    target = source.with_name("target")
    for name in ("model.user_id.weight", "step"):
        message = f"{source} has no tensor {name!r}; it has model.dense.weight, model.item_id.weight, optimizer.state"
        with pytest.raises(ConfigError, match=re.escape(message)):
            remap_checkpoint(source, target, {**TABLES, name: (None, None)})
    assert not target.exists()


def test_a_key_map_of_another_table_is_refused_with_its_name(source: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.dense\.weight: after is for num_embeddings=23, the table has the s"):
        remap_checkpoint(source, source.with_name("target"), {"model.dense.weight": (None, ON_4)})


def test_an_existing_target_is_refused_and_stays(source: Path) -> None:
    target = source.with_name("target")
    target.mkdir()
    with pytest.raises(ConfigError, match="target exists already; choose another target, or delete it"):
        remap_checkpoint(source, target, TABLES)
    assert list(target.iterdir()) == []


def test_what_is_no_checkpoint_or_a_damaged_one_is_one_line(source: Path) -> None:
    with pytest.raises(DataError, match=r"missing is no checkpoint of torch\.distributed\.checkpoint \(FileNotFound"):
        remap_checkpoint(source.with_name("missing"), source.with_name("target"), TABLES)
    (part,) = source.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(DataError, match="source cannot be read") as caught:
        remap_checkpoint(source, source.with_name("target"), TABLES)
    assert "\n" not in str(caught.value)
    assert [path.name for path in source.parent.iterdir()] == ["source"]


def test_nothing_half_written_stays(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(DataError, match=r"could not be written \(OSError: .*No space left") as caught:
        remap_checkpoint(source, source.with_name("target"), TABLES)
    assert "\n" not in str(caught.value)
    assert [path.name for path in source.parent.iterdir()] == ["source"]
