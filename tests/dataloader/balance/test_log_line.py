"""The line for people: its text, which steps and ranks it is for, and that it is seen."""

import contextlib
import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import BalanceConfig, Balancer, StepMetrics
from evenrank.dataloader.balance.writers import StepLogger, log_line
from tests.dataloader.balance.costs import one_per_sample
from tests.dataloader.rich_batch import RichBatch, rich_batch
from tests.ranks import RankPool

STEP = StepMetrics(
    epoch=1,
    step=100,
    before=np.array([2_500_000_000, 1_250_000_000]),
    after=np.array([1_874_000_000, 1_876_000_000]),
    lower_bound=1_875_000_000,
    samples=64,
    moved_samples=12,
    tokens=98_765,
    moved_tokens=12_345,
    sample_bytes=1_000_000,
    moved_bytes=100_000,
    plan_seconds=0.00123,
    exchange_seconds=0.0344,
)


@pytest.fixture(autouse=True)
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
    assert log_line(STEP) == (
        "epoch 1 step 100: load max-min 1.2e9 -> 2.0e6 (imbalance 50.0% -> 0.1%, 1.333 -> 1.001 x lower bound), "
        "moved 12,345 of 98,765 tokens, plan 1.2 ms, exchange 34.4 ms"
    )


def test_small_loads_are_written_in_full() -> None:
    line = log_line(replace(STEP, before=np.array([0, 99_999]), after=np.array([100_000, 0]), lower_bound=50_000))
    assert "load max-min 99,999 -> 1.0e5 (imbalance 100.0% -> 100.0%, 2.000 -> 2.000 x lower bound)" in line


def test_steps_that_cost_nothing_are_balanced_perfectly() -> None:
    line = log_line(replace(STEP, before=np.zeros(2, np.int64), after=np.zeros(2, np.int64), lower_bound=0))
    assert "load max-min 0 -> 0 (imbalance 0.0% -> 0.0%, 1.000 -> 1.000 x lower bound)" in line


@pytest.mark.parametrize(
    ("every", "window", "logged"),
    [
        (1, None, range(10)),
        (4, None, [0, 4, 8]),
        (1, (3, 6), [3, 4, 5]),
        (3, (3, 9), [3, 6]),
        (2, (5, 6), []),
        (4, (8, 100), [8]),
    ],
)
def test_every_few_steps_of_a_window_are_logged(
    every: int, window: tuple[int, int] | None, logged: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    log_step = StepLogger(every=every, window=window)
    for number in range(10):  # two epochs of five steps
        log_step(replace(STEP, epoch=number // 5, step=number % 5))
    steps = [f"epoch {number // 5} step {number % 5}:" for number in logged]
    assert [message.split(" load")[0] for message in _lines(caplog)] == steps
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_a_line_is_seen_where_nobody_has_configured_logging(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, logger: logging.Logger
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_step = StepLogger(every=2)
    assert logger.handlers == []
    for _ in range(4):
        log_step(STEP)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} evenrank: " + re.escape(log_line(STEP)), line)
    assert len(logger.handlers) == 1
    assert logging.getLogger().handlers == []


def test_a_line_is_seen_where_the_root_logger_shows_only_warnings(
    monkeypatch: pytest.MonkeyPatch, logger: logging.Logger
) -> None:
    written = io.StringIO()
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(written)])
    monkeypatch.setattr(root, "level", logging.WARNING)
    StepLogger(every=1)(STEP)
    assert written.getvalue() == f"{log_line(STEP)}\n"
    assert logger.handlers == []
    assert root.level == logging.WARNING


def test_a_level_that_the_user_has_set_is_kept(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    for level in (logging.WARNING, logging.DEBUG):
        logger.setLevel(level)
        StepLogger(every=1)(STEP)
        assert logger.level == level
    assert _lines(caplog) == [log_line(STEP)]  # at the level DEBUG


def test_importing_leaves_logging_as_it_is() -> None:
    code = (
        "import logging; from evenrank.dataloader.balance.writers import StepLogger; StepLogger(every=1)\n"
        "log = logging.getLogger('evenrank')\n"
        "assert (log.level, log.handlers, logging.getLogger().handlers) == (0, [], [])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def _batches(rank: int = 0) -> list[RichBatch]:
    samples = [[(3, 0), (0, 1)], [(rank, 0), (0, 1)]]
    return [replace(rich_batch(samples, first_id=10 * rank), step=step) for step in range(4)]


def test_the_lines_of_a_balancer_have_the_metrics_that_on_step_gets(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[StepMetrics] = []
    with Balancer(
        _batches(), BalanceConfig(cost=one_per_sample, on_step=seen.append, log_every=2, log_window=(0, 7))
    ) as balancer:
        for _ in range(2):
            assert len(list(balancer)) == 4
    assert len(seen) == 8
    assert _lines(caplog) == [log_line(seen[number]) for number in (0, 2, 4, 6)]


def test_a_balancer_logs_nothing_unless_asked(caplog: pytest.LogCaptureFixture, logger: logging.Logger) -> None:
    with Balancer(_batches(), BalanceConfig(cost=one_per_sample)) as balancer:
        assert len(list(balancer)) == 4
    assert _lines(caplog) == []
    assert logger.level == logging.NOTSET


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_every": 0}, "log_every must be at least 1, got 0"),
        ({"log_every": -2}, "log_every must be at least 1, got -2"),
        (
            {"log_every": 1, "log_window": (5, 5)},
            "log_window must be (start, stop) with 0 <= start < stop, got (5, 5)",
        ),
        (
            {"log_every": 1, "log_window": (-1, 5)},
            "log_window must be (start, stop) with 0 <= start < stop, got (-1, 5)",
        ),
        ({"log_window": (2, 5)}, "log_window=(2, 5) needs log_every; log_every=1 logs each of these steps"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Balancer(_batches(), BalanceConfig(cost=one_per_sample, **options))
    assert str(raised.value) == message


def _standard_error(rank: int, world_size: int) -> list[str]:
    """Return what a rank writes, when ranks 1 and 2 of three balance together with different options."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return []
    assert isinstance(group, dist.ProcessGroup)
    written = io.StringIO()
    with (
        contextlib.redirect_stderr(written),
        Balancer(
            _batches(rank), BalanceConfig(cost=one_per_sample, log_every=rank, log_window=(1, 3)), group=group
        ) as balancer,
    ):
        root, log = logging.getLogger(), logging.getLogger("evenrank")
        previous, root.handlers = root.handlers, []
        try:
            assert len(list(balancer)) == 4
        finally:
            root.handlers, log.handlers = previous, []
            log.setLevel(logging.NOTSET)
    return written.getvalue().splitlines()


def test_only_the_first_rank_of_the_group_logs(ranks: RankPool) -> None:
    outside, first, second = ranks.run(3, _standard_error)
    assert (outside, second) == ([], [])
    steps = [line.partition("evenrank: ")[2].split(": load")[0] for line in first]
    assert steps == ["epoch 0 step 1", "epoch 0 step 2"]
