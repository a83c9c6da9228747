import dataclasses
from pathlib import Path

import numpy as np
import pytest

from evenrank.cli.reports import balance_page
from evenrank.cli.reports.balance_log import read_json_lines
from evenrank.cli.reports.balance_page import headline, render_page
from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics, combine
from evenrank.dataloader.balance.metrics.writers import JsonLines
from tests.cli.programs import EVENRANK, run_program
from tests.cli.reports.pages import check_browser_shows, external_parts, needs_chromium, sections_of, text_of
from tests.dataloader.balance.test_writers import STEPS, step, write

SCRIPT = "<script>alert('x')</script>"
SECTIONS = ["tiles", "loads", "moved", "times"]


def _page(tmp_path: Path, *steps: StepMetrics, name: str = "log.jsonl") -> str:
    (tmp_path / "log.jsonl").unlink(missing_ok=True)
    write(tmp_path / "log.jsonl", *steps)
    return render_page(read_json_lines(tmp_path / "log.jsonl").records, name=name)


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


def test_bytes_are_formatted_with_units() -> None:
    texts = {0: "0 bytes", 999: "999 bytes", 1500: "1.5 kB", 2_340_000: "2.3 MB", 7.25e12: "7,250.0 GB"}
    assert {num_bytes: balance_page.format_bytes(num_bytes) for num_bytes in texts} == texts


STAYS = dataclasses.replace(step(0, before=(7,), after=(7,)), moved_samples=0, moved_tokens=0, moved_bytes=0)


def test_the_headline_states_the_effect_of_balancing(tmp_path: Path) -> None:
    texts = []
    for number, steps in enumerate((STEPS, [STAYS])):
        write(tmp_path / str(number), *steps)
        records = read_json_lines(tmp_path / str(number)).records
        texts.append(headline(records, combine(records)))
    assert texts == [
        "Balancing reduced the load of the heaviest rank from 1.900 to 1.150 times the lower bound in 5 steps on 2 "
        "ranks; the cost model expects steps to be 1.65 times as fast.",
        "No sample moved to another rank in 1 step on 1 rank: the load of the heaviest rank was 1.750 times the lower "
        "bound.",
    ]


def test_the_page_has_the_numbers(tmp_path: Path) -> None:
    text = text_of(_page(tmp_path, *STEPS)).replace("\N{NO-BREAK SPACE}", " ")
    for tile in (
        "Load before balancing 1.900 heaviest rank / lower bound",
        "Load after balancing 1.150 heaviest rank",
        "Worst step after balancing 1.500 heaviest rank",
        "Expected speed-up 1.65x",
        "Tokens moved 25.0 %",
        "Bytes moved 80 bytes",
        "In the background 650.00 ms",  # 250 to gather, 400 to plan
        "Exposed 125.00 ms",
    ):
        assert tile in text, tile
    assert "samples 4 1 25.0 % tokens 40 10 25.0 % bytes 320 bytes 80 bytes 25.0 %" in text
    assert "typical step, epoch 0, step 1." in text  # 8 is the median of 6, 8, 10, 8, 6
    assert "Records: 5; the last is epoch 1, step 1." in text
    assert "downsampled" not in text


def test_the_page_is_self_contained_and_escapes_text(tmp_path: Path) -> None:
    html = _page(tmp_path, *STEPS, name=SCRIPT)
    assert html == render_page(read_json_lines(tmp_path / "log.jsonl").records, name=SCRIPT)
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


def test_the_command_prints_a_table_and_then_the_path_of_the_page(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "run.jsonl", every=2, window=2) as log:
        for metrics in STEPS[:4]:
            log(metrics)
    run = run_program(EVENRANK, "metrics", "run.jsonl", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert max(map(len, lines)) < 80
    assert lines[0] == "run.jsonl: 4 steps on 2 ranks"
    rows = [line.split() for line in lines]
    assert ["mean", "per", "step", "all", "steps", "last", "2"] in rows
    assert [row[-2:] for row in rows if "load" in row] == [["2.000", "2.250"], ["1.062", "1.125"], ["1.250", "1.250"]]
    assert ["expected", "speed-up", "1.88x", "2.00x"] in rows  # of 6, 8, 10, 8 and 4, 4, 5, 4
    assert ["tokens", "moved", "25.0%", "25.0%"] in rows
    assert ["in", "the", "background:", "plan", "(ms)", "375.00", "500.00"] in rows
    assert lines[-1] == "report: run-report.html"
    assert (tmp_path / "run-report.html").read_text().count("<svg") == 5


@needs_chromium
@pytest.mark.parametrize(("width", "columns"), [(390, 1), (1280, 2)])
def test_a_browser_shows_the_whole_page_on_a_phone_and_on_a_desktop(tmp_path: Path, width: int, columns: int) -> None:
    large = [dataclasses.replace(metrics, tokens=10**12, sample_bytes=10**15, moved_bytes=10**15) for metrics in STEPS]
    html = _page(tmp_path, *large, name="a-name-without-any-place-to-break-" * 5)
    check_browser_shows(tmp_path, html, width=width, columns=columns, sections=SECTIONS)
