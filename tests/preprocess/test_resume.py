"""Runs that are killed, and continued by the same command."""

import dataclasses
import errno
import json
import logging
import multiprocessing
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from evenrank.core import files
from evenrank.core.errors import DataError
from evenrank.datasets import read_manifest
from evenrank.preprocess import Filters, PreprocessConfig, engine, job, preprocess, replace, run
from evenrank.preprocess.read import text as text_files
from tests.preprocess.decoded import bytes_in, of_log, write_log


def _config(folder: Path, out: str, *logs: str, **options: Any) -> PreprocessConfig:
    filters = Filters(min_user_events=2, min_item_events=2, max_length=24)
    given: dict[str, Any] = {"ids": "dense", "split": "leave-last:1", "filters": filters, **options}
    return of_log(folder / out, *(folder / log for log in logs or ["log.csv"]), on_error="skip", rejects=True, **given)


def _write_log(folder: Path, *, num_events: int = 900) -> None:
    log = [(f"u{event % 37}", event * event % 53, event * 7 % 1000) for event in range(num_events)]
    with write_log(folder / "log.csv", log).open("a") as file:
        file.write("bad\nrows\n")


@contextmanager
def _watched(call: Callable[[str], object]) -> Iterator[None]:
    """Divide the work into small parts, and call a function with what is done: a task, or a step to files.

    There is a step before and after each file is put in its place, and before and after the dataset is.
    """
    replacing, put_in_place = files.replacing, replace._put_in_place

    @contextmanager
    def watched_file(path: Path) -> Iterator[Path]:
        with replacing(path) as partial:
            yield partial
            call("step")
        call("step")

    def watched_dataset(dataset: Path, out: Path, old: Path) -> None:
        call("step")
        put_in_place(dataset, out, old)
        call("step")

    def watched_task(function: Callable[..., object], *task: object) -> object:
        call("task")
        return function(*task)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("build.buckets", "build.events", "build.vocabulary", "engine", "writer"):
            patch.setattr(f"evenrank.preprocess.{module}.replacing", watched_file)
        for name in ("read_piece", "write_range"):
            patch.setattr(job, name, partial(watched_task, getattr(job, name)))
        patch.setattr(replace, "_put_in_place", watched_dataset)
        patch.setattr(job, "EVENTS_PER_BUCKET", 120)
        patch.setattr(job, "EVENTS_PER_FILE", 120)
        patch.setattr(text_files, "_PIECE_BYTES", 2000)
        yield


def _count(config: PreprocessConfig) -> Counter[str]:
    """Preprocess, and return how many tasks and steps there were that an earlier run had not done."""
    done: list[str] = []
    with _watched(done.append):
        preprocess(config)
    return Counter(done)


def _at_step(step: int, fail: Callable[[], object]) -> Callable[[str], object]:
    steps = iter(range(step))
    return lambda what: what == "task" or next(steps, None) is not None or fail()


def _die_each(runs: list[tuple[PreprocessConfig, int]]) -> None:
    for config, step in runs:
        if (child := os.fork()) == 0:
            with _watched(_at_step(step, partial(os.kill, os.getpid(), signal.SIGKILL))):
                preprocess(config)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.processes
@pytest.mark.parametrize("every_step", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_run_that_was_killed_is_continued_with_the_same_bytes(tmp_path: Path, every_step: bool) -> None:
    _write_log(tmp_path)
    write_log(tmp_path / "day-2.csv", [("u1", 1, 10**6), ("u99", 99, 10**6 + 1)])
    for name, logs in (("first", ["log.csv"]), ("once", ["log.csv", "day-2.csv"])):
        _count(_config(tmp_path, name, *logs, filters=Filters()))
    old, runs = read_manifest(tmp_path / "first"), []
    for name, logs in (("whole", []), ("appended", ["day-2.csv"])):
        options: dict[str, Any] = {"filters": Filters(), "append": True} if logs else {}
        shutil.copytree(tmp_path / "first", tmp_path / name)
        done = _count(_config(tmp_path, name, *logs, **options))
        last = done["step"] - 1  # when the dataset is in place, but nothing was removed
        some = {last // 2, last} if logs else {0, last // 4, last // 2, last - 1, last}
        for step in range(last + 1) if every_step and not logs else sorted(some):
            shutil.copytree(tmp_path / "first", tmp_path / f"{name} {step}")
            runs.append((_config(tmp_path, f"{name} {step}", *logs, **options), step, done["task"], step == last))
    # Of one process, which imports all modules once.
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_die_each, args=([(config, step) for config, step, *_ in runs],))
    process.start()
    process.join()
    assert process.exitcode == 0
    previous, expected = 0, {of: bytes_in(tmp_path / of, versions=False) for of in ("whole", "once", "appended")}
    assert expected["appended"] == expected["once"]
    for config, step, num_tasks, is_last in runs:
        assert (read_manifest(config.out) == old) is not is_last
        left = _count(config)["task"]
        if not config.append:  # threads are ahead of each other
            assert left == num_tasks if is_last else left <= (previous if step else num_tasks) + 2
        previous = left
        assert bytes_in(Path(config.out), versions=False) == expected["once" if config.append else "whole"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EIO, errno.ENOSPC])
