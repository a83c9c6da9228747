"""Runs that are killed, and continued by the same command."""

import dataclasses
import errno
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.preprocess.build.id_logs import NAMES

from evenrank.core import files
from evenrank.core.errors import DataError
from evenrank.preprocess import Filters, PreprocessConfig, TabularConfig, engine, job, preprocess, replace, run
from evenrank.preprocess.read import text as text_files
from tests.preprocess.test_append import bytes_in


def _config(folder: Path, out: str, **options: Any) -> PreprocessConfig:
    log = TabularConfig(events=(folder / "log.csv",), **NAMES)
    filters = Filters(min_user_events=2, min_item_events=2, max_length=24)
    skip: dict[str, Any] = {"on_error": "skip", "rejects": True, "ids": "dense", "split": "leave-last:1"}
    given = {"dataset": "custom", "out": folder / out, "custom": log, "filters": filters, **skip, **options}
    return PreprocessConfig(**given)


def _write_log(folder: Path, *, num_events: int = 900) -> None:
    rows = (f"u{event % 37},{event * event % 53},{1_600_000_000 + event * 7 % 1000}" for event in range(num_events))
    (folder / "log.csv").write_text("user,item,time\n" + "\n".join(rows) + "\nbad\nrows\n")


@contextmanager
def _small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "EVENTS_PER_BUCKET", 120)
        patch.setattr(job, "EVENTS_PER_FILE", 120)
        patch.setattr(text_files, "_PIECE_BYTES", 2000)
        yield


@contextmanager
def _called_at_each_step(call: Callable[[], None]) -> Iterator[None]:
    """Call a function before and after each file is put in its place, and before and after the dataset is."""
    replacing, put_in_place = files.replacing, replace._put_in_place

    @contextmanager
    def with_calls(path: Path) -> Iterator[Path]:
        with replacing(path) as partial:
            yield partial
            call()
        call()

    def put_with_calls(dataset: Path, out: Path, old: Path) -> None:
        call()
        put_in_place(dataset, out, old)
        call()

    with pytest.MonkeyPatch.context() as patch:
        for module in ("build.buckets", "build.events", "build.vocabulary", "engine", "writer"):
            patch.setattr(f"evenrank.preprocess.{module}.replacing", with_calls)
        patch.setattr(replace, "_put_in_place", put_with_calls)
        yield


def _run_and_die(config: PreprocessConfig, step: int) -> None:
    steps = iter(range(step))

    def die() -> None:
        if next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    with _small_parts(), _called_at_each_step(die):
        preprocess(config)


def _die_each(runs: list[tuple[PreprocessConfig, int]]) -> None:
    for config, step in runs:
        if (child := os.fork()) == 0:
            _run_and_die(config, step)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def _run_until_killed(runs: list[tuple[PreprocessConfig, int]]) -> None:
    """Start runs that are killed at a step each; of one process, which imports all modules once."""
    process = multiprocessing.get_context("spawn").Process(target=_die_each, args=(runs,))
    process.start()
    process.join()
    assert process.exitcode == 0


def _num_calls(config: PreprocessConfig, monkeypatch: pytest.MonkeyPatch) -> int:
    """Preprocess, and return how many calls of functions had no result yet."""
    calls: list[str] = []

    def counted(name: str, function: Callable[..., object], *task: object) -> object:
        calls.append(name)
        return function(*task)

    with monkeypatch.context() as patch, _small_parts():
        for name in ("read_piece", "write_range"):
            patch.setattr(job, name, partial(counted, name, getattr(job, name)))
        preprocess(config)
    return len(calls)


def _num_steps(config: PreprocessConfig) -> int:
    steps: list[None] = []
    with _small_parts(), _called_at_each_step(lambda: steps.append(None)):
        preprocess(config)
    return len(steps)


