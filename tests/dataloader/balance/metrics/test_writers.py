import json
import os
import platform
import resource
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.balance.metrics.log import LogRecord, parse_line, read_json_lines
from evenrank.dataloader.balance.metrics.step_metrics import shown_numbers, summarize
from evenrank.dataloader.balance.metrics.writers import JsonLines, Scalars, TensorBoard
from tests.dataloader.balance.metrics.example_steps import STEPS, TIMED_STEPS, step, timed, write
from tests.privileges import unprivileged


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log after the first one, which is the run."""
    text = path.read_text()
    assert text.endswith("\n")
    run, *records = [json.loads(line) for line in text.splitlines()]
    assert list(run) == ["run"]
    return records


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


def test_a_log_begins_with_the_run(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "log.jsonl", every=2, options={"model": "small", "data": "mine"}) as log:
        log.begin({"strategy": "none", "data": {"path": Path("/data")}})
        for metrics in STEPS:
            log(metrics)
    run, records, skipped = read_json_lines(tmp_path / "log.jsonl")
    assert run is not None
    assert (len(records), skipped) == (2, 0)
    assert run.options == {"model": "small", "strategy": "none", "data": {"path": "/data"}}
    assert run.ranks == 2
    assert run.versions["python"] == platform.python_version()
    assert {"evenrank", "torch", "numpy"} <= run.versions.keys()
    assert len(run.id) == 16
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(run.started)).total_seconds()) < 600


def test_every_run_has_a_file_of_its_own(tmp_path: Path) -> None:
    paths = []
    for number, folder in enumerate((tmp_path, f"file://{tmp_path}", tmp_path)):
        with JsonLines(f"{folder}/log.v1.jsonl") as log:
            log(STEPS[number])
            paths.append(log.path)
    assert [path.name for path in paths] == ["log.v1.jsonl", "log.v1-2.jsonl", "log.v1-3.jsonl"]
    logs = [read_json_lines(path) for path in paths]
    assert [[record.heaviest_before for record in log.records] for log in logs] == [[6], [8], [10]]
    assert len({log.run.id for log in logs if log.run}) == 3
    paths[0].write_bytes(paths[0].read_bytes() + paths[1].read_bytes())
    first, second = (log.run.id for log in logs[:2] if log.run)
    message = f"log.v1.jsonl has records of 2 runs, {first} and {second}; give one file for each run"
    with pytest.raises(DataError, match=message):
        read_json_lines(paths[0])


@pytest.mark.parametrize("writer", [JsonLines, TensorBoard])
def test_a_missing_permission_is_reported_at_once(tmp_path: Path, writer: type[JsonLines | TensorBoard]) -> None:
    writer(tmp_path / "before").close()  # so that all imports are done
    (tmp_path / "locked").mkdir(mode=0o555)
    with unprivileged(), pytest.raises(DataError, match="log cannot be written: Permission denied; choose another f"):
        writer(tmp_path / "locked" / "log")


def test_a_job_that_is_killed_loses_no_line(tmp_path: Path) -> None:
    code = (
        "import os; from evenrank.dataloader.balance.metrics.writers import JsonLines\n"
        "from tests.dataloader.balance.metrics.example_steps import STEPS\n"
        "log = JsonLines('log.jsonl')\n"
        "[log(metrics) for metrics in STEPS]\n"
        f"os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    assert run.returncode == -signal.SIGKILL
    assert [line["seen"] for line in lines(tmp_path / "log.jsonl")] == [1, 2, 3, 4, 5]


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
    assert [line["epoch"] for line in lines(tmp_path / "log-2.jsonl")] == [1]


def test_tensorboard_gets_every_labelled_metric(tmp_path: Path) -> None:
    with TensorBoard(tmp_path / "runs", every=2, window=3) as board:
        for metrics in STEPS:
            board(metrics)
    with pytest.raises(ConfigError, match="this TensorBoard is closed"):
        board(STEPS[0])
    scalars = _scalars(tmp_path / "runs")
    assert set(scalars) == {f"balance/{name}" for name in shown_numbers(summarize(STEPS))}
    # Steps are counted across epochs; the values summarize steps 1 to 2 and steps 2 to 4.
    assert scalars["balance/ratio_before"] == [(2, 1.75), (4, pytest.approx(26 / 12))]
    assert scalars["balance/worst_after"] == [(2, 1), (4, 1.25)]
    assert scalars["balance/speedup"] == [(2, 1.75), (4, 2)]
    assert scalars["balance/idle_before"] == [(2, pytest.approx(3 / 7)), (4, 0.5)]
    assert scalars["balance/moved_bytes"] == [(2, 80), (4, 80)]
    assert scalars["balance/plan_seconds"] == [(2, 0.25), (4, 0.5)]
    with TensorBoard(tmp_path / "others") as board:  # the mean of a hundred steps after every tenth
        for number in range(120):
            board(step(number))
    times = _scalars(tmp_path / "others")["balance/plan_seconds"]
    assert [seen for seen, _ in times] == list(range(10, 121, 10))
    assert [times[0][1], times[-1][1]] == pytest.approx([0.5 * 4.5, 0.5 * 69.5])  # of steps 0 to 9 and 20 to 119


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("window", [None, 3])
def test_any_function_gets_the_numbers_and_the_step(window: int | None) -> None:
    logged: list[Any] = []
    writer = Scalars(lambda *arguments: logged.append(arguments), every=2, **{"window": window} if window else {})
    for metrics in TIMED_STEPS:
        writer(metrics)
    writer.close()
    with pytest.raises(ConfigError, match="this Scalars is closed"):
        writer(STEPS[0])
    summarized = TIMED_STEPS[:2], TIMED_STEPS[1 if window else 0 :]
    assert logged == [
        ({f"balance/{name}": value for name, value in shown_numbers(summarize(steps)).items()}, 2 * number)
        for number, steps in enumerate(summarized, 1)
    ]


def test_importing_needs_no_optional_packages_and_leaves_logging_as_it_is() -> None:
    code = (
        "import sys, logging; sys.modules.update(dict.fromkeys(['polars', 'matplotlib', 'tensorboard', 'torch'])); "
        "from evenrank.dataloader.balance.metrics.writers import StepLogger; StepLogger(every=1); "
        "log = logging.getLogger('evenrank'); assert (log.level, log.handlers, log.root.handlers) == (0, [], [])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
