import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.core.errors import DataError
from evenrank.dataloader.balance.metrics.log import LogRecord, read_json_lines
from evenrank.dataloader.balance.metrics.step_metrics import combine, summarize
from tests.dataloader.balance.metrics.example_steps import STEPS, TIMED_STEPS, step, write


def test_records_are_read_back_as_they_were_written_and_combine_to_the_summary_of_all_steps(tmp_path: Path) -> None:
    records: list[LogRecord] = []
    # The last step was not balanced and not measured: a record of no steps.
    written = STEPS[:2], STEPS[2:4], TIMED_STEPS[1:], [step(9, is_balanced=False)]
    for number, steps in enumerate(written):
        write(path := tmp_path / f"{number}.jsonl", *steps, every=len(steps))
        records += read_json_lines(path).records
    keys = [(record.epoch, record.step, record.seen, record.steps) for record in records]
    assert keys == [(0, 1, 2, 2), (1, 0, 2, 2), (0, 3, 3, 2), (0, 9, 1, 0)]
    for record, steps in zip(records, written, strict=True):
        summary = dataclasses.asdict(summarize(steps))
        assert {name: getattr(record, name) for name in summary} == summary
        for name in {field.name for field in dataclasses.fields(LogRecord)} - {*summary, "seen"}:
            value, of_step = getattr(record, name), getattr(steps[-1], name)
            assert np.array_equal(value, of_step), name
            assert getattr(value, "dtype", None) == getattr(of_step, "dtype", None), name
    together = summarize([one for steps in written for one in steps])
    assert dataclasses.asdict(combine(records)) == pytest.approx(dataclasses.asdict(together))


def test_a_torn_last_line_is_skipped_and_counted_and_further_fields_do_not_matter(tmp_path: Path) -> None:
    write(path := tmp_path / "log.jsonl", *STEPS[:2])
    lines = [json.dumps({**json.loads(line), "more": {"a": [1]}}) for line in path.read_text().splitlines()]
    text = "\n".join(lines).encode()
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
    path.write_bytes(text)
    assert read_json_lines(path).describe() == "2 steps on 2 ranks"


# What a line has instead, and why it is not a record.
BAD: list[tuple[Any, str]] = [
    *(({field.name: ...}, f"'{field.name}' is missing") for field in dataclasses.fields(LogRecord)),
    ({"step": None}, "'step' is null"),
    ({"step": True}, "'step' is true"),
    ({"epoch": -1}, "'epoch' is -1"),
    ({"seen": 0}, "'seen' is below 1"),
    ({"is_balanced": 1}, "'is_balanced' is 1"),
    ({"ratio_before": "1"}, "'ratio_before' is \"1\""),
    ({"ratio_before": float("nan")}, "'ratio_before' is NaN"),
    ({"longest": 10**400}, "'longest' is 1000"),
    ({"before": 5}, "'before' is 5"),
    ({"before": []}, "'before' is []"),
    ({"before": [1, 2.5]}, "'before' is [1, 2.5]"),
    ({"before": [1, 1 << 63]}, "'before' is [1, 9223372036854775808]"),
    ({"before": [1, 2, 3]}, "'before' and 'after' differ in length"),
    ({"rank_squares": [1.0]}, "'before' and 'rank_squares' differ in length"),
    ({"compute_seconds": [1, True]}, "'compute_seconds' is [1, true]"),
    ({"run": {"id": "a"}}, '\'run\' is {"id": "a"}'),
    ({"run": 1}, "'run' is 1"),
    (b"[" * 100_000, "it is not JSON"),
    (b"[1]", "it is not an object"),
]


@pytest.mark.parametrize(("change", "reason"), BAD)
def test_a_line_with_a_bad_value_is_skipped_or_named(tmp_path: Path, change: Any, reason: str) -> None:
    write(path := tmp_path / "log.jsonl", *STEPS)
    lines = path.read_bytes().splitlines()
    if isinstance(change, dict):
        values = {**json.loads(lines[2]), **change}
        change = json.dumps({name: value for name, value in values.items() if value is not ...}).encode()
    path.write_bytes(b"\n".join([*lines[:2], change, *lines[3:]]))
    _, records, skipped = read_json_lines(path)
    assert (len(records), skipped) == (len(STEPS) - 1, 1)
    path.write_bytes(change)
    with pytest.raises(DataError) as raised:
        read_json_lines(path)
    assert str(raised.value).startswith(f"{path} has no record; line 1 is not a record of balancing metrics: {reason}")
    assert "\n" not in str(raised.value)
