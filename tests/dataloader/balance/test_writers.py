import contextlib
import io
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics, parse_record, shown_fields
from evenrank.dataloader.balance.metrics.writers import JsonLines, StepLogger, TensorBoard, log_line
from tests.dataloader.balance.costs import one_per_sample
from tests.dataloader.rich_batch import RichBatch, rich_batch
from tests.ranks import RankPool


def step(number: int, *, epoch: int = 0, before: Sequence[int] = (6, 2), after: Sequence[int] = (4, 4)) -> StepMetrics:
    """Return a step with a lower bound of 4, in which 1 of 4 samples, 10 of 40 tokens and 80 of 320 bytes move."""
    counts: dict[str, Any] = {"lower_bound": 4, "samples": 4, "moved_samples": 1, "tokens": 40, "moved_tokens": 10}
    counts |= {"sample_bytes": 320, "moved_bytes": 80, "gather_seconds": 0.25, "plan_seconds": 0.5 * number}
    counts |= {"exchange_seconds": 0.125, "waited_seconds": 0.0, "before": np.array(before), "after": np.array(after)}
    return StepMetrics(epoch=epoch, step=number, **counts)


# Heaviest loads 6, 8, 10, 8, 6 before balancing and 4, 4, 5, 4, 6 after.
STEPS = [
    step(0),
    step(1, before=(8, 0)),
    step(2, before=(0, 10), after=(5, 5)),
    step(0, epoch=1, before=(8, 8), after=(4, 4)),
    step(1, epoch=1, after=(6, 2)),
]


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def write(path: Path, *steps: StepMetrics) -> None:
    with JsonLines(path) as log:
        for metrics in steps:
            log(metrics)


def test_a_line_has_all_metrics_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "log.jsonl"
    write(path, step(7, epoch=2, before=(6, 2), after=(3, 5)))
    assert path.read_text() == (
        '{"epoch": 2, "step": 7, "seen": 1, "steps": 1, "ratio_before": 1.5, "ratio_after": 1.25, "worst_after": 1.25, '
        '"speedup": 1.2, "moved_samples": 0.25, "moved_tokens": 0.25, "moved_bytes": 80.0, "gather_seconds": 0.25, '
        '"plan_seconds": 3.5, "exchange_seconds": 0.125, "waited_seconds": 0.0, "heaviest_before": 6.0, '
        '"heaviest_after": 5.0, "samples": 4.0, "tokens": 40.0, "bytes": 320.0, "before": [6, 2], "after": [3, 5], '
        '"lower_bound": 4}\n'
    )


def test_a_record_after_every_few_steps_summarizes_a_window(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "log.jsonl", every=2, window=3) as log:
        for metrics in STEPS:
            log(metrics)
    records = lines(tmp_path / "log.jsonl")  # the fifth step is left out
    counts = [[record[name] for name in ("epoch", "step", "seen", "steps")] for record in records]
    assert counts == [[0, 1, 2, 2], [1, 0, 4, 3]]
    # The means of 6, 8, then of 8, 10, 8 before, and of 4, 4, then of 4, 5, 4 after.
    heaviest = [[record["heaviest_before"], record["heaviest_after"]] for record in records]
    assert heaviest == [[7, 4], [26 / 3, 13 / 3]]
    assert (records[0]["before"], records[0]["after"]) == ([8, 0], [4, 4])  # of the step itself


@pytest.mark.parametrize("setting", ["every", "window"])
@pytest.mark.parametrize("value", [0, -3])
def test_settings_below_1_are_refused(tmp_path: Path, setting: str, value: int) -> None:
    for writer in (JsonLines, TensorBoard):
        with pytest.raises(ConfigError, match=f"{setting} must be at least 1, got {value}"):
            writer(tmp_path / "log", **{setting: value})
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_continued_on_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, *STEPS[:2])
    text = path.read_bytes()
    for size in (0, 1, len(text) // 2, len(text) - 1, len(text)):
        path.write_bytes(text[:size])
        write(path, STEPS[2])
        written = path.read_bytes()
        assert written.startswith(text[:size])
        assert parse_record(written.splitlines()[-1]).heaviest_before == 10
        assert written.count(b"\n") == len(text[:size].splitlines()) + 1
        assert b"\n\n" not in written


@pytest.mark.parametrize(
    ("writer", "name", "message"),
    [
        (JsonLines, "folder", "Is a directory; choose another file"),
        (JsonLines, "file/log", "Not a directory; choose another file"),
        (JsonLines, "file/a/b", "Not a directory; choose another file"),
        (TensorBoard, "file", "File exists; choose another folder"),
    ],
)
def test_paths_that_cannot_be_written_are_errors(tmp_path: Path, writer: Any, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=f"{name} cannot be written: {message}"):
        writer(tmp_path / name)


@pytest.mark.parametrize("writer", [JsonLines, TensorBoard])
def test_a_missing_permission_is_reported_at_once(tmp_path: Path, writer: type[JsonLines | TensorBoard]) -> None:
    writer(tmp_path / "before").close()  # so that all imports are done
    (tmp_path / "locked").mkdir(mode=0o555)
    with _unprivileged(), pytest.raises(DataError, match="log cannot be written: Permission denied; choose another f"):
        writer(tmp_path / "locked" / "log")


@contextlib.contextmanager
def _unprivileged() -> Iterator[None]:
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_job_that_is_killed_loses_no_line(tmp_path: Path) -> None:
    code = (
        "import os; from evenrank.dataloader.balance.metrics.writers import JsonLines\n"
        "from tests.dataloader.balance.test_writers import STEPS\n"
        "log = JsonLines('log.jsonl')\n"
        "[log(metrics) for metrics in STEPS]\n"
        f"os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    )
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)})
    assert run.returncode == -signal.SIGKILL
    assert [line["seen"] for line in lines(tmp_path / "log.jsonl")] == [1, 2, 3, 4, 5]


