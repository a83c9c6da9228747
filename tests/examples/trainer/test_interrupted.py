import os
import shutil
import signal
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.examples.trainer.jobs import log_lines, train_on_cpu
from tests.ranks import RankPool
from trainer.checkpoints import complete_checkpoints
from trainer.config import TrainConfig

_ROUNDS = 20


def draw_round(seed: int, number: int) -> tuple[int, dict[str, Any], list[tuple[bool, int, int, float]]]:
    """Return ranks and options of a job, and how it is interrupted; they depend on the arguments alone.

    An interruption is whether SIGKILL is sent, its rank or -1 for all, and the lines and then seconds before it.
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


def _run(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    culprit: int = -2,
    lines: int = 0,
    sent: int = 0,
    delay: float = 0,
) -> int | None:
    """Run a job on this rank; a culprit, or all for -1, sends itself a signal some seconds after a line of the log."""
    warnings.simplefilter("ignore")
    ended = threading.Event()

    def interrupt() -> None:
        while not ended.wait(0.005):
            if len(log_lines(Path(options["out"]))) >= lines and not ended.wait(delay):
                os.kill(os.getpid(), sent)
                break

    if culprit in (-1, rank):
        threading.Thread(target=interrupt).start()
    try:
        return train_on_cpu(rank, world_size, TrainConfig(**options))
    except Exception:
        traceback.print_exc()
        os._exit(1)  # its groups may wait for ranks that are gone
    finally:
        ended.set()


def _saved(out: Path) -> dict[str, Any]:
    """Return all entries of the last checkpoint by name."""
    with warnings.catch_warnings(action="ignore"):
        dcp_to_torch_save(complete_checkpoints(out / "checkpoints")[-1], out / "whole.pt")
    return flatten_state_dict(torch.load(out / "whole.pt", weights_only=False))[0]


def _play(pool: RankPool, folder: Path, data: Path, seed: int, number: int) -> None:
    """Run a job without and with its interruptions; compare what they logged and saved."""
    ranks, options, interruptions = draw_round(seed, number)
    whole, parts = ({**options, "data": str(data), "out": str(folder / name)} for name in ("whole", "parts"))
    assert pool.run(ranks, _run, whole) == [None] * ranks
    expected = {(line["kind"], line["step"]): line for line in log_lines(folder / "whole")}
    for kills, culprit, lines, delay in interruptions:
        # SIGTERM ends a rank that has not noted signals yet: only after a line of this run do all of them.
        enough = len(log_lines(folder / "parts")) + lines + (not kills)
        sent = signal.SIGKILL if kills else signal.SIGTERM
        ends = pool.try_run(ranks, _run, parts, culprit, enough, sent, delay)
        assert kills or ends in ([None] * ranks, [signal.SIGTERM] * ranks), ends
    assert pool.run(ranks, _run, parts) == [None] * ranks
    seen = set()
    for line in log_lines(folder / "parts"):
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
def test_no_bit_changes(ranks: RankPool, small_dataset: Path, tmp_path: Path, pytestconfig: Any, number: int) -> None:
    _play(ranks, tmp_path, small_dataset, pytestconfig.getoption("soak_seed"), number)
    shutil.rmtree(tmp_path)
