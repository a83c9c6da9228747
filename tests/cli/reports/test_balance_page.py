import dataclasses
from pathlib import Path

import numpy as np
import pytest

from evenrank.cli.reports import balance_page
from evenrank.cli.reports.balance_page import headline, render_page, typical_record
from evenrank.dataloader.balance.metrics.log_reader import BalanceLog, read_json_lines
from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics, combine
from tests.cli.reports.pages import check_browser_shows, external_parts, needs_chromium, sections_of, text_of
from tests.dataloader.balance.metrics.example_steps import STEPS, TIMED_STEPS, step, timed, write

SCRIPT = "<script>alert('x')</script>"
SECTIONS = ["tiles", "loads", "moved", "times"]


def _log(tmp_path: Path, *steps: StepMetrics, **options: int) -> BalanceLog:
    (tmp_path / "log.jsonl").unlink(missing_ok=True)
    write(tmp_path / "log.jsonl", *steps, **options)
    return read_json_lines(tmp_path / "log.jsonl")


def _page(tmp_path: Path, *steps: StepMetrics, name: str = "log.jsonl") -> str:
    return render_page(_log(tmp_path, *steps), name=name)


def test_a_point_stands_for_consecutive_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance_page, "MAX_POINTS", 3)
    curve = balance_page.downsample(np.array([10.0, 20, 30, 40, 50, 60, 70]), np.array([1.0, 2, 6, 5, 3, 4, 8]))
    assert balance_page.records_per_point(7) == 3
    assert (curve.steps.tolist(), curve.mean.tolist()) == ([30, 60, 70], [3, 4, 8])
    assert (curve.minimum.tolist(), curve.maximum.tolist()) == ([1, 3, 8], [6, 5, 8])


@pytest.mark.parametrize("records", [1, 300, 301, 2001])
def test_curves_have_a_bounded_number_of_points(records: int) -> None:
    values = np.arange(records, dtype=np.float64)
    curve = balance_page.downsample(values + 1, values)
    assert min(records, 150) <= len(curve.steps) <= 300
    assert (curve.minimum[0], curve.maximum[-1], curve.steps[-1]) == (0, records - 1, records)
    assert len(curve.steps) == records or balance_page.records_per_point(records) > 1


STAYS = step(0, before=(7,), after=(7,), moved_samples=0, moved_tokens=0, moved_bytes=0)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (
            STEPS,
            "By the cost, ranks were idle for 44.7% of their time before balancing and for 8.7% after it in 5 steps "
            "on 2 ranks, a speed-up of 1.65x.",
        ),
        (
            TIMED_STEPS,
            "By the cost, ranks were idle for 33.3% of their time before balancing and for 0.0% after it in 4 steps "
            "on 2 ranks, a speed-up of 1.50x. Measured in 2 of these, they were idle for 6.2%, and for 31.2% in the 1 "
            "left unbalanced for comparison, a speed-up of 2.00x.",
        ),
        (
            TIMED_STEPS[:2],
            "By the cost, ranks were idle for 33.3% of their time before balancing and for 0.0% after it in 2 steps "
            "on 2 ranks, a speed-up of 1.50x. Measured in 1 of these, they were idle for 6.2% with balancing.",
        ),
    ],
)
def test_the_headline_states_the_effect_of_balancing(tmp_path: Path, steps: list[StepMetrics], text: str) -> None:
    log = _log(tmp_path, *steps)
    assert headline(log, combine(log.records)) == text


def test_the_page_has_the_numbers(tmp_path: Path) -> None:
    text = text_of(_page(tmp_path, *STEPS))
    for tile in (
        "idle before balancing, by the cost 44.7%",
        "idle after balancing, by the cost 8.7%",
        "speed-up, by the cost 1.65x",
        "steps whose time one sample sets 0.0% tokens of the most expensive sample 16",
        "samples per step, all ranks together 4 tokens per step 40 bytes per step 320",
        "samples moved to another rank 25.0% tokens moved 25.0%",
        "bytes moved per step 80",
        "in the background: metadata all-gather 250.00 ms in the background: plan 400.00 ms",
        "exposed: exchange 125.00 ms exposed: wait for plans 0.00 ms",
    ):
        assert tile in text, tile
    assert "measured" not in text[: text.index("Loads")]
    assert "typical step, epoch 0, step 1." in text  # 8 is the median of 6, 8, 10, 8, 6
    assert "Records: 5; the last is epoch 1, step 1." in text
    assert "downsampled" not in text


