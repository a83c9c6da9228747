import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.core.errors import DataError
from evenrank.dataloader.balance.metrics.log import LogRecord, read_json_lines
from evenrank.dataloader.balance.metrics.step_metrics import combine, summarize
from tests.dataloader.balance.metrics.example_steps import STEPS, TIMED_STEPS, step, write


def test_records_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, *STEPS, every=2)
    records = read_json_lines(path).records
    assert [(record.epoch, record.step, record.seen) for record in records] == [(0, 1, 2), (1, 0, 4)]
    for record, steps in zip(records, (STEPS[:2], STEPS[2:4]), strict=True):
        written = dataclasses.asdict(summarize(steps))
        assert {name: getattr(record, name) for name in written} == written
        assert (record.samples, record.tokens, record.sample_bytes) == (4, 40, 320)
        assert (record.before.tolist(), record.after.tolist()) == (steps[-1].before.tolist(), steps[-1].after.tolist())
        assert (record.lower_bound, record.is_balanced) == (4, True)
        assert record.before.dtype == record.rank_tokens.dtype == record.loaded_tokens.dtype == np.int64
        assert (record.rank_tokens.tolist(), record.loaded_tokens.tolist()) == ([24, 16], [16, 4])
        assert (record.rank_squares.tolist(), record.compute_seconds) == ([320, 160], None)


def test_measured_times_are_read_back(tmp_path: Path) -> None:
    write(tmp_path / "log.jsonl", *TIMED_STEPS)
    first, *others = read_json_lines(tmp_path / "log.jsonl").records
    assert (first.compute_seconds, first.wait_seconds, first.measured_steps) == (None, None, 0)
    for record, metrics in zip(others, TIMED_STEPS[1:], strict=True):
        assert record.is_balanced == metrics.is_balanced
        for name in ("compute_seconds", "wait_seconds"):
            assert getattr(record, name).tolist() == getattr(metrics, name).tolist()


def test_an_unbalanced_step_that_was_not_measured_is_a_record_of_no_steps(tmp_path: Path) -> None:
    write(tmp_path / "log.jsonl", step(0), step(1, is_balanced=False))
    log = read_json_lines(tmp_path / "log.jsonl")
    assert ([record.steps for record in log.records], log.skipped) == ([1, 0], 0)
    assert combine(log.records) == summarize([step(0)])


def _lines(path: Path, *steps: Any) -> list[str]:
    path.unlink(missing_ok=True)
    write(path, *steps)
    return path.read_text().splitlines()


def test_a_torn_last_line_is_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    text = "\n".join(_lines(path, *STEPS[:2])).encode()
    starts = [match.end() for match in re.finditer(b"\n", text)]
    for size in range(0, len(text) + 1, 7):
        path.write_bytes(text[:size])
        if 0 < size < starts[0] - 1:  # nothing but a part of the run
            with pytest.raises(DataError, match="has no record; line 1 is not a record"):
                read_json_lines(path)
            continue
        run, records, skipped = read_json_lines(path)
        is_whole = size in (0, *starts, *(start - 1 for start in starts), len(text))
        assert (run is None, skipped) == (size == 0, not is_whole)
        assert [record.step for record in records] == [0, 1][: (size >= starts[1] - 1) + (size == len(text))]


