"""Jobs that divide heads among ranks train what others do, and continue one another's checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from evenrank.core.errors import ConfigError
from tests.examples.trainer.jobs import SHARDED, Trained, log_lines, run, settings, together
from tests.ranks import RankPool
from trainer.loop import Training

# With two ranks for its heads, each has 3 columns of a layer, which two data-parallel ranks cannot halve.
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
        options = {**JOB, "batch_size": 24 // dp, "tensor_parallel": tp, **options}
        parts = ranks.run(dp * tp, run, settings(tmp_path / out, small_dataset, **options), crash_at)
        return together(_data_parallel(parts, tp))

    return _train


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["replicated tables", "sharded tables"])
def test_a_job_resumes_on_other_meshes_with_the_samples_losses_logs_and_auc_of_one_rank(
    train: Callable[..., Any], tmp_path: Path, options: dict[str, Any]
) -> None:
    samples, losses = train("whole", 1, 1, **options)
    parts = [
        train("parts", 1, 2, crash_at=3, checkpoint_every=2, **options),
        train("parts", 2, 1, max_steps=4, **options),
        train("parts", 2, 2, max_steps=6, **options),
        train("parts", 1, 1, **options),
    ]
    assert [(min(part), max(part)) for part, _ in parts] == [(1, 3), (3, 4), (5, 6), (7, len(samples))]
    for part_samples, part_losses in parts:
        assert part_samples == {step: samples[step] for step in part_samples}
        assert part_losses == pytest.approx({step: losses[step] for step in part_losses}, rel=1e-5)
    whole, divided = (
        {line["step"]: (line["tokens"], line["loss"]) for line in log_lines(tmp_path / out, "train")}
        for out in ("whole", "parts")
    )
    assert divided.keys() == whole.keys()
    assert all(divided[step] == pytest.approx(whole[step], rel=1e-5) for step in whole)
    assert log_lines(tmp_path / "parts", "eval")[-1] == pytest.approx(
        log_lines(tmp_path / "whole", "eval")[0], abs=1e-3
    )


def _trained_values(
    rank: int, world_size: int, options: dict[str, Any]
) -> tuple[Trained, dict[str, Tensor], dict[str, tuple[int, Tensor]]]:
    """Run a job; also return all parameters but sharded tables, whole, and of these the first row and the rows."""
    jobs: list[Training] = []
    run_to_the_end = Training.run

    def note(training: Training) -> Any:
        jobs.append(training)
        return run_to_the_end(training)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "run", note)
        trained = run(rank, world_size, options)
    whole, rows = {}, {}
    for name, value in jobs[0].parallel.state_dict()["model"].items():
        if isinstance(value, ShardedTensor):
            (part,) = value.local_shards()
            rows[name] = part.metadata.shard_offsets[0], part.tensor.clone()
        else:
            whole[name] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return trained, whole, rows


def test_with_sharded_tables_losses_and_parameters_are_those_of_one_rank_and_peers_have_equal_rows(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    def train(dp: int, tp: int) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
        options = {**JOB, **SHARDED, "max_steps": 6, "batch_size": 24 // dp, "tensor_parallel": tp}
        results = ranks.run(dp * tp, _trained_values, settings(tmp_path / f"{dp}x{tp}", small_dataset, **options))
        for first in range(0, len(results), tp):
            for _, whole, rows in results[first : first + tp]:
                torch.testing.assert_close(rows, results[first][2], rtol=0, atol=0)
                torch.testing.assert_close(whole, results[0][1], rtol=1e-6, atol=1e-7)
        groups = results[::tp]
        tables = {}
        for name in groups[0][2]:
            starts, parts = zip(*(rows[name] for _, _, rows in groups), strict=True)
            assert starts == tuple(sum(len(part) for part in parts[:i]) for i in range(dp))
            tables[name] = torch.cat(parts)
        return together(_data_parallel([trained for trained, _, _ in results], tp)), groups[0][1], tables

    (samples, losses), parameters, tables = train(1, 1)
    assert [name.split(".")[-2] for name in tables] == ["item_id"]
    (divided_samples, divided_losses), divided_parameters, divided_tables = train(2, 2)
    assert divided_samples == samples
    assert divided_losses == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(divided_parameters, parameters, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(divided_tables, tables, rtol=1e-3, atol=1e-5)


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


def test_peers_have_equal_losses_and_drop_other_units_of_their_heads(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    options = settings(tmp_path, small_dataset, **{**JOB, "tensor_parallel": 2, "dropout": 0.3, "max_steps": 2})
    results = ranks.run(4, _note_dropped, options)
    _data_parallel([trained for trained, _ in results], 2)
    for (_, kept), (_, kept_by_peer) in (results[:2], results[2:]):
        assert len(kept) == 2 * JOB["layers"]
        for mine, others in zip(kept, kept_by_peer, strict=True):
            assert mine.shape == others.shape
            assert float((mine == others).double().mean()) == pytest.approx(0.7**2 + 0.3**2, abs=0.05)


def test_ranks_that_cannot_be_grouped_are_an_error_on_all_of_them(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    for failure in ranks.try_run(3, run, settings(tmp_path, small_dataset, tensor_parallel=2)):
        assert failure.type_name == ConfigError.__name__
        assert failure.message == (
            "tensor_parallel = 2 cannot divide 3 ranks into equal groups; start a multiple of it, or choose a divisor"
        )
