import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

# The fork server, which imports this module once for all ranks, knows nothing of pytest's settings.
sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))

from tests.examples.trainer.jobs import train_on_cpu
from trainer.checkpoints import complete_checkpoints
from trainer.config import TrainConfig

_ROUNDS = 20
_TIMEOUT = 200  # seconds


def draw_round(seed: int, number: int) -> tuple[int, dict[str, Any], list[tuple[bool, int, int, float]]]:
    """Return ranks and options of a job, and how it is interrupted; they depend on the arguments alone.

    An interruption is whether it is by SIGKILL, rather than by SIGTERM; its rank, or -1 for all; the lines that the run
    logs before it, and the seconds that pass then.
    """
    rng = np.random.default_rng([seed, number])

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    ranks = pick(1, 2)
    task = pick("ranking", "ranking", "retrieval", "semantic-ids")
    options: dict[str, Any] = {"hidden": 8, "heads": 2, "max_history_length": 40, "log_every": 1}
    options |= {"epochs": 2, "learning_rate": 0.01}
    options |= {"layers": pick(1, 2), "user_id": pick(False, True), "batch_size": pick(8, 12) // ranks}
    options |= {"dropout": pick(0.0, 0.2), "warmup_steps": pick(0, 5), "weight_decay": pick(0.0, 0.1)}
    options |= {"precision": pick("fp32", "fp32", "bf16"), "seed": pick(0, 7), "num_workers": pick(0, 1, 2)}
    options |= {"keep": pick(1, 2), "checkpoint_every": pick(1, 2, 5, None), "eval_every": pick(3, 7, None)}
    options |= {"balance": pick("none", "no-exchange", "all-to-all", "all-gather")}
    if task == "semantic-ids":
        options |= {"model": task, "code_levels": pick(2, 3), "codebook_size": 8, "k": 4}
    else:
        options |= {"task": task, "embedding_dim": 8, "recompute": pick(False, True)}
        if pick(False, True):
            options |= {"embeddings": "sharded", "min_sharded_rows": pick(1, 300)}
            options |= {"routing": pick("continuous", "roundrobin", "hash_roundrobin")}
    if task == "ranking":
        options |= pick({"num_tasks": 2}, {"positive_action": 1})
        if "embeddings" in options:  # TorchRec's pipelines need sharded tables
            options |= {"pipeline": pick("none", "sparse-dist")}
        if ranks == 2:
            options |= {"tensor_parallel": pick(1, 1, 2)}
    if options["balance"] != "none":
        options |= {"strategy": pick("lpt-swap", "min-move", "karmarkar-karp")}
    if options["balance"] == "no-exchange":
        options |= {"window": pick(1, 3, 4)}
    interruptions = [
        (pick(False, True), pick(-1, *range(ranks)), pick(0, 1, 2, 5, 9, 14), rng.random() * pick(0.0, 0.05, 1.0))
        for _ in range(pick(2, 3, 4))
    ]
    return ranks, options, interruptions


def _run_rank(rank: int, world_size: int, options: dict[str, Any], store: Path) -> None:
    """Run a job on this rank; the exit code is 0, 128 + a signal, or 1 after an error, which is printed."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    timeout = timedelta(seconds=_TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    try:
        stopped_by = train_on_cpu(rank, world_size, TrainConfig(**options))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # its groups may wait for ranks that are gone
    dist.destroy_process_group()
    os._exit(0 if stopped_by is None else 128 + stopped_by)


def _lines(out: Path) -> list[dict[str, Any]]:
    path = out / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@contextlib.contextmanager
def _started(ranks: int, options: dict[str, Any]) -> Iterator[list[BaseProcess]]:
    """Start the ranks of a job; wait for their ends, and kill those that are left then."""
    store = Path(options["out"]).with_suffix(".store")
    store.unlink(missing_ok=True)  # each run begins with a store of its own
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    processes: list[BaseProcess] = [
        context.Process(target=_run_rank, args=(rank, ranks, options, store)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
        for process in processes:
            process.join(_TIMEOUT + 40)
        assert None not in [process.exitcode for process in processes], "ranks hang"
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run_to_the_end(ranks: int, options: dict[str, Any]) -> None:
    with _started(ranks, options) as processes:
        pass
    assert [process.exitcode for process in processes] == [0] * ranks


def _run_interrupted(ranks: int, options: dict[str, Any], kills: bool, rank: int, lines: int, delay: float) -> None:
    """Run a job until it is interrupted, or ends before; all of its ranks have ended then."""
    out = Path(options["out"])
    enough = len(_lines(out)) + lines
    with _started(ranks, options) as processes:
        # SIGTERM ends a rank that has not noted signals yet: only after a line of this run do all of them.
        while len(_lines(out)) < enough + (not kills) and all(process.is_alive() for process in processes):
            time.sleep(0.005)
        time.sleep(delay)
        for process in processes if rank < 0 else [processes[rank]]:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.kill(process.pid, signal.SIGKILL if kills else signal.SIGTERM)
    codes = {process.exitcode for process in processes}
    if kills:  # the others have noticed, unless they needed nothing more of it
        assert codes <= {0, 1, -signal.SIGKILL}, codes
    else:
        assert codes in ({0}, {128 + signal.SIGTERM}), codes


def _saved(out: Path) -> dict[str, Any]:
    """Return all entries of the last checkpoint by name."""
    with warnings.catch_warnings(action="ignore"):
        dcp_to_torch_save(complete_checkpoints(out / "checkpoints")[-1], out / "whole.pt")
    return flatten_state_dict(torch.load(out / "whole.pt", weights_only=False))[0]


def _play(folder: Path, data: Path, seed: int, number: int) -> None:
    """Run a job without and with its interruptions; compare what they logged and saved."""
    ranks, options, interruptions = draw_round(seed, number)
    whole, parts = ({**options, "data": str(data), "out": str(folder / name)} for name in ("whole", "parts"))
    _run_to_the_end(ranks, whole)
    expected = {(line["kind"], line["step"]): line for line in _lines(folder / "whole")}
    for how in interruptions:
        _run_interrupted(ranks, parts, *how)
    _run_to_the_end(ranks, parts)
    seen = set()
    for line in _lines(folder / "parts"):
        key = line["kind"], line["step"]
        seen.add(key)
        values = expected[key].keys() if line["kind"] == "eval" else {"loss", "tokens"}
        assert {name: line[name] for name in values} == {name: expected[key][name] for name in values}, key
    assert seen == expected.keys()
    saved, intact = _saved(folder / "parts"), _saved(folder / "whole")
    assert saved.keys() == intact.keys()
    for name, value in intact.items():
        is_equal = torch.equal(saved[name], value) if isinstance(value, torch.Tensor) else saved[name] == value
        assert is_equal, name


@pytest.mark.long
@pytest.mark.parametrize("number", range(_ROUNDS))
def test_no_bit_changes(small_dataset: Path, tmp_path: Path, pytestconfig: pytest.Config, number: int) -> None:
    _play(tmp_path, small_dataset, pytestconfig.getoption("soak_seed"), number)
    shutil.rmtree(tmp_path)
