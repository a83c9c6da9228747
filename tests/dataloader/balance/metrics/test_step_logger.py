"""Lines for people, in the log of rank 0."""

import io
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, StepMetrics
from evenrank.dataloader.balance.metrics.writers import StepLogger, log_line
from tests.dataloader.balance.costs import one_per_sample
from tests.dataloader.balance.metrics.example_steps import step
from tests.dataloader.rich_batch import RichBatch, rich_batch
from tests.ranks import RankPool

LOADS: dict[str, Any] = {"before": (2_500_000_000, 1_250_000_000), "after": (1_874_000_000, 1_876_000_000)}
MEASURED: dict[str, Any] = {"plan_seconds": 0.00123, "exchange_seconds": 0.0344, "lower_bound": 1_875_000_000}
STEP = replace(step(100, epoch=1, **LOADS), tokens=98_765, moved_tokens=12_345, **MEASURED)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """Return the logger of the package, which is left as it was."""
    log = logging.getLogger("evenrank")
    level, handlers = log.level, list(log.handlers)
    log.setLevel(logging.NOTSET)
    yield log
    log.setLevel(level)
    log.handlers[:] = handlers


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "evenrank"]


def test_the_text_of_a_line() -> None:
    start = "epoch 1 step 100: idle 25.0% -> 0.1%, speed-up 1.33x, 1.333 -> 1.001 x lower bound, "
    end = "moved 12,345 of 98,765 tokens, plan 1.2 ms, exchange 34.4 ms"
    assert log_line(STEP) == start + end
    assert log_line(STEP, with_loads=True) == f"{start}{end}; loads 2.5e+09 1.25e+09 -> 1.874e+09 1.876e+09"
    assert log_line(replace(STEP, is_balanced=False)) == f"{start}{end} (left unbalanced)"
    zero = replace(STEP, before=np.array([0, 0]), after=np.array([0, 0]), lower_bound=0)
    assert "idle 0.0% -> 0.0%, speed-up 1.00x, 1.000 -> 1.000 x lower bound, moved" in log_line(zero)


@pytest.mark.parametrize(
    ("every", "window", "logged"),
    [(1, None, range(10)), (4, None, [0, 4, 8]), (1, (3, 6), [3, 4, 5]), (3, (3, 9), [3, 6]), (2, (5, 6), [])],
)
@pytest.mark.usefixtures("logger")
def test_steps_of_a_window_are_logged(every: int, window: Any, logged: list[int], caplog: Any) -> None:
    log_step = StepLogger(every=every, window=window)
    for number in range(10):  # two epochs of five steps
        log_step(replace(STEP, epoch=number // 5, step=number % 5))
    steps = [f"epoch {number // 5} step {number % 5}:" for number in logged]
    assert [message.split(" idle")[0] for message in _lines(caplog)] == steps
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_a_line_is_seen_without_configuration_and_where_the_root_shows_warnings(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, logger: logging.Logger
) -> None:
    written, root = io.StringIO(), logging.getLogger()
    monkeypatch.setattr(root, "level", logging.WARNING)
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(written)])
    StepLogger(every=1)(STEP)
    assert (written.getvalue(), logger.handlers) == (f"{log_line(STEP)}\n", [])
    monkeypatch.setattr(root, "handlers", [])
    for _ in range(2):
        StepLogger(every=1)(STEP)
    line = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} evenrank: " + re.escape(log_line(STEP)) + "\n"
    assert re.fullmatch(2 * line, capsys.readouterr().err)
    assert (len(logger.handlers), root.handlers, root.level) == (1, [], logging.WARNING)


def _batches(rank: int = 0) -> list[RichBatch]:
    samples = [[(3, 0), (0, 1)], [(rank, 0), (0, 1)]]
    return [replace(rich_batch(samples, first_id=10 * rank), step=step) for step in range(4)]


@pytest.mark.parametrize("balances_alone", [False, True])
@pytest.mark.usefixtures("logger")
def test_lines_have_the_metrics(caplog: pytest.LogCaptureFixture, small_dataset: Path, balances_alone: bool) -> None:
    seen: list[StepMetrics] = []
    balance = BalanceConfig(cost=one_per_sample, on_step=seen.append, log_every=2, log_window=(0, 7), log_loads=True)
    if balances_alone:
        for rank in (1, 0):  # of which the first one logs
            seen.clear()
            list(build_loader(small_dataset, LoaderConfig(batch_size=4), rank=rank, world_size=2, balance=balance))
    else:
        with Balancer(_batches(), balance) as balancer:
            assert [len(list(balancer)) for _ in range(2)] == [4, 4]
        assert len(seen) == 8
    assert _lines(caplog) == [log_line(seen[number], with_loads=True) for number in (0, 2, 4, 6)]


def _logged(rank: int, world_size: int) -> list[str]:
    group = dist.new_group([1, 2])
    if rank == 0:
        return []
    assert isinstance(group, dist.ProcessGroup)
    written, log = io.StringIO(), logging.getLogger("evenrank")
    log.handlers = [logging.StreamHandler(written)]
    config = BalanceConfig(cost=one_per_sample, log_every=rank, log_window=(1, 3))
    try:
        with Balancer(_batches(rank), config, group=group) as balancer:
            assert len(list(balancer)) == 4
    finally:
        log.handlers = []
        log.setLevel(logging.NOTSET)
    return [line.split(": idle")[0] for line in written.getvalue().splitlines()]


def test_only_the_first_rank_of_the_group_logs(ranks: RankPool) -> None:
    assert ranks.run(3, _logged) == [[], ["epoch 0 step 1", "epoch 0 step 2"], []]
