import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evenrank.core.errors import DataError, RankError, StateError
from tests.examples.trainer.jobs import check_failures
from tests.ranks import RankPool
from trainer.checkpoints import Checkpoints, complete_checkpoints

SETTINGS = {"model": "hstu", "hidden": 8}


def _state(value: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((5,), value)}, "loader": {"epoch": int(value)}, "step": int(value)}


def _save(rank: int, world_size: int, folder: Path, *steps: int) -> list[str]:
    checkpoints = Checkpoints(folder, keep=2, settings=SETTINGS)
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


def test_the_last_checkpoints_are_kept_and_load_on_other_numbers_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks.run(2, _save, tmp_path, 1, 2, 30, 30, 200)
    assert saved == [["step-00000030", "step-00000200"]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == saved[0]  # nothing else is left
    shutil.copytree(tmp_path / "step-00000200", tmp_path / "step-00000201.partial")  # of a job that was killed
    expected = ("step-00000200", [200.0] * 5, {"epoch": 200}, 200)
    assert ranks.run(1, _load, tmp_path, SETTINGS) == [expected]
    assert ranks.run(3, _load, tmp_path, SETTINGS) == [expected] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == saved[0]
    assert ranks.run(2, _load, tmp_path / "new", SETTINGS) == [None, None]


def test_an_intact_checkpoint_that_does_not_fit_is_an_error_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _save, tmp_path, 7)
    other_job = {**SETTINGS, "hidden": 16}
    message = "was saved with hidden = 8, this job has 16; choose another --out"
    check_failures(ranks.try_run(2, _load, tmp_path, other_job), message)
    message = "step-00000007 is as it was saved, but cannot be loaded (rank 0: "
    check_failures(ranks.try_run(2, _load, tmp_path, SETTINGS, "other"), message)
    (tmp_path / "step-00000007").rename(tmp_path / "step-00000009")
    message = f"{tmp_path / 'step-00000009'} has the state of step 7; rename it to step-00000007"
    check_failures(ranks.try_run(2, _load, tmp_path, SETTINGS), message)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _replace_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES: list[Callable[[Path], object]] = [
    Path.unlink,
    _replace_by_pipe,
    lambda file: os.truncate(file, file.stat().st_size // 2),
    lambda file: shutil.copy(file.parents[1] / "step-00000003" / file.name, file),  # that of the one before
]


def test_damage_to_any_file_is_an_error_on_all_ranks_before_anything_is_loaded(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _save, tmp_path, 3, 7)
    newest = tmp_path / "step-00000007"
    files = sorted(file.name for file in newest.iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json", "settings.json"]
    shutil.copytree(newest, tmp_path / "intact")
    remedy = "); restore it, or delete it to resume from the one before"
    for name, damage in [*((name, _flip) for name in files), *(("__0_0.distcp", damage) for damage in DAMAGES)]:
        damage(newest / name)
        failures = ranks.try_run(2, _load, tmp_path, SETTINGS)
        check_failures(failures, f"{newest} is damaged (", remedy, kinds=[StateError, RankError])
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "intact", newest)
    shutil.rmtree(newest)
    assert ranks.run(2, _load, tmp_path, SETTINGS)[0][:2] == ("step-00000003", [3.0] * 5)


def _save_where_something_is(rank: int, world_size: int, folder: Path, stage: str) -> None:
    _save(rank, world_size, folder, 1)
    checkpoints = Checkpoints(folder, keep=2, settings=SETTINGS)
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
def test_a_failed_write_is_an_error_that_leaves_the_one_before(ranks: RankPool, tmp_path: Path, stage: str) -> None:
    failures = ranks.try_run(2, _save_where_something_is, tmp_path, stage)
    check_failures(failures, "step-00000002 could not be written", kinds=[DataError, RankError])
    shutil.rmtree(tmp_path / "step-00000002", ignore_errors=True)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000001"]
