"""Logs for programs, in files, and lines for people, in the log of rank 0."""

import io
import logging
import platform
import re
import resource
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, StepMetrics
from evenrank.dataloader.balance.metrics.log import LogRecord, parse_line, read_json_lines
from evenrank.dataloader.balance.metrics.step_metrics import shown_numbers, summarize
from evenrank.dataloader.balance.metrics.writers import JsonLines, Scalars, StepLogger, TensorBoard, log_line
from tests.dataloader.balance.costs import one_per_sample
from tests.dataloader.balance.metrics.example_steps import STEPS, TIMED_STEPS, step, timed, write
from tests.dataloader.rich_batch import rich_batch


def test_a_line_has_all_metrics_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "log.jsonl"
    write(path, timed(7, epoch=2, after=(3, 5), compute=(0.5, 1), wait=(1.5, 1)))
    _, line = path.read_text().splitlines()
    assert line == (
        '{"epoch": 2, "step": 7, "seen": 1, "idle_before": 0.33333333333333337, "idle_after": 0.19999999999999996, '
        '"measured_idle_after": 0.125, "speedup": 1.2, "step_seconds": 2.0, "one_sample": 0.0, "longest": 16.0, '
        '"ratio_before": 1.5, "ratio_after": 1.25, "worst_after": 1.25, "samples": 4.0, "tokens": 40.0, '
        '"sample_bytes": 320.0, "moved_samples": 0.25, "moved_tokens": 0.25, "moved_bytes": 80.0, '
        '"gather_seconds": 0.25, "plan_seconds": 3.5, "exchange_seconds": 0.125, '
        '"waited_seconds": 0.0, "steps": 1, "heaviest_before": 6.0, "heaviest_after": 5.0, "mean_before": 4.0, '
        '"mean_after": 4.0, "measured_steps": 1, '
        '"idle_seconds": 0.25, "compared_steps": 0, "compared_step_seconds": 0.0, "compared_idle_seconds": 0.0, '
        '"is_balanced": true, "before": [6, 2], "after": [3, 5], "lower_bound": 4, "rank_tokens": [24, 16], '
        '"rank_squares": [320.0, 160.0], "loaded_tokens": [16, 4], "compute_seconds": [0.5, 1.0], '
        '"wait_seconds": [1.5, 1.0]}'
    )


def test_a_log_begins_with_the_run_and_a_job_that_is_killed_loses_no_line(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "log.jsonl", every=2, options={"model": "small", "data": "mine"})
    log.begin({"strategy": "none", "data": {"path": Path("/data")}})
    for number, metrics in enumerate(STEPS, 1):
        log(metrics)
        if number > 1:
            run, records, skipped = read_json_lines(tmp_path / "log.jsonl")  # which is not closed
            assert (len(records), skipped) == (number // 2, 0)
    log.close()
    assert run is not None
    assert run.options == {"model": "small", "strategy": "none", "data": {"path": "/data"}}
    assert run.ranks == 2
    assert run.versions["python"] == platform.python_version()
    assert {"evenrank", "torch", "numpy"} <= run.versions.keys()
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(run.started)).total_seconds()) < 600


def test_every_run_has_a_file_of_its_own(tmp_path: Path) -> None:
    for number, folder in enumerate((tmp_path, f"file://{tmp_path}", tmp_path)):
        with JsonLines(f"{folder}/log.v1.jsonl") as log:
            log(STEPS[number])
    paths = [tmp_path / f"log.v1{number}.jsonl" for number in ("", "-2", "-3")]
    logs = [read_json_lines(path) for path in paths]
    assert [[record.heaviest_before for record in log.records] for log in logs] == [[6], [8], [10]]
    first, second, third = (log.run.id for log in logs if log.run)
    assert len({first, second, third}) == 3
    assert len(first) == 16
    paths[0].write_bytes(paths[0].read_bytes() + paths[1].read_bytes())
    message = f"log.v1.jsonl has records of 2 runs, {first} and {second}; give one file for each run"
    with pytest.raises(DataError, match=message):
        read_json_lines(paths[0])


def test_a_full_disk_closes_the_log_and_the_next_writer_has_another_file(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = JsonLines(path)
    log(STEPS[0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit to the file size simulates a full disk; a part of the second record fits.
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 300, limits[1]))
    try:
        with pytest.raises(DataError, match=r"log\.jsonl could not be written: File too large; free some space"):
            log(STEPS[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(ConfigError, match="this JsonLines is closed; create a new one"):
        log(STEPS[2])
    log.close()
    write(path, STEPS[3])
    _, whole, incomplete = path.read_bytes().splitlines()
    record = parse_line(whole)
    assert isinstance(record, LogRecord)
    assert (record.epoch, record.step, len(incomplete)) == (0, 0, 300)
    with pytest.raises(ValueError, match="it is not JSON"):
        parse_line(incomplete)
    assert [record.epoch for record in read_json_lines(tmp_path / "log-2.jsonl").records] == [1]


@pytest.mark.parametrize(
    ("options", "steps", "summarized"),
    [
        ({"every": 2}, TIMED_STEPS, [(2, slice(0, 2)), (4, slice(0, 4))]),
        ({"every": 2, "window": 3}, TIMED_STEPS, [(2, slice(0, 2)), (4, slice(1, 4))]),
        # The mean of a hundred steps after every tenth.
        ({}, [step(number) for number in range(120)], [(n, slice(max(n - 100, 0), n)) for n in range(10, 121, 10)]),
    ],
)
def test_any_function_and_tensorboard_get_the_numbers_and_the_step(
    options: dict[str, int], steps: list[StepMetrics], summarized: list[tuple[int, slice]], tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged: list[Any] = []
    for writer in (Scalars(lambda *arguments: logged.append(arguments), **options), TensorBoard(tmp_path, **options)):
        with writer:
            for metrics in steps:
                writer(metrics)
        with pytest.raises(ConfigError, match=f"this {type(writer).__name__} is closed"):
            writer(steps[0])
    expected = [
        ({f"balance/{name}": value for name, value in shown_numbers(summarize(steps[of_steps])).items()}, seen)
        for seen, of_steps in summarized
    ]
    assert logged == expected
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert scalars.keys() == {name for numbers, _ in expected for name in numbers}
    for name, values in scalars.items():
        assert values == [(seen, pytest.approx(numbers[name])) for numbers, seen in expected if name in numbers]


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
    assert all(record.levelno == logging.INFO for record in caplog.records)
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
        with Balancer([rich_batch([[(3, 0), (0, 1)], [(0, 0), (0, 1)]])] * 4, balance) as balancer:
            assert [len(list(balancer)) for _ in range(2)] == [4, 4]
        assert len(seen) == 8
    assert _lines(caplog) == [log_line(seen[number], with_loads=True) for number in (0, 2, 4, 6)]