def test_a_run_beyond_a_quota_or_on_a_full_disk_is_continued_and_other_failures_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    _write_log(tmp_path)
    config, whole = _config(tmp_path, "out"), _count(_config(tmp_path, "whole"))

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    with _watched(_at_step(60 if code != errno.ENOSPC else 10**6, fail)), monkeypatch.context() as patch:
        if code == errno.ENOSPC:  # of Parquet files
            patch.setattr("evenrank.preprocess.writer.replacing", lambda path: nullcontext(Path("/dev/full")))
        message = f"^{config.out} could not be written: {os.strerror(code)}; it is unchanged, "
        with pytest.raises(DataError, match=message + ("check" if code == errno.EIO else "free some space and run it")):
            preprocess(config)
    assert (tmp_path / ".out.partial").exists() == (code != errno.EIO)
    assert (_count(config)["task"] < whole["task"]) == (code != errno.EIO)
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "whole")


def _end_early(config: PreprocessConfig) -> Path:
    """Let a run end in its last stage, as on a full disk; return its plan."""

    def end(*arguments: object) -> None:
        raise engine.UnfinishedError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "write_range", end)
        with pytest.raises(engine.UnfinishedError):
            preprocess(config)
    (plan,) = Path(config.out).parent.glob(".out.partial/*.json")
    return plan


def test_what_is_left_of_another_run_or_damaged_is_not_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, why = _config(tmp_path, "out"), "starting over: not as in the run that did not finish: "
    other = dataclasses.replace(config, filters=Filters())
    cases: list[tuple[PreprocessConfig, int, int, str | None, str]] = [
        (config, 900, 0o700, None, "going on with what an earlier run has finished"),
        (other, 900, 0o700, None, f"{why}options"),
        (config, 901, 0o700, None, f"{why}files"),
        (config, 900, 0o777, None, ""),  # results are pickled: a folder that others can write to does not count
        *((config, 900, 0o700, plan, why) for plan in ("", "[]", "null", "kinds", "{}", "[" * 10**5, "\0", "\udcff")),
    ]
    for second, num_events, mode, content, message in cases:
        _write_log(tmp_path)
        plan = _end_early(config)
        plan.parent.chmod(mode)
        if content == "kinds":
            content = json.dumps({**json.loads(plan.read_text()), "kinds": 7})
        if content is not None:
            plan.write_text(content, errors="surrogateescape")
        if num_events != 900:
            _write_log(tmp_path, num_events=num_events)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "evenrank.preprocess"):
            manifest = preprocess(second)
        assert [text if message != why else text[: len(why)] for text in caplog.messages] == [*filter(None, [message])]
        assert manifest == preprocess(dataclasses.replace(second, out=tmp_path / "other"))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv", "other", "out"]


def test_ids_that_began_like_integers_are_texts_also_for_a_run_that_goes_on(tmp_path: Path) -> None:
    # More rows than those that decide first, and then ids that are no plain integers.
    rows = [(str(number % 7), str(number % 5), number) for number in range(1500)]
    write_log(tmp_path / "log.csv", [*rows, ("007", "1", 10**6), ("7", "x", 10**6)])
    config, whole = (_config(tmp_path, name, filters=Filters(), split="none") for name in ("out", "whole"))
    _end_early(config)
    for of_run in (config, whole):
        ids = preprocess(of_run).ids
        assert {name: (of.kind, of.distinct) for name, of in ids.items()} == {
            "user_id": ("text", 9),
            "item_id": ("text", 6),
        }
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "whole")


def test_results_are_not_those_of_before_the_machine_started(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_BOOT_ID", here / "boot_id")
    plans = []
    for boot, config in (("1", _config(here, "out")), ("2", _config(Path(), "2", engine="ray", ray_address="auto"))):
        (here / "boot_id").write_text(boot)
        plans.append(run.plan_of(config, []))
    assert {name for name in plans[0] if plans[0][name] != plans[1][name]} == {"start of the machine"}
