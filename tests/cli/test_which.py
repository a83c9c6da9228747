"""`evenrank which`: it prints the samples of the batches that loaders yield, their lengths and costs, and the loads."""

import contextlib
import inspect
import io
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.cli.options import STRATEGIES, hstu_cost
from evenrank.cli.which import which_command
from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, MeasuredCost, StepMetrics
from evenrank.dataloader.state.resume_point import _FORMAT
from evenrank.datasets import open_store
from tests.cli.programs import EVENRANK, Finished, run_program
from tests.dataloader.batch_helpers import ids_of
from tests.dataloader.resuming import with_changes

BASE = ("--step", 0, "--rank", 0, "--world-size", 2, "--batch-size", 4)


def _rows(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if line.strip()[:1].isdigit()]


def _ids(output: str) -> list[int]:
    rows = _rows(output)
    assert [int(row[0]) for row in rows] == list(range(len(rows)))
    return [int(row[1]) for row in rows]


def _which(path: Path, **options: Any) -> str:
    app = typer.Typer()
    app.command()(which_command)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        which_command(typer.Context(typer.main.get_command(app)), path, **options)
    return output.getvalue()


def _batches(
    path: Path, rank: int, options: dict[str, Any], balancing: dict[str, Any], epoch: int, stop: int
) -> tuple[list[SequenceBatch], list[SequenceBatch], int]:
    """Return the first batches of a rank from an epoch on, some after a resume, and the position of the resume.

    Of a resume within a window, to which the position does not suffice, there are none.
    """
    world_size = options["world_size"]
    config = LoaderConfig(**{name: value for name, value in options.items() if name != "world_size"})
    cost = hstu_cost(hidden=1024, heads=4, layers=8)
    balance = None if balancing["strategy"] == "none" else BalanceConfig(cost=cost, **balancing)
    loader = build_loader(path, config, rank=rank, world_size=world_size, balance=balance)
    loader.load_state_dict(with_changes(_FORMAT, loader.state_dict(), epoch=epoch))
    before = list(itertools.islice(loader, stop))
    state = loader.state_dict()
    loader.load_state_dict(state)
    is_same_epoch = loader.epoch == state["epoch"]
    return (
        before,
        list(itertools.islice(loader, 0 if state["pending"] else 3)),
        state["position"] if is_same_epoch else 0,
    )


@settings(max_examples=40)
@given(
    world_size=st.integers(1, 5),
    batch_size=st.integers(1, 9),
    epoch=st.integers(0, 3),
    stop=st.integers(1, 12),
    balancing=st.one_of(
        st.fixed_dictionaries({"strategy": st.sampled_from(STRATEGIES)}),
        st.fixed_dictionaries({"strategy": st.just("lpt-swap"), "window": st.integers(2, 4)}),
    ),
    order=st.sampled_from(["shuffle", "rows", "time"]),
    drop_last=st.booleans(),
    seed=st.integers(0, 3),
    candidates=st.integers(0, 2),
)
def test_the_samples_are_those_of_the_loaders_batches_also_after_a_resume(
    small_dataset: Path,
    world_size: int,
    batch_size: int,
    epoch: int,
    stop: int,
    balancing: dict[str, Any],
    order: str,
    drop_last: bool,
    seed: int,
    candidates: int,
) -> None:
    options = {
        "world_size": world_size,
        "batch_size": batch_size,
        "order": order,
        "drop_last": drop_last,
        "seed": seed,
        "max_num_candidates": candidates,
    }
    for rank in range(world_size):
        before, after, position = _batches(small_dataset, rank, options, balancing, epoch, stop)
        for batch, start in [*((batch, 0) for batch in before[-2:]), *((batch, position) for batch in after)]:
            output = _which(
                small_dataset,
                step=batch.step,
                rank=rank,
                epoch=batch.epoch,
                position=start,
                **balancing,
                **options,
            )
            assert _ids(output) == ids_of(batch)


def test_the_values_of_a_sample_are_those_of_its_batch(small_dataset: Path, evenrank: Callable[..., Finished]) -> None:
    metrics: list[StepMetrics] = []
    cost = hstu_cost(hidden=64, heads=2, layers=1)
    balance = BalanceConfig(cost=cost, strategy="min-move", tolerance=0.2, on_step=metrics.append)
    config = LoaderConfig(batch_size=8, split="train", max_history_length=20, max_num_candidates=2)
    batch = next(iter(build_loader(small_dataset, config, rank=1, world_size=3, balance=balance)))
    arguments = ["--step", 0, "--rank", 1, "--world-size", 3, "--batch-size", 8, "--max-history-length", 20]
    arguments += ["--max-num-candidates", 2, "--strategy", "min-move", "--tolerance", 0.2]
    run = evenrank("which", small_dataset, *arguments, "--hidden", 64, "--heads", 2, "--layers", 1)
    assert (run.returncode, run.stderr) == (0, "")
    lengths = {key: batch.features[key].lengths().numpy() for key in batch.features.keys()}  # noqa: SIM118
    candidates = batch.num_candidates.numpy()
    tokens, costs = cost.tokens(lengths), cost(lengths, candidates)
    users = open_store(small_dataset).rows["user_id"][ids_of(batch)]
    columns = (range(8), ids_of(batch), users, lengths["item_id"] - candidates, candidates, tokens)
    rows = _rows(run.stdout)
    assert [row[:6] for row in rows] == [[f"{int(value)}" for value in row] for row in zip(*columns, strict=True)]
    assert [float(row[6].replace(",", "")) for row in rows] == pytest.approx(costs.tolist(), rel=1e-3)
    heaviest = int(np.argmax(metrics[0].after))
    assert f"\nrank 1: 8 samples, {tokens.sum():,} tokens, load {int(costs.sum()):.3e}\n" in run.stdout
    assert run.stdout.endswith(
        f"\nall ranks: 24 samples, {metrics[0].tokens:,} tokens\n"
        f"heaviest load: {int(metrics[0].after.max()):.3e} (rank {heaviest}), lower bound "
        f"{metrics[0].lower_bound:.3e}\n"
    )


