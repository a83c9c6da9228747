from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenrank.core.errors import ConfigError
from tests.examples.trainer.jobs import SHARDED, Trained, check_failures, log_lines, run, settings, together
from tests.ranks import RankPool

JOB: dict[str, Any] = {"hidden": 6, "heads": 2, "layers": 2, "learning_rate": 0.01, "warmup_steps": 4, "log_every": 1}


def _data_parallel(parts: list[Trained], tensor_parallel: int) -> list[Trained]:
    """Return what one rank of each tensor-parallel group trained, which is what all of them did."""
    for first in range(0, len(parts), tensor_parallel):
        for peer in parts[first : first + tensor_parallel]:
            assert peer.samples == parts[first].samples
            assert peer.losses == pytest.approx(parts[first].losses, rel=1e-6)
    return parts[::tensor_parallel]


@pytest.fixture
def train(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that trains on dp x tp ranks: samples and losses of all steps."""

    def _train(out: str, dp: int, tp: int, *, crash_at: int = 0, **options: Any) -> Any:
        options = {**JOB, "epochs": 2, "batch_size": 24 // dp, "tensor_parallel": tp, **options}
        parts = ranks.run(dp * tp, run, settings(tmp_path / out, small_dataset, **options), crash_at)
        return together(_data_parallel(parts, tp))

    return _train


@pytest.mark.parametrize(
    "options",
    [{}, SHARDED, {"task": "retrieval"}],
    ids=["replicated tables", "sharded tables", "retrieval"],
)
def test_a_job_resumes_on_other_meshes(train: Callable[..., Any], tmp_path: Path, options: dict[str, Any]) -> None:
    samples, losses = train("whole", 1, 1, **options)
    parts = [
        train("parts", 1, 2, crash_at=3, checkpoint_every=2, **options),
        train("parts", 2, 1, max_steps=4, **options),
        train("parts", 2, 2, max_steps=12, **options),  # into the second epoch
        train("parts", 3, 1, **options),
    ]
    assert [(min(part), max(part)) for part, _ in parts] == [(1, 3), (3, 4), (5, 12), (13, len(samples))]
    for part_samples, part_losses in parts:
        assert part_samples == {step: samples[step] for step in part_samples}
        assert part_losses == pytest.approx({step: losses[step] for step in part_losses}, rel=1e-4)
    assert losses[len(losses)] < losses[1]
    whole, divided = (
        {(line["step"], name): line[name] for line in log_lines(tmp_path / out, "train") for name in ("tokens", "loss")}
        for out in ("whole", "parts")
    )
    assert divided == pytest.approx(whole, rel=1e-4)
    evaluations = [log_lines(tmp_path / out, "eval")[-1] for out in ("whole", "parts")]
    assert evaluations[1] == pytest.approx(evaluations[0], abs=1e-3)


def _note_dropped(rank: int, world_size: int, options: dict[str, Any]) -> tuple[Trained, list[Tensor]]:
    """Run a job; also return which units the layers kept, at each call of a dropout."""
    kept: list[Tensor] = []
    forward = nn.Dropout.forward

    def note(dropout: nn.Dropout, values: Tensor) -> Tensor:
        if dropout.training:
            kept.append(forward(dropout, torch.ones_like(values)) > 0)
            return values * kept[-1]
        return forward(dropout, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Dropout, "forward", note)
        return run(rank, world_size, options), kept


def test_peers_drop_other_units_of_their_heads(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    options = settings(tmp_path, small_dataset, **{**JOB, "tensor_parallel": 2, "dropout": 0.3, "max_steps": 2})
    results = ranks.run(4, _note_dropped, options)
    _data_parallel([trained for trained, _ in results], 2)
    for (_, kept), (_, kept_by_peer) in (results[:2], results[2:]):
        assert len(kept) == 2 * JOB["layers"]
        for mine, others in zip(kept, kept_by_peer, strict=True):
            assert mine.shape == others.shape
            assert float((mine == others).double().mean()) == pytest.approx(0.7**2 + 0.3**2, abs=0.05)


def test_ranks_that_cannot_be_grouped_are_an_error(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    message = "tensor_parallel = 2 cannot divide 3 ranks into equal groups; start a multiple of it, or choose a divisor"
    failures = ranks.try_run(3, run, settings(tmp_path, small_dataset, tensor_parallel=2))
    check_failures(failures, message, kinds=[ConfigError])
