"""Runs that are killed, and continued by the same command."""

import dataclasses
import errno
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from evenrank.core import files
from evenrank.core.errors import DataError
from evenrank.preprocess import Filters, PreprocessConfig, TabularConfig, engine, job, preprocess, replace, run
from evenrank.preprocess.read import text as text_files
from tests.preprocess.test_append import bytes_in


def _config(folder: Path, out: str) -> PreprocessConfig:
    log = TabularConfig(events=(folder / "log.csv",), user_column="user", item_column="item", timestamp_column="time")
    filters = Filters(min_user_events=2, min_item_events=2, max_length=24)
    skip: dict[str, Any] = {"on_error": "skip", "rejects": True}
    return PreprocessConfig(
        dataset="custom", out=folder / out, custom=log, ids="dense", filters=filters, split="leave-last:1", **skip
    )


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


def _run_until_killed(target: Callable[..., None], *arguments: object) -> None:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def _run_and_die(config: PreprocessConfig, step: int) -> None:
    steps = iter(range(step))

    def die() -> None:
        if next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    with _small_parts(), _called_at_each_step(die):
        preprocess(config)


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


@pytest.mark.processes
def test_a_run_that_was_killed_is_continued_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_log(tmp_path)
    num_calls = _num_calls(_config(tmp_path, "whole"), monkeypatch)
    steps: list[None] = []
    with _small_parts(), _called_at_each_step(lambda: steps.append(None)):
        preprocess(_config(tmp_path, "counted"))
    expected = bytes_in(tmp_path / "whole")
    assert num_calls > 8
    assert bytes_in(tmp_path / "counted") == expected
    previous, last = num_calls, len(steps) - 1  # when the dataset is in place, but nothing was removed
    for number, step in enumerate([*range(0, last, last // 5), last - 1, last]):
        config = _config(tmp_path, f"killed {number}")
        _run_until_killed(_run_and_die, config, step)
        left = _num_calls(config, monkeypatch)
        assert left <= previous + 2 if step < last else left == num_calls  # threads are ahead of each other
        previous = left if step < last else 0
        assert bytes_in(tmp_path / f"killed {number}") == expected
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set()


@pytest.mark.processes
def test_appending_that_was_killed_is_continued_also_at_the_very_end(tmp_path: Path) -> None:
    _write_log(tmp_path)
    (tmp_path / "day-2.csv").write_text("user,item,time\nu1,1,1700000000\nu99,99,1700000001\n")
    configs = (_config(tmp_path, name) for name in ("first", "once", "second"))
    first, once, second = (dataclasses.replace(config, filters=Filters()) for config in configs)
    assert first.custom is not None
    paths = (tmp_path / "log.csv", tmp_path / "day-2.csv")
    once = dataclasses.replace(once, custom=dataclasses.replace(first.custom, events=paths))
    second = dataclasses.replace(second, custom=dataclasses.replace(first.custom, events=paths[1:]), append=True)
    with _small_parts():
        preprocess(first)
        preprocess(once)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    steps: list[None] = []
    with _small_parts(), _called_at_each_step(lambda: steps.append(None)):
        preprocess(second)
    for number, step in enumerate((len(steps) // 2, len(steps) - 2, len(steps) - 1)):
        config = dataclasses.replace(second, out=tmp_path / f"killed {number}")
        shutil.copytree(tmp_path / "first", tmp_path / f"killed {number}")
        _run_until_killed(_run_and_die, config, step)
        with _small_parts():
            preprocess(config)
        killed = bytes_in(tmp_path / f"killed {number}")
        assert killed == bytes_in(tmp_path / "second") == bytes_in(tmp_path / "once")
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set()


def _kill_when_done(config: PreprocessConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replace, "_put_in_place", lambda *paths: os.kill(os.getpid(), signal.SIGKILL))
        preprocess(config)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_run_on_a_full_disk_is_continued_and_other_failures_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    _write_log(tmp_path)
    config, steps = _config(tmp_path, "out"), iter(range(60))

    def fail() -> None:
        if next(steps, None) is None:
            raise OSError(code, os.strerror(code))

    remedy = "check permissions and space"
    if code != errno.EIO:
        remedy = f"free some space and run it again: it goes on with what is in {tmp_path / '.out.partial'}"
    message = f"{config.out} could not be written: {os.strerror(code)}; it is unchanged, {remedy}"
    with _small_parts(), _called_at_each_step(fail), pytest.raises(DataError, match=f"^{re.escape(message)}$"):
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


@pytest.mark.processes
def test_a_run_with_other_files_or_options_starts_over_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write_log(tmp_path)
    config = _config(tmp_path, "out")
    _run_until_killed(_kill_when_done, config)
    other = dataclasses.replace(config, filters=Filters())
    with caplog.at_level(logging.WARNING, "evenrank.preprocess"):
        assert preprocess(other) == preprocess(dataclasses.replace(other, out=tmp_path / "other"))
        assert caplog.messages == ["starting over: not as in the run that did not finish: options"]
        _run_until_killed(_kill_when_done, config)
        _write_log(tmp_path, num_events=901)
        caplog.clear()
        assert preprocess(config) == preprocess(dataclasses.replace(config, out=tmp_path / "other"))
        assert caplog.messages == ["starting over: not as in the run that did not finish: files"]
        _run_until_killed(_kill_when_done, config)
        caplog.clear()
        assert preprocess(config) == preprocess(dataclasses.replace(config, out=tmp_path / "other"))
        assert caplog.messages == ["going on with what an earlier run has finished"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv", "other", "out"]


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "null", "{}", "kinds", "[" * 10**5, "\0", "\udcff"])
def test_a_damaged_plan_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    _write_log(tmp_path)
    config = _config(tmp_path, "out")

    def end(*arguments: object) -> None:
        raise engine.UnfinishedError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(job, "write_range", end)
        with pytest.raises(engine.UnfinishedError):
            preprocess(config)
    (plan,) = tmp_path.glob(".out.partial/*.json")
    if content == "kinds":
        content = json.dumps(json.loads(plan.read_text()) | {"kinds": 7})
    plan.write_text(content, errors="surrogateescape")
    assert preprocess(config) == preprocess(dataclasses.replace(config, out=tmp_path / "other"))
    assert [message.partition(":")[0] for message in caplog.messages] == ["starting over"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv", "other", "out"]


@pytest.mark.processes
def test_a_folder_that_others_can_write_to_is_not_continued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write_log(tmp_path)
    config = _config(tmp_path, "out")
    _run_until_killed(_kill_when_done, config)
    (tmp_path / ".out.partial").chmod(0o777)  # results are pickled
    preprocess(config)
    assert not caplog.messages


def test_results_are_not_those_of_before_the_machine_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "boot_id").write_text("first\n")
    monkeypatch.setattr(run, "_BOOT_ID", tmp_path / "boot_id")
    monkeypatch.chdir(tmp_path)
    before = run.plan_of(_config(tmp_path, "out"), [])
    (tmp_path / "boot_id").write_text("second\n")
    relative = _config(Path(), "out 2")
    after = run.plan_of(dataclasses.replace(relative, engine="ray", ray_address="auto"), [])
    assert {name for name in before if before[name] != after[name]} == {"start of the machine"}


def test_results_are_kept_unless_they_need_not_be(tmp_path: Path) -> None:
    calls: list[int] = []

    def double(task: int) -> int:
        calls.append(task)
        return 2 * task

    for _ in range(2):
        with engine.threads(2, tmp_path) as on_threads:
            assert [*on_threads.map(double, range(3), stage="doubles")] == [(0, 0), (1, 2), (2, 4)]
            assert [*on_threads.map(double, range(2), stage="again", keep=False)] == [(0, 0), (1, 2)]
    assert sorted(calls) == [0, 0, 0, 1, 1, 1, 2]