def test_a_measured_cost_may_count_user_ids_and_contextual_features(
    small_dataset: Path, tmp_path: Path, evenrank: Callable[..., Finished]
) -> None:
    cost = MeasuredCost(
        linear=1,
        quadratic=0,
        fraction_bits=0,
        seconds_per_step=0.0,
        steps=20,
        r2=1.0,
        max_tokens=1000,
        interleave_actions=False,
        contextual=("user_id", "segment"),
    )
    cost.save(tmp_path / "cost.json")
    run = evenrank("which", small_dataset, *BASE, "--cost", tmp_path / "cost.json")
    assert (run.returncode, run.stderr) == (0, "")
    for _, _, _, history, _, tokens, sample_cost in _rows(run.stdout):
        assert int(tokens) == int(sample_cost) == int(history) + 2


def test_a_rank_without_samples_has_an_empty_table(small_dataset: Path, evenrank: Callable[..., Finished]) -> None:
    num_samples = len(open_store(small_dataset))
    arguments = ("--step", 0, "--rank", 1, "--world-size", 2, "--batch-size", 8, "--position", num_samples - 3)
    run = evenrank("which", small_dataset, *arguments)
    assert (run.returncode, run.stderr) == (0, "")
    assert _rows(run.stdout) == []
    assert "\nrank 1: 0 samples, 0 tokens, load 0\nall ranks: 3 samples, " in run.stdout


def test_the_installed_program_prints_no_warnings_and_fits_in_80_columns(small_dataset: Path) -> None:
    arguments = [str(argument) for argument in BASE]
    options = ("--max-num-candidates", "3")  # some rows have fewer events, which rank 0 of a job is told
    run = run_program(
        EVENRANK, "which", small_dataset, *arguments, *options, environment={**os.environ, "COLUMNS": "80"}
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert max(map(len, run.stdout.split("\n", 1)[1].splitlines())) <= 80
    assert len(_rows(run.stdout)) == 4
    assert "…" not in run.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank", 2], "--rank must be below --world-size 2, got 2; ranks are numbered from 0"),
        (["--step", 9999], "there is no step 9999: an epoch of "),
        (["--step", -1], "there is no step -1: an epoch of "),
        (["--position", -1], "--position must be between 0 and "),
        (["--position", 10**6], "--position must be between 0 and "),
        (["--order", "random"], "order must be one of shuffle, rows, time, got 'random'"),
        (["--strategy", "best"], "no strategy is called 'best'; known are none, "),
        (["--strategy", "lpt-swap", "--tolerance", 2], "tolerance must be at least 0 and below 1, got 2.0"),
        (["--hidden", 10, "--heads", 3], "--hidden must be a multiple of --heads, got --hidden 10 and --heads 3"),
        (["--window", 1], "--window applies to jobs that balance, not to --strategy none; change one of them"),
        (["--tolerance", 0.001], "--tolerance applies to --strategy lpt-swap and min-move, not to --strategy none"),
        (["--seed", 0, "--order", "time"], "--seed applies to --order shuffle, not to --order time; change one of"),
        (["--heads", 4, "--cost", "c.json"], "--heads applies to the cost of an HSTU model, not to --cost c.json"),
        (["--cost", "none.json"], "none.json cannot be read as a measured cost"),
        (["--world-size", 10**9], "1,000,000,000 ranks with --batch-size 4 are more than 67,108,864 samples per step"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    small_dataset: Path, evenrank: Callable[..., Finished], arguments: list[object], message: str
) -> None:
    run = evenrank("which", small_dataset, *BASE, *arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"error: {message}")
    assert run.stderr.count("\n") == 1


def test_a_split_without_samples_is_an_error_with_the_reason(
    small_dataset: Path, evenrank: Callable[..., Finished]
) -> None:
    run = evenrank("which", small_dataset, *BASE, "--max-num-candidates", 1000)
    assert (run.returncode, run.stdout) == (2, "")
    num_rows = len(open_store(small_dataset))
    assert run.stderr == (
        f"error: {small_dataset}/train has no samples, because {num_rows} rows have fewer events than 1000 candidates; "
        "change --split or --max-num-candidates\n"
    )


def test_the_defaults_are_those_of_a_job() -> None:
    defaults = {name: option.default for name, option in inspect.signature(which_command).parameters.items()}
    config = LoaderConfig(batch_size=1)
    for name in ("seed", "split", "max_history_length", "max_num_candidates", "order", "drop_last"):
        assert defaults[name] == getattr(config, name)
    assert defaults["tolerance"] == BalanceConfig(cost=hstu_cost(hidden=8, heads=1, layers=1)).tolerance