def test_a_full_disk_closes_the_log_and_the_next_writer_begins_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = JsonLines(path)
    log(STEPS[0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit to the file size simulates a full disk; half of the second line fits.
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size * 3 // 2, limits[1]))
    try:
        with pytest.raises(DataError, match=r"log\.jsonl could not be written: File too large; free some space"):
            log(STEPS[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(ConfigError, match="this JsonLines is closed; create a new one"):
        log(STEPS[2])
    log.close()
    write(path, STEPS[3])
    first, incomplete, last = path.read_bytes().splitlines()
    assert [(record.epoch, record.step) for record in map(parse_record, (first, last))] == [(0, 0), (1, 0)]
    with pytest.raises(ValueError, match="it is not JSON"):
        parse_record(incomplete)


def test_tensorboard_gets_every_labelled_metric(tmp_path: Path) -> None:
    with TensorBoard(tmp_path / "runs", every=2, window=3) as board:
        for metrics in STEPS:
            board(metrics)
    with pytest.raises(ConfigError, match="this TensorBoard is closed"):
        board(STEPS[0])
    scalars = _scalars(tmp_path / "runs")
    assert set(scalars) == {f"balance/{entry.name}" for entry in shown_fields()}
    # Steps are counted across epochs; the values summarize steps 1 to 2 and steps 2 to 4.
    assert scalars["balance/ratio_before"] == [(2, 1.75), (4, pytest.approx(26 / 12))]
    assert scalars["balance/worst_after"] == [(2, 1), (4, 1.25)]
    assert scalars["balance/speedup"] == [(2, 1.75), (4, 2)]
    assert scalars["balance/moved_bytes"] == [(2, 80), (4, 80)]
    assert scalars["balance/plan_seconds"] == [(2, 0.25), (4, 0.5)]


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_writes_the_mean_of_a_hundred_steps_after_every_tenth(tmp_path: Path) -> None:
    with TensorBoard(tmp_path) as board:
        for number in range(120):
            board(step(number))
    times = _scalars(tmp_path)["balance/plan_seconds"]
    assert [seen for seen, _ in times] == list(range(10, 121, 10))
    assert [times[0][1], times[-1][1]] == pytest.approx([0.5 * 4.5, 0.5 * 69.5])  # of steps 0 to 9 and 20 to 119


def test_without_tensorboard_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"tensorboard is missing .*; pip install 'evenrank\[tensorboard\]'"):
        TensorBoard(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_importing_needs_no_optional_packages_and_leaves_logging_as_it_is() -> None:
    code = (
        "import logging, sys; sys.modules.update(dict.fromkeys(['polars', 'matplotlib', 'tensorboard', 'torch'])); "
        "from evenrank.dataloader.balance.metrics.writers import StepLogger; StepLogger(every=1); "
        "log = logging.getLogger('evenrank'); assert (log.level, log.handlers, log.root.handlers) == (0, [], [])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


LOADS: dict[str, Any] = {"before": (2_500_000_000, 1_250_000_000), "after": (1_874_000_000, 1_876_000_000)}
MEASURED: dict[str, Any] = {
    "tokens": 98_765,
    "moved_tokens": 12_345,
    "plan_seconds": 0.00123,
    "exchange_seconds": 0.0344,
}
TEXT_STEP = replace(step(100, epoch=1, **LOADS), lower_bound=1_875_000_000, **MEASURED)


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
    assert log_line(TEXT_STEP) == (
        "epoch 1 step 100: load max-min 1.2e9 -> 2.0e6 (imbalance 50.0% -> 0.1%, 1.333 -> 1.001 x lower bound), "
        "moved 12,345 of 98,765 tokens, plan 1.2 ms, exchange 34.4 ms"
    )
    small = replace(TEXT_STEP, before=np.array([0, 99_999]), after=np.array([100_000, 0]), lower_bound=50_000)
    text = "load max-min 99,999 -> 1.0e5 (imbalance 100.0% -> 100.0%, 2.000 -> 2.000 x lower bound), moved"
    assert text in log_line(small)
    zero = replace(TEXT_STEP, before=np.array([0, 0]), after=np.array([0, 0]), lower_bound=0)
    assert "load max-min 0 -> 0 (imbalance 0.0% -> 0.0%, 1.000 -> 1.000 x lower bound), moved" in log_line(zero)


@pytest.mark.parametrize(
    ("every", "window", "logged"),
    [(1, None, range(10)), (4, None, [0, 4, 8]), (1, (3, 6), [3, 4, 5]), (3, (3, 9), [3, 6]), (2, (5, 6), [])],
)
@pytest.mark.usefixtures("logger")
def test_steps_of_a_window_are_logged(every: int, window: Any, logged: list[int], caplog: Any) -> None:
    log_step = StepLogger(every=every, window=window)
    for number in range(10):  # two epochs of five steps
        log_step(replace(TEXT_STEP, epoch=number // 5, step=number % 5))
    steps = [f"epoch {number // 5} step {number % 5}:" for number in logged]
    assert [message.split(" load")[0] for message in _lines(caplog)] == steps
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_a_line_is_seen_without_configuration(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, logger: logging.Logger
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_step = StepLogger(every=2)
    assert logger.handlers == []
    for _ in range(4):
        log_step(TEXT_STEP)
    line = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} evenrank: " + re.escape(log_line(TEXT_STEP)) + "\n"
    assert re.fullmatch(2 * line, capsys.readouterr().err)
    assert len(logger.handlers) == 1
    assert logging.getLogger().handlers == []


def test_a_line_is_seen_where_the_root_shows_warnings(monkeypatch: pytest.MonkeyPatch, logger: logging.Logger) -> None:
    written, root = io.StringIO(), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(written)])
    monkeypatch.setattr(root, "level", logging.WARNING)
    StepLogger(every=1)(TEXT_STEP)
    assert written.getvalue() == f"{log_line(TEXT_STEP)}\n"
    assert (logger.handlers, root.level) == ([], logging.WARNING)


def test_a_level_that_the_user_has_set_is_kept(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    for level in (logging.WARNING, logging.DEBUG):
        logger.setLevel(level)
        StepLogger(every=1)(TEXT_STEP)
        assert logger.level == level
    assert _lines(caplog) == [log_line(TEXT_STEP)]  # at the level DEBUG


def _batches(rank: int = 0) -> list[RichBatch]:
    samples = [[(3, 0), (0, 1)], [(rank, 0), (0, 1)]]
    return [replace(rich_batch(samples, first_id=10 * rank), step=step) for step in range(4)]


@pytest.mark.parametrize("balances_alone", [False, True])
@pytest.mark.usefixtures("logger")
def test_lines_have_the_metrics(caplog: pytest.LogCaptureFixture, small_dataset: Path, balances_alone: bool) -> None:
    seen: list[StepMetrics] = []
    balance = BalanceConfig(cost=one_per_sample, on_step=seen.append, log_every=2, log_window=(0, 7))
    if balances_alone:
        for rank in (1, 0):  # of which the first one logs
            seen.clear()
            list(build_loader(small_dataset, LoaderConfig(batch_size=4), rank=rank, world_size=2, balance=balance))
    else:
        with Balancer(_batches(), balance) as balancer:
            assert [len(list(balancer)) for _ in range(2)] == [4, 4]
        assert len(seen) == 8
    assert _lines(caplog) == [log_line(seen[number]) for number in (0, 2, 4, 6)]


def _logged(rank: int, world_size: int) -> list[str]:
    group = dist.new_group([1, 2])
    if rank == 0:
        return []
    assert isinstance(group, dist.ProcessGroup)
    written = io.StringIO()
    log = logging.getLogger("evenrank")
    log.handlers = [logging.StreamHandler(written)]
    config = BalanceConfig(cost=one_per_sample, log_every=rank, log_window=(1, 3))
    try:
        with Balancer(_batches(rank), config, group=group) as balancer:
            assert len(list(balancer)) == 4
    finally:
        log.handlers = []
        log.setLevel(logging.NOTSET)
    return [line.split(": load")[0] for line in written.getvalue().splitlines()]


def test_only_the_first_rank_of_the_group_logs(ranks: RankPool) -> None:
    assert ranks.run(3, _logged) == [[], ["epoch 0 step 1", "epoch 0 step 2"], []]
