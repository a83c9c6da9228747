"""A job that is interrupted again and again learns what it would have learnt without, to the last bit."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tests.examples.trainer.interrupted import TIMEOUT, Interruption, draw_round, run_rank
from trainer.checkpoints import complete_checkpoints

_ROUNDS = 20
_LIMIT = TIMEOUT.total_seconds() + 40


def _lines(out: Path) -> list[dict[str, Any]]:
    path = out / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@contextlib.contextmanager
def _started(folder: Path, ranks: int, options: dict[str, Any]) -> Iterator[list[BaseProcess]]:
    """Start the ranks of a job; kill those that are left at the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.examples.trainer.interrupted"])
    store = folder / "store"
    store.unlink(missing_ok=True)  # each run begins with a store of its own
    processes: list[BaseProcess] = [
        context.Process(target=run_rank, args=(rank, ranks, options, store)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _wait(condition: Callable[[], bool], processes: list[BaseProcess]) -> None:
    """Wait until a condition holds, or a rank has ended."""
    deadline = time.monotonic() + _LIMIT
    while not condition() and all(process.is_alive() for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _run_to_the_end(folder: Path, ranks: int, options: dict[str, Any]) -> None:
    with _started(folder, ranks, options) as processes:
        for process in processes:
            process.join(_LIMIT)
        assert [process.exitcode for process in processes] == [0] * ranks


def _run_interrupted(folder: Path, ranks: int, options: dict[str, Any], how: Interruption) -> None:
    """Run a job until it is interrupted, or ends before; all of its ranks have ended then."""
    out = Path(options["out"])
    enough = len(_lines(out)) + how.after_lines
    with _started(folder, ranks, options) as processes:
        # SIGTERM ends a rank that has not noted signals yet: only after a line of this run do all of them.
        _wait(lambda: len(_lines(out)) >= enough + (not how.kills), processes)
        time.sleep(how.delay)
        chosen = processes if how.rank < 0 else [processes[how.rank]]
        for process in chosen:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.kill(process.pid, signal.SIGKILL if how.kills else signal.SIGTERM)
        for process in processes:
            process.join(_LIMIT)
        codes = [process.exitcode for process in processes]
    assert None not in codes, "ranks hang"
    if how.kills:  # the others have noticed, unless they needed nothing more of it
        assert set(codes) <= {0, 1, -signal.SIGKILL}, codes
    else:
        assert set(codes) in ({0}, {128 + signal.SIGTERM}), codes


def _saved(out: Path) -> dict[str, Any]:
    """Return all entries of the last checkpoint by name."""
    folder = complete_checkpoints(out / "checkpoints")[-1]
    reader = FileSystemReader(folder)
    entries: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in reader.read_metadata().state_dict_metadata.items()
    }
    with warnings.catch_warnings(action="ignore"):
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        load(entries, storage_reader=reader, planner=planner, no_dist=True)
    return entries


def _play(folder: Path, data: Path, seed: int, number: int) -> None:
    """Run a job without and with its interruptions; compare what they logged and saved."""
    plan = draw_round(seed, number)
    whole, parts = ({**plan.options, "data": str(data), "out": str(folder / name)} for name in ("whole", "parts"))
    _run_to_the_end(folder, plan.ranks, whole)
    expected = {(line["kind"], line["step"]): line for line in _lines(folder / "whole")}
    for how in plan.interruptions:
        _run_interrupted(folder, plan.ranks, parts, how)
    _run_to_the_end(folder, plan.ranks, parts)
    seen = set()
    for line in _lines(folder / "parts"):
        key = line["kind"], line["step"]
        seen.add(key)
        values = expected[key].keys() - {"kind", "step"} if line["kind"] == "eval" else {"loss", "tokens"}
        assert {name: line[name] for name in values} == {name: expected[key][name] for name in values}, key
    assert seen == expected.keys()
    saved, intact = _saved(folder / "parts"), _saved(folder / "whole")
    assert saved.keys() == intact.keys()
    for name, value in intact.items():
        is_equal = torch.equal(saved[name], value) if isinstance(value, torch.Tensor) else saved[name] == value
        assert is_equal, name


@pytest.mark.long
@pytest.mark.parametrize("number", range(_ROUNDS))
def test_an_interrupted_job_logs_and_saves_what_an_uninterrupted_one_does_to_the_last_bit(
    small_dataset: Path, tmp_path: Path, pytestconfig: pytest.Config, number: int
) -> None:
    seed = pytestconfig.getoption("soak_seed")
    try:
        _play(tmp_path, small_dataset, seed, number)
    except BaseException as error:
        error.add_note(f"round {number} of seed {seed}: {draw_round(seed, number)}; its logs are in {tmp_path}")
        raise
    shutil.rmtree(tmp_path)
