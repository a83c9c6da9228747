"""Checkpoints are complete or not there, and load on any number of ranks."""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evenrank.core.errors import DataError, RankError, StateError
from evenrank.dataloader.routing import KeyMap
from tests.ranks import RankPool
from trainer.checkpoints import Checkpoints, complete_checkpoints

SETTINGS = {"model": "hstu", "hidden": 8}


def _state(value: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((5,), value)}, "loader": {"epoch": int(value)}, "step": int(value)}


def _save(rank: int, world_size: int, folder: Path, keep: int, steps: list[int]) -> list[str]:
    checkpoints = Checkpoints(folder, keep=keep, settings=SETTINGS)
    for step in steps:
        state = _state(step)
        checkpoints.save(step, state)
        state["model"]["weight"].zero_()  # as the next step of training does, while the checkpoint is being written
    checkpoints.finish()
    return [path.name for path in complete_checkpoints(folder)]


def _load(rank: int, world_size: int, folder: Path, settings: dict[str, Any]) -> Any:
    checkpoints = Checkpoints(folder, keep=2, settings=settings)
    newest = checkpoints.newest()
    if newest is None:
        return None
    state = _state(0)
    checkpoints.load(newest, state)
    return newest.name, state["model"]["weight"].tolist(), state["loader"], state["step"]


def test_the_last_checkpoints_are_kept_and_the_newest_loads_on_other_numbers_of_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    saved = ranks.run(2, _save, tmp_path, 2, [1, 2, 30, 30, 200])
    assert saved == [["step-00000030", "step-00000200"]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == saved[0]  # nothing else is left
    expected = ("step-00000200", [200.0] * 5, {"epoch": 200}, 200)
    assert ranks.run(1, _load, tmp_path, SETTINGS) == [expected]
    assert ranks.run(3, _load, tmp_path, SETTINGS) == [expected] * 3


def test_without_a_checkpoint_there_is_none(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, _load, tmp_path / "new", SETTINGS) == [None, None]


def test_a_checkpoint_that_was_cut_off_is_passed_over_and_removed(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _save, tmp_path, 2, [7])
    shutil.copytree(tmp_path / "step-00000007", tmp_path / "step-00000009.partial")
    assert ranks.run(2, _load, tmp_path, SETTINGS)[1][0] == "step-00000007"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_a_checkpoint_of_another_job_is_an_error_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _save, tmp_path, 2, [7])
    for failure in ranks.try_run(2, _load, tmp_path, {**SETTINGS, "hidden": 16}):
        assert failure.type_name == StateError.__name__
        assert "was saved with hidden = 8, this job has 16; choose another --out" in failure.message


def _load_other_weights(rank: int, world_size: int, folder: Path) -> None:
    checkpoints = Checkpoints(folder, keep=2, settings=SETTINGS)
    checkpoints.load(folder / "step-00000007", {**_state(0), "model": {"other": torch.zeros(5)}})


def test_an_intact_checkpoint_that_does_not_fit_is_not_called_damaged(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _save, tmp_path, 2, [7])
    for failure in ranks.try_run(2, _load_other_weights, tmp_path):
        assert failure.type_name == StateError.__name__
        assert "step-00000007 is as it was saved, but cannot be loaded (rank 0: " in failure.message
        assert "model.other" in failure.message
        assert "\n" not in failure.message


