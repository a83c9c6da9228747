"""Checkpoints are complete or not there, and load on any number of ranks."""

import os
import shutil
from collections.abc import Callable
from functools import partial
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


def _load(rank: int, world_size: int, folder: Path, settings: dict[str, Any], weights: str = "weight") -> Any:
    checkpoints = Checkpoints(folder, keep=2, settings=settings)
    newest = checkpoints.newest()
    if newest is None:
        return None
    state = {**_state(0), "model": {weights: torch.zeros(5)}}
    checkpoints.load(newest, state)
    return newest.name, state["model"][weights].tolist(), state["loader"], state["step"]


def test_the_last_checkpoints_are_kept_and_the_newest_loads_on_other_numbers_of_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    saved = ranks.run(2, _save, tmp_path, 2, [1, 2, 30, 30, 200])
    assert saved == [["step-00000030", "step-00000200"]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == saved[0]  # nothing else is left
    shutil.copytree(tmp_path / "step-00000200", tmp_path / "step-00000201.partial")  # of a job that was killed
    expected = ("step-00000200", [200.0] * 5, {"epoch": 200}, 200)
    assert ranks.run(1, _load, tmp_path, SETTINGS) == [expected]
    assert ranks.run(3, _load, tmp_path, SETTINGS) == [expected] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == saved[0]
    assert ranks.run(2, _load, tmp_path / "new", SETTINGS) == [None, None]


def test_an_intact_checkpoint_that_does_not_fit_is_an_error_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _save, tmp_path, 2, [7])
    other_job = "was saved with hidden = 8, this job has 16; choose another --out"
    other_weights = "step-00000007 is as it was saved, but cannot be loaded (rank 0: "
    for arguments, message in (
        ((tmp_path, {**SETTINGS, "hidden": 16}), other_job),
        ((tmp_path, SETTINGS, "other"), other_weights),
    ):
        for failure in ranks.try_run(2, _load, *arguments):
            assert failure.type_name == StateError.__name__
            assert message in failure.message
            assert "\n" not in failure.message
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


def _delete(file: Path) -> None:
    file.unlink()


DAMAGES: list[Callable[[Path], None]] = [_truncate, _delete, _replace_by_folder, _replace_by_pipe, _swap]
FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json", "settings.json"]


def test_damage_to_any_file_is_an_error_on_all_ranks_before_anything_is_loaded(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _save, tmp_path, 2, [3, 7])
    newest = tmp_path / "step-00000007"
    assert sorted(file.name for file in newest.iterdir()) == FILES
    shutil.copytree(newest, tmp_path / "intact")
    cases = [*((name, _flip) for name in FILES), *(("__0_0.distcp", damage) for damage in DAMAGES)]
    for name, damage in cases:
        damage(newest / name)
        for failure in ranks.try_run(2, _load, tmp_path, SETTINGS):
            assert f"{newest} is damaged (" in failure.message
            assert failure.message.endswith("); restore it, or delete it to resume from the one before")
            assert "\n" not in failure.message
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "intact", newest)
    assert ranks.run(2, _load, tmp_path, SETTINGS)[0][:2] == ("step-00000007", [7.0] * 5)
    shutil.rmtree(newest)
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


def _routed(rank: int, world_size: int, folder: Path, mode: str, size: int, key_ranks: int, *, saves: bool) -> None:
    key_maps = {} if mode == "continuous" else {"item_id": KeyMap(num_embeddings=size, world_size=key_ranks, mode=mode)}  # type: ignore[arg-type]
    checkpoints = Checkpoints(folder, keep=2, settings=SETTINGS, key_maps=key_maps)
    if saves:
        checkpoints.save(1, _state(1))
        checkpoints.finish()
    else:
        checkpoints.load(folder / "step-00000001", _state(0))


def test_a_checkpoint_loads_where_keys_are_mapped_as_they_were_and_nowhere_else(
    ranks: RankPool, tmp_path: Path
) -> None:
    hashed, in_turn = tmp_path / "hashed", tmp_path / "in turn"
    for folder, mode in ((hashed, "hash_roundrobin"), (in_turn, "roundrobin")):
        ranks.run(2, partial(_routed, saves=True), folder, mode, 50, 2)
    load = partial(_routed, saves=False)
    ranks.run(2, load, hashed, "hash_roundrobin", 50, 7)
    ranks.run(2, load, in_turn, "roundrobin", 50, 2)
    for folder, mode, size, key_ranks, shown in (
        (hashed, "roundrobin", 50, 2, "this job uses roundrobin (num_embeddings 50, world_size 2)"),
        (hashed, "continuous", 0, 0, "this job uses continuous;"),
        (hashed, "hash_roundrobin", 51, 2, "this job uses hash_roundrobin (num_embeddings 51"),
        (in_turn, "roundrobin", 50, 3, "(num_embeddings 50, world_size 2), but this job uses roundrobin ("),
    ):
        for failure in ranks.try_run(2, load, folder, mode, size, key_ranks):
            assert failure.type_name == StateError.__name__
            assert shown in failure.message
            assert "scripts/remap.py" in failure.message