@pytest.mark.processes
@pytest.mark.parametrize("every_step", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_run_that_was_killed_is_continued_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_step: bool
) -> None:
    _write_log(tmp_path)
    num_calls = _num_calls(_config(tmp_path, "whole"), monkeypatch)
    last = _num_steps(_config(tmp_path, "counted")) - 1  # when the dataset is in place, but nothing was removed
    expected = bytes_in(tmp_path / "whole")
    assert num_calls > 8
    assert bytes_in(tmp_path / "counted") == expected
    steps = range(last + 1) if every_step else (0, last // 4, last // 2, last - 1, last)
    runs = [(_config(tmp_path, f"killed at {step}"), step) for step in steps]
    _run_until_killed(runs)
    previous = num_calls
    for config, step in runs:
        left = _num_calls(config, monkeypatch)
        assert left <= previous + 2 if step < last else left == num_calls  # threads are ahead of each other
        previous = left if step < last else 0
        assert bytes_in(Path(config.out)) == expected
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set()


@pytest.mark.processes
def test_appending_that_was_killed_is_continued_also_at_the_very_end(tmp_path: Path) -> None:
    _write_log(tmp_path)
    (tmp_path / "day-2.csv").write_text("user,item,time\nu1,1,1700000000\nu99,99,1700000001\n")
    logs = (tmp_path / "log.csv", tmp_path / "day-2.csv")
    once, later = (TabularConfig(events=events, **NAMES) for events in (logs, logs[1:]))
    with _small_parts():
        preprocess(_config(tmp_path, "first", filters=Filters()))
        preprocess(_config(tmp_path, "once", filters=Filters(), custom=once))
    for name in ("counted", "half", "end"):
        shutil.copytree(tmp_path / "first", tmp_path / name)
    configs = {
        name: _config(tmp_path, name, filters=Filters(), custom=later, append=True)
        for name in ("counted", "half", "end")
    }
    num_steps = _num_steps(configs["counted"])
    _run_until_killed([(configs["half"], num_steps // 2), (configs["end"], num_steps - 1)])
    for name in ("half", "end"):
        with _small_parts():
            preprocess(configs[name])
        assert bytes_in(tmp_path / name) == bytes_in(tmp_path / "counted") == bytes_in(tmp_path / "once")
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set()


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EIO])
def test_a_run_beyond_a_quota_is_continued_and_other_failures_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    _write_log(tmp_path)
    config, steps = _config(tmp_path, "out"), iter(range(60))

    def fail() -> None:
        if next(steps, None) is None:
            raise OSError(code, os.strerror(code))

    message = f"^{config.out} could not be written: {os.strerror(code)}; it is unchanged, "
    with _small_parts(), _called_at_each_step(fail), pytest.raises(DataError, match=message):
        preprocess(config)
    assert (tmp_path / ".out.partial").exists() == (code != errno.EIO)
    whole = _num_calls(_config(tmp_path, "whole"), monkeypatch)
    assert (_num_calls(config, monkeypatch) < whole) == (code != errno.EIO)
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "whole")


def test_a_run_goes_on_when_there_is_space(tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_log(tmp_path)
    config = dataclasses.replace(_config(tmp_path, "disk"), out=small_disk / "out")
    num_calls = _num_calls(_config(tmp_path, "whole"), monkeypatch)
    monkeypatch.setattr(job, "check_space", lambda *arguments: None)
    left, messages = num_calls, list[str]()
    for size in range(32, 4096, 32):
        try:
            left = _num_calls(config, monkeypatch)
            break
        except DataError as error:
            messages.append(str(error))
        subprocess.run(["mount", "-o", f"remount,size={size}k", str(small_disk)], check=True)
    assert len(messages) > 3
    remedy = f"free some space and run it again: it goes on with what is in {small_disk / '.out.partial'}"
    assert {*messages} == {f"{config.out} could not be written: No space left on device; it is unchanged, {remedy}"}
    assert left < num_calls
    assert bytes_in(small_disk / "out") == bytes_in(tmp_path / "whole")


def _end_early(config: PreprocessConfig, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a run end in its last stage, as on a full disk; return its plan."""

    def end(*arguments: object) -> None:
        raise engine.UnfinishedError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(job, "write_range", end)
        with pytest.raises(engine.UnfinishedError):
            preprocess(config)
    (plan,) = Path(config.out).parent.glob(".out.partial/*.json")
    return plan


def test_a_run_with_other_files_or_options_or_of_others_starts_over_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(tmp_path, "out")
    other = dataclasses.replace(config, filters=Filters())
    why = "starting over: not as in the run that did not finish"
    for second, num_events, mode, messages in (
        (config, 900, 0o700, ["going on with what an earlier run has finished"]),
        (other, 900, 0o700, [f"{why}: options"]),
        (config, 901, 0o700, [f"{why}: files"]),
        (config, 900, 0o777, []),  # results are pickled, so a folder that others can write to does not count
    ):
        _write_log(tmp_path)
        folder = _end_early(config, monkeypatch).parent
        folder.chmod(mode)
        if num_events != 900:
            _write_log(tmp_path, num_events=num_events)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "evenrank.preprocess"):
            manifest = preprocess(second)
            assert caplog.messages == messages
        assert manifest == preprocess(dataclasses.replace(second, out=tmp_path / "other"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv", "other", "out"]


def test_ids_that_began_like_integers_are_texts_also_for_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More rows than those that decide first, and then ids that are no plain integers.
    rows = [f"{number % 7},{number % 5},{1_600_000_000 + number}\n" for number in range(1500)]
    (tmp_path / "log.csv").write_text("".join(["user,item,time\n", *rows, "007,1,1700000000\n", "7,x,1700000000\n"]))
    for name in ("whole", "out"):
        config = _config(tmp_path, name, filters=Filters(), split="none")
        if name == "out":
            _end_early(config, monkeypatch)
        manifest = preprocess(config)
        assert {column: (ids.kind, ids.distinct) for column, ids in manifest.ids.items()} == {
            "user_id": ("text", 9),
            "item_id": ("text", 6),
        }
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "whole")


@pytest.mark.parametrize("content", ["", "[]", "null", "{}", "kinds", "[" * 10**5, "\0", "\udcff"])
def test_a_damaged_plan_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    _write_log(tmp_path)
    config = _config(tmp_path, "out")
    plan = _end_early(config, monkeypatch)
    if content == "kinds":
        content = json.dumps(json.loads(plan.read_text()) | {"kinds": 7})
    plan.write_text(content, errors="surrogateescape")
    assert preprocess(config) == preprocess(dataclasses.replace(config, out=tmp_path / "other"))
    assert [message.partition(":")[0] for message in caplog.messages] == ["starting over"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv", "other", "out"]


def test_results_are_not_those_of_before_the_machine_started(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "boot_id").write_text("first\n")
    monkeypatch.setattr(run, "_BOOT_ID", here / "boot_id")
    before = run.plan_of(_config(here, "out"), [])
    (here / "boot_id").write_text("second\n")
    after = run.plan_of(_config(Path(), "out 2", engine="ray", ray_address="auto"), [])
    assert {name for name in before if before[name] != after[name]} == {"start of the machine"}