def test_a_checkpoint_under_the_name_of_another_step_is_an_error(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _save, tmp_path, 2, [7])
    (tmp_path / "step-00000007").rename(tmp_path / "step-00000009")
    for failure in ranks.try_run(2, _load, tmp_path, SETTINGS):
        assert failure.type_name == StateError.__name__
        assert failure.message == f"{tmp_path / 'step-00000009'} has the state of step 7; rename it to step-00000007"


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _flip(file: Path) -> None:
    """Flip one bit of the byte in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _replace_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _swap(file: Path) -> None:
    """Replace a file by that of the checkpoint before."""
    shutil.copy(file.parents[1] / "step-00000003" / file.name, file)


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _delete(file: Path) -> None:
    file.unlink()


DAMAGES: list[Callable[[Path], None]] = [_truncate, _empty, _flip, _delete, _replace_by_folder, _replace_by_pipe, _swap]
FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json", "settings.json"]


def test_damage_to_any_file_is_an_error_on_all_ranks_before_anything_is_loaded(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _save, tmp_path, 2, [3, 7])
    newest = tmp_path / "step-00000007"
    assert sorted(file.name for file in newest.iterdir()) == FILES
    shutil.copytree(newest, tmp_path / "intact")
    num_damaged = 0
    for name, damage in itertools.product(FILES, DAMAGES):
        damage(newest / name)
        if not (newest / name).is_file() or (newest / name).read_bytes() != (tmp_path / "intact" / name).read_bytes():
            num_damaged += 1
            messages = [failure.message for failure in ranks.try_run(2, _load, tmp_path, SETTINGS)]
            for message in messages:
                assert f"{newest} is damaged (" in message
                assert message.endswith("); restore it, or delete it to resume from the one before")
                assert "\n" not in message
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "intact", newest)
    assert num_damaged >= len(FILES) * len(DAMAGES) - 2  # the settings of both are the same, and maybe some metadata
    assert ranks.run(2, _load, tmp_path, SETTINGS)[0][:2] == ("step-00000007", [7.0] * 5)
    shutil.rmtree(newest)
    newest.write_text("a file")
    assert all(f"{newest} is damaged (" in failure.message for failure in ranks.try_run(2, _load, tmp_path, SETTINGS))
    newest.unlink()
    assert ranks.run(2, _load, tmp_path, SETTINGS)[0][:2] == ("step-00000003", [3.0] * 5)


def _save_where_something_is(rank: int, world_size: int, folder: Path, stage: str) -> None:
    checkpoints = Checkpoints(folder, keep=2, settings=SETTINGS)
    checkpoints.save(1, _state(1))
    checkpoints.finish()
    new = folder / "step-00000002"
    if rank == 0 and stage == "writing":
        checkpoints._partial(new).write_text("in the way")
    elif rank == 0:
        new.mkdir()
        (new / "file").write_text("in the way")
    dist.barrier()
    checkpoints.save(2, _state(2))  # fails in the background
    checkpoints.finish()


@pytest.mark.parametrize("stage", ["writing", "completing"])
def test_a_checkpoint_that_cannot_be_written_is_an_error_on_all_ranks_and_the_one_before_stays(
    ranks: RankPool, tmp_path: Path, stage: str
) -> None:
    for failure in ranks.try_run(2, _save_where_something_is, tmp_path, stage):
        assert failure.type_name in (DataError.__name__, RankError.__name__)
        assert "step-00000002 could not be written" in failure.message
        assert "\n" not in failure.message
    shutil.rmtree(tmp_path / "step-00000002", ignore_errors=True)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000001"]


def _map_of(num_embeddings: int, world_size: int, mode: Any) -> dict[str, KeyMap]:
    return {"item_id": KeyMap(num_embeddings=num_embeddings, world_size=world_size, mode=mode)}


def _save_routed(rank: int, world_size: int, folder: Path, key_maps: dict[str, KeyMap]) -> None:
    checkpoints = Checkpoints(folder, keep=2, settings=SETTINGS, key_maps=key_maps)
    checkpoints.save(1, _state(1))
    checkpoints.finish()


def _load_routed(rank: int, world_size: int, folder: Path, key_maps: dict[str, KeyMap]) -> int:
    checkpoints = Checkpoints(folder, keep=2, settings=SETTINGS, key_maps=key_maps)
    newest = checkpoints.newest()
    assert newest is not None
    state = _state(0)
    checkpoints.load(newest, state)
    return int(state["step"])


def test_a_checkpoint_loads_where_keys_are_mapped_as_they_were_and_nowhere_else(
    ranks: RankPool, tmp_path: Path
) -> None:
    hashed, in_turn = _map_of(50, 2, "hash_roundrobin"), _map_of(50, 2, "roundrobin")
    ranks.run(2, _save_routed, tmp_path / "hashed", hashed)
    ranks.run(2, _save_routed, tmp_path / "in turn", in_turn)
    assert ranks.run(2, _load_routed, tmp_path / "hashed", _map_of(50, 7, "hash_roundrobin")) == [1, 1]
    assert ranks.run(2, _load_routed, tmp_path / "in turn", in_turn) == [1, 1]
    for folder, key_maps, shown in (
        ("hashed", in_turn, "this job uses roundrobin (num_embeddings 50, world_size 2)"),
        ("hashed", {}, "this job uses continuous;"),
        ("hashed", _map_of(51, 2, "hash_roundrobin"), "this job uses hash_roundrobin (num_embeddings 51"),
        ("in turn", _map_of(50, 3, "roundrobin"), "(num_embeddings 50, world_size 2), but this job uses roundrobin ("),
    ):
        for failure in ranks.try_run(2, _load_routed, tmp_path / folder, key_maps):
            assert failure.type_name == StateError.__name__
            assert shown in failure.message
            assert "scripts/remap.py" in failure.message
