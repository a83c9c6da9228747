import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from evenrank.cli.reports.balance_log import column, cumulative_steps, read_json_lines, typical_record
from evenrank.core.errors import DataError
from evenrank.dataloader.balance.metrics.step_metrics import LogRecord, StepMetrics, combine, log_key, summarize
from evenrank.dataloader.balance.metrics.writers import JsonLines
from tests.dataloader.balance.test_writers import STEPS, step, write


def test_records_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with JsonLines(path, every=2, window=3) as log:
        for metrics in STEPS:
            log(metrics)
    records = read_json_lines(path).records
    assert [(record.epoch, record.step, record.seen) for record in records] == [(0, 1, 2), (1, 0, 4)]
    for record, steps in zip(records, (STEPS[:2], STEPS[1:4]), strict=True):
        written = dataclasses.asdict(summarize(steps))
        assert {name: getattr(record, name) for name in written} == written
        assert (record.samples, record.tokens, record.sample_bytes) == (4, 40, 320)
        assert (record.before.tolist(), record.after.tolist()) == (steps[-1].before.tolist(), steps[-1].after.tolist())
        assert record.lower_bound == 4
        assert record.before.dtype == record.after.dtype == np.int64


def test_a_torn_last_line_is_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, *STEPS[:2])
    text = path.read_bytes()
    first = text.index(b"\n")
    for size in range(first, len(text)):
        path.write_bytes(text[:size])
        is_whole = size == len(text) - 1  # it lacks only its newline
        records, skipped = read_json_lines(path)
        assert [record.step for record in records] == [0, 1][: 1 + is_whole]
        assert skipped == (first + 1 < size and not is_whole)


def test_a_line_has_the_fields_of_a_record_and_further_ones_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, step(3))
    values = json.loads(path.read_text())
    assert sorted(values) == sorted(log_key(field) for field in dataclasses.fields(LogRecord))
    path.write_text(json.dumps({**values, "more": {"a": [1]}}) + "\n")
    assert [record.step for record in read_json_lines(path).records] == [3]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"step": None}, "'step' is null"),
        ({"step": 1.5}, "'step' is 1.5"),
        ({"step": True}, "'step' is true"),
        ({"epoch": -1}, "'epoch' is -1"),
        ({"steps": 0}, "'steps' is below 1"),
        ({"ratio_before": "1"}, "'ratio_before' is \"1\""),
        ({"ratio_before": float("nan")}, "'ratio_before' is NaN"),
        ({"speedup": 10**400}, "'speedup' is 1000"),
        ({"plan_seconds": -0.5}, "'plan_seconds' is -0.5"),
        ({"before": 5}, "'before' is 5"),
        ({"before": []}, "'before' is []"),
        ({"before": [1, "2"]}, "'before' is [1, \"2\"]"),
        ({"before": [1, 1 << 63]}, "'before' is [1, 9223372036854775808]"),
        ({"before": [1, 2, 3]}, "'before' and 'after' differ in length"),
    ],
)
def test_a_line_with_a_bad_value_is_skipped_or_named(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    path = tmp_path / "log.jsonl"
    write(path, *STEPS)
    lines = path.read_text().splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), **change})
    path.write_text("\n".join(lines) + "\n")
    records, skipped = read_json_lines(path)
    assert (len(records), skipped) == (len(STEPS) - 1, 1)
    path.write_text(lines[2])
    with pytest.raises(DataError) as raised:
        read_json_lines(path)
    assert str(raised.value).startswith(f"{path} has no record; line 1 is not a record of balancing metrics: {reason}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("line", [b'{"epoch": 0, "st', b"\xff\xfe", b"[" * 100_000, b"[1]", b"{}"])
def test_a_line_that_is_no_record_is_skipped_and_counted(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "log.jsonl"
    write(path, step(0))
    whole = path.read_bytes()
    path.write_bytes(whole + line + b"\n" + whole)
    records, skipped = read_json_lines(path)
    assert (len(records), skipped) == (2, 1)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("none", "cannot be read: No such file"), (".", "is not a regular file"), ("pipe", "is not a regular file")],
)
def test_a_log_that_cannot_be_read_is_named(tmp_path: Path, name: str, reason: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=f"{tmp_path / name} {reason}.*; give a file that on_step=JsonLines"):
        read_json_lines(tmp_path / name)


def _write_jobs(path: Path, *jobs: tuple[int, list[StepMetrics]]) -> Sequence[LogRecord]:
    """Write the steps of one job after the other, each with a record of every so many; read the records."""
    for every, steps in jobs:
        with JsonLines(path, every=every, window=every) as log:
            for metrics in steps:
                log(metrics)
    return read_json_lines(path).records


def test_steps_are_added_up_where_a_job_was_resumed(tmp_path: Path) -> None:
    jobs = [(every, STEPS[:number]) for every, number in ((1, 3), (2, 5), (2, 2), (1, 1))]
    records = _write_jobs(tmp_path / "log.jsonl", *jobs)
    assert column(records, "seen").tolist() == [1, 2, 3, 2, 4, 2, 1]
    assert cumulative_steps(records).tolist() == [1, 2, 3, 5, 7, 9, 10]


def test_records_of_different_numbers_of_steps_combine_to_the_summary_of_all_steps(tmp_path: Path) -> None:
    records = _write_jobs(tmp_path / "log.jsonl", (3, STEPS[:3]), (2, STEPS[3:]))
    assert column(records, "steps").tolist() == [3, 2]
    assert dataclasses.asdict(combine(records)) == pytest.approx(dataclasses.asdict(summarize(STEPS)))


@pytest.mark.parametrize(("heaviest", "chosen"), [([9], 9), ([9, 5, 7], 7), ([4, 8, 5, 6], 5), ([5, 5, 9], 5)])
def test_the_typical_record_has_the_median_imbalance(tmp_path: Path, heaviest: list[int], chosen: int) -> None:
    write(tmp_path / "log.jsonl", *(step(0, before=(load, 1)) for load in heaviest))
    assert typical_record(read_json_lines(tmp_path / "log.jsonl").records).before.max() == chosen