def test_what_was_measured_is_beside_what_was_promised(tmp_path: Path) -> None:
    html = _page(tmp_path, *TIMED_STEPS)
    text = text_of(html)
    for tile in (
        "idle before balancing, measured 31.2%",
        "idle after balancing, measured 6.2%",
        "speed-up, measured 2.00x",
        "time of a step 1,000.00 ms",
    ):
        assert tile in text, tile
    assert html.count(">measured<") == 2
    uncompared = text_of(_page(tmp_path, *TIMED_STEPS[:2]))
    assert "idle after balancing, measured 6.2%" in uncompared
    assert "speed-up, measured" not in uncompared


def test_a_log_of_unbalanced_steps_alone_has_a_page(tmp_path: Path) -> None:
    log = _log(tmp_path, timed(1, compute=(1, 2), wait=(1, 0), is_balanced=False))
    assert [record.steps for record in log.records] == [0]
    text = text_of(render_page(log, name="log"))
    assert "of which only unbalanced ones were recorded" in text
    assert "idle before balancing, measured 25.0%" in text


@pytest.mark.parametrize(("heaviest", "chosen"), [([9], 9), ([9, 5, 7], 7), ([4, 8, 5, 6], 5), ([5, 5, 9], 5)])
def test_the_typical_record_has_the_median_imbalance(tmp_path: Path, heaviest: list[int], chosen: int) -> None:
    records = _log(tmp_path, *(step(0, before=(load, 1)) for load in heaviest)).records
    assert typical_record(records).before.max() == chosen


def test_a_step_left_unbalanced_is_not_typical_if_others_are_recorded(tmp_path: Path) -> None:
    records = _log(tmp_path, step(0, before=(9, 1)), step(1, before=(5, 5), is_balanced=False)).records
    assert typical_record(records).is_balanced
    assert not typical_record(records[1:]).is_balanced


def test_the_page_is_self_contained_and_escapes_text(tmp_path: Path) -> None:
    html = _page(tmp_path, *STEPS, name=SCRIPT)
    assert html == render_page(read_json_lines(tmp_path / "log.jsonl"), name=SCRIPT)
    assert sections_of(html) == SECTIONS
    assert html.count("<svg") == 5
    assert external_parts(html) == []
    assert html.count("&lt;script&gt;alert(") == 2  # title and heading
    assert "{%" not in html


def test_the_page_states_how_it_shows_unusual_logs(tmp_path: Path) -> None:
    html = _page(tmp_path, STAYS, STAYS)
    assert html.count("<svg") == 4
    assert "Moved samples No sample moved to another rank." in text_of(html)
    html = _page(tmp_path, *(step(number) for number in range(2100)))
    assert "a point is the mean of 7 consecutive records" in text_of(html)
    assert len(html) < 300_000
    loads = tuple(range(100))
    text = text_of(_page(tmp_path, step(0, before=loads, after=loads)))
    assert "ranks, heaviest first" in text
    assert "The drop from the left end of a curve" in text
    slow, quick = (dataclasses.replace(step(0), plan_seconds=seconds) for seconds in (90.0, 0.1))
    assert text_of(_page(tmp_path, slow, *[quick] * 99)).count("cut off: up to 90,000.0 ms") == 1


@needs_chromium
@pytest.mark.parametrize(("width", "columns"), [(390, 1), (1280, 2)])
def test_a_browser_shows_the_whole_page_on_a_phone_and_on_a_desktop(tmp_path: Path, width: int, columns: int) -> None:
    large = [dataclasses.replace(metrics, tokens=10**12, sample_bytes=10**15, moved_bytes=10**15) for metrics in STEPS]
    html = _page(tmp_path, *large, name="a-name-without-any-place-to-break-" * 5)
    check_browser_shows(tmp_path, html, width=width, columns=columns, sections=SECTIONS)