def test_a_line_has_the_fields_of_a_record_and_further_ones_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    run, line = _lines(path, step(3))
    values = json.loads(line)
    assert {field.name for field in dataclasses.fields(LogRecord)} < values.keys()
    more = {"more": {"a": [1]}}
    path.write_text(json.dumps({**json.loads(run), **more}) + "\n" + json.dumps({**values, **more}))
    log = read_json_lines(path)
    assert ([record.step for record in log.records], log.skipped, log.describe()) == ([3], 0, "1 step on 2 ranks")
    assert log.run is not None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"step": None}, "'step' is null"),
        ({"step": 1.5}, "'step' is 1.5"),
        ({"step": True}, "'step' is true"),
        ({"epoch": -1}, "'epoch' is -1"),
        ({"seen": 0}, "'seen' is below 1"),
        ({"is_balanced": 1}, "'is_balanced' is 1"),
        ({"is_balanced": None}, "'is_balanced' is null"),
        ({"ratio_before": "1"}, "'ratio_before' is \"1\""),
        ({"ratio_before": float("nan")}, "'ratio_before' is NaN"),
        ({"longest": 10**400}, "'longest' is 1000"),
        ({"plan_seconds": -0.5}, "'plan_seconds' is -0.5"),
        ({"plan_seconds": None}, "'plan_seconds' is null"),
        ({"before": 5}, "'before' is 5"),
        ({"before": []}, "'before' is []"),
        ({"before": None}, "'before' is null"),
        ({"before": [1, "2"]}, "'before' is [1, \"2\"]"),
        ({"before": [1, 2.5]}, "'before' is [1, 2.5]"),
        ({"before": [1, 1 << 63]}, "'before' is [1, 9223372036854775808]"),
        ({"before": [1, 2, 3]}, "'before' and 'after' differ in length"),
        ({"rank_squares": [1.0]}, "'before' and 'rank_squares' differ in length"),
        ({"rank_squares": [1, float("nan")]}, "'rank_squares' is [1, NaN]"),
        ({"compute_seconds": [1.0, 2.0, 3.0]}, "'before' and 'compute_seconds' differ in length"),
        ({"compute_seconds": [1, True]}, "'compute_seconds' is [1, true]"),
        ({"run": {"id": "a"}}, '\'run\' is {"id": "a"}'),
        ({"run": 1}, "'run' is 1"),
    ],
)
def test_a_line_with_a_bad_value_is_skipped_or_named(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    path = tmp_path / "log.jsonl"
    lines = _lines(path, *STEPS)
    lines[2] = json.dumps({**json.loads(lines[2]), **change})
    path.write_text("\n".join(lines) + "\n")
    _, records, skipped = read_json_lines(path)
    assert (len(records), skipped) == (len(STEPS) - 1, 1)
    path.write_text(lines[2])
    with pytest.raises(DataError) as raised:
        read_json_lines(path)
    assert str(raised.value).startswith(f"{path} has no record; line 1 is not a record of balancing metrics: {reason}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LogRecord)])
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "log.jsonl"
    values = json.loads(_lines(path, step(0))[1])
    del values[name]
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match=f"line 1 is not a record of balancing metrics: '{name}' is missing; give a"):
        read_json_lines(path)


@pytest.mark.parametrize("line", [b'{"epoch": 0, "st', b"\xff\xfe", b"[" * 100_000, b"[1]", b"{}"])
def test_a_line_that_is_no_record_is_skipped_and_counted(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "log.jsonl"
    write(path, step(0))
    path.write_bytes(path.read_bytes() + line + b"\n" + path.read_bytes().splitlines()[1])
    _, records, skipped = read_json_lines(path)
    assert (len(records), skipped) == (2, 1)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("none", "cannot be read: No such file"), (".", "is a folder, not a regular"), ("pipe", "is a named pipe, not")],
)
def test_a_log_that_cannot_be_read_is_named(tmp_path: Path, name: str, reason: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=f"{tmp_path / name} {reason}"):
        read_json_lines(tmp_path / name)


def test_records_of_different_numbers_of_steps_combine_to_the_summary_of_all_steps(tmp_path: Path) -> None:
    records = []
    for number, steps in enumerate((STEPS[:3], STEPS[3:], TIMED_STEPS)):
        write(tmp_path / f"{number}.jsonl", *steps, every=len(steps))
        records += read_json_lines(tmp_path / f"{number}.jsonl").records
    assert [record.steps for record in records] == [3, 2, 3]
    combined, together = combine(records), summarize([*STEPS, *TIMED_STEPS])
    assert dataclasses.asdict(combined) == pytest.approx(dataclasses.asdict(together))
