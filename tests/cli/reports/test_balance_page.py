"""`evenrank metrics`: what it says of a log, and its page in a browser."""

import dataclasses
import json
import re
import subprocess
import sys
from html import escape, unescape
from pathlib import Path

import numpy as np
import pytest

from evenrank.cli.reports import balance_plots
from evenrank.cli.reports.balance_log import read_json_lines, sum_up
from evenrank.cli.reports.balance_page import headline, page_path, render_page
from evenrank.cli.reports.dataset_page import write_page
from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.metrics import StepMetrics
from evenrank.dataloader.balance.writers import JsonLines
from tests.cli.reports.test_dataset_page import CHROMIUM, MEASURE, _chromium
from tests.dataloader.balance.test_writers import STEPS, step, write

BIN = Path(sys.executable).parent
SCRIPT = "<script>alert('x')</script>"
SECTIONS = ["tiles", "loads", "moved", "times"]


def _page(tmp_path: Path, *steps: StepMetrics, name: str = "log.jsonl") -> str:
    write(tmp_path / "log.jsonl", *steps)
    return render_page(read_json_lines(tmp_path / "log.jsonl"), name=name)


def _text(html: str) -> str:
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html)))


def test_a_point_stands_for_neighbouring_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance_plots, "MOST_POINTS", 3)
    curve = balance_plots.thinned(np.array([10, 20, 30, 40, 50, 60, 70]), np.array([1.0, 2, 6, 5, 3, 4, 8]))
    assert balance_plots.per_point(7) == 3
    assert curve.at.tolist() == [30, 60, 70]
    assert curve.mean.tolist() == [3, 4, 8]
    assert curve.least.tolist() == [1, 3, 8]
    assert curve.greatest.tolist() == [6, 5, 8]


@pytest.mark.parametrize("records", [1, 299, 300, 301, 2000, 2001, 100_000])
def test_curves_have_a_bounded_number_of_points(records: int) -> None:
    values = np.arange(records, dtype=np.float64)
    curve = balance_plots.thinned(np.arange(1, records + 1), values)
    assert min(records, 150) <= len(curve.at) <= 300
    assert (curve.least[0], curve.greatest[-1], curve.at[-1]) == (0, records - 1, records)
    assert len(curve.at) == records or balance_plots.per_point(records) > 1


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (2_340_000, "2.3 MB"), (7.25e12, "7,250.0 GB")],
)
def test_bytes_are_said_in_units(number: float, words: str) -> None:
    assert balance_plots.as_bytes(number) == words


def test_the_headline_says_what_balancing_did(tmp_path: Path) -> None:
    write(tmp_path / "log.jsonl", *STEPS)
    records = read_json_lines(tmp_path / "log.jsonl")
    assert headline(records, sum_up(records)) == (
        "Balancing brought the heaviest rank's load from 1.900 to 1.150 times the lower bound over 5 steps on 2 ranks; "
        "the cost model expects steps to be 1.65 times as fast."
    )
    stays = dataclasses.replace(step(0, before=(7,), after=(7,)), moved_samples=0, moved_tokens=0, moved_bytes=0)
    write(tmp_path / "other.jsonl", stays)
    records = read_json_lines(tmp_path / "other.jsonl")
    assert headline(records, sum_up(records)) == (
        "Every sample stayed where it was dealt over 1 step on 1 rank: the heaviest rank's load was 1.750 times the "
        "lower bound."
    )


def test_the_page_has_the_numbers(tmp_path: Path) -> None:
    words = _text(_page(tmp_path, *STEPS))
    for tile in (
        "Load as dealt 1.900 heaviest rank / lower bound",
        "Load balanced 1.150 heaviest rank",
        "Worst step balanced 1.500 heaviest rank",
        "Expected speed-up 1.65x",
        "Tokens moved 25.0\N{NO-BREAK SPACE}%",
        "Bytes moved 80 bytes",
        "In the background 650.00 ms",  # 250 to gather, 400 to plan
        "Exposed 125.00 ms",
    ):
        assert re.sub(r"\s+", " ", tile) in words, tile
    assert "samples 4 1 25.0 % tokens 40 10 25.0 % bytes 320 bytes 80 bytes 25.0 %" in words
    assert "typical step, epoch 0, step 1:" in words  # 8 is the median of 6, 8, 10, 8, 6
    assert "Records: 5, the last of epoch 1, step 1." in words
    assert "thinned" not in words


def test_the_page_stands_alone_and_shows_text_as_text(tmp_path: Path) -> None:
    html = _page(tmp_path, *STEPS, name=SCRIPT)
    assert html == render_page(read_json_lines(tmp_path / "log.jsonl"), name=SCRIPT)
    assert re.findall(r'<section id="(\w+)"', html) == SECTIONS
    assert html.count("<svg") == 5
    assert re.findall(r"<script|<link|<img|<iframe|@import|(?:src|href)=.[^#]|url\([^#]", html) == []
    assert html.count("&lt;script&gt;alert(") == 2  # title and heading
    assert "{%" not in html


def test_where_nothing_moved_there_is_no_picture_of_it(tmp_path: Path) -> None:
    stays = dataclasses.replace(step(0, after=(6, 2)), moved_samples=0, moved_tokens=0, moved_bytes=0)
    html = _page(tmp_path, stays, stays)
    assert html.count("<svg") == 4
    assert "What moved Nothing moved to another rank." in _text(html)


def test_many_records_are_thinned_and_the_page_says_so(tmp_path: Path) -> None:
    html = _page(tmp_path, *(step(number) for number in range(2100)))
    assert "a point is the mean of 7 neighbouring records" in _text(html)
    assert len(html) < 300_000


def test_many_ranks_are_drawn_as_sorted_lines(tmp_path: Path) -> None:
    loads = tuple(range(100))
    words = _text(_page(tmp_path, step(0, before=loads, after=loads)))
    assert "ranks, heaviest first" in words
    assert "what a curve lacks to its left end" in words


def test_far_longer_times_are_cut_off_and_the_picture_says_so(tmp_path: Path) -> None:
    slow = dataclasses.replace(step(0), plan_seconds=90.0)
    words = _text(_page(tmp_path, slow, *(dataclasses.replace(step(0), plan_seconds=0.1) for _ in range(99))))
    assert words.count("cut off: up to 9e+04 ms") == 1


def test_the_page_goes_beside_the_log_and_never_over_it(tmp_path: Path) -> None:
    log = tmp_path / "run.1.jsonl"
    log.touch()
    (tmp_path / "link.html").symlink_to(log)
    assert page_path(log, None) == tmp_path / "run.1-report.html"
    assert page_path(log, tmp_path / "x.html") == tmp_path / "x.html"
    for chosen in (log, tmp_path / "link.html"):
        with pytest.raises(ConfigError, match="is the log, which the page would replace"):
            page_path(log, chosen)
    with pytest.raises(ConfigError, match="is a folder; --html needs the name of a file"):
        page_path(log, tmp_path)


def _run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN / "evenrank", "metrics", *arguments], capture_output=True, text=True, cwd=cwd)


def test_the_command_prints_a_table_and_then_where_the_page_is(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "run.jsonl", every=2, window=2) as log:
        for metrics in STEPS[:4]:
            log(metrics)
    run = _run("run.jsonl", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert max(map(len, lines)) < 80
    assert lines[0] == "run.jsonl: 4 steps on 2 ranks"
    rows = [line.split() for line in lines]
    assert ["mean", "of", "a", "step", "all", "steps", "last", "2"] in rows
    assert [row[-2:] for row in rows if "load" in row] == [["2.000", "2.250"], ["1.062", "1.125"], ["1.250", "1.250"]]
    assert ["expected", "speed-up", "1.88x", "2.00x"] in rows  # of 6, 8, 10, 8 and 4, 4, 5, 4
    assert ["tokens", "moved", "25.0%", "25.0%"] in rows
    assert ["in", "the", "background:", "plan", "(ms)", "375.00", "500.00"] in rows
    assert lines[-1] == "report: run-report.html"
    assert (tmp_path / "run-report.html").read_text().count("<svg") == 5


def test_a_log_is_shown_where_there_is_no_torch(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", *STEPS)
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['evenrank', 'metrics', 'run.jsonl', '--html', 'a/b.html']"
        "; from evenrank.cli.main import main; main()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.endswith("report: a/b.html\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "error: nowhere.jsonl cannot be read: No such file or directory; give a file that "),
        (["empty.jsonl"], "error: empty.jsonl has no record yet; the job writes one after every `every` steps"),
        (["bad.jsonl"], "error: bad.jsonl, line 1 is not a record of balancing metrics: 'step' is missing; give"),
        (["run.jsonl", "--html", "run.jsonl"], "error: run.jsonl is the log, which the page would replace; choose"),
        (["run.jsonl", "--html", "."], "error: . is a folder; --html needs the name of a file"),
        (["run.jsonl", "--html", "run.jsonl/x.html"], "error: run.jsonl/x.html could not be written: "),
    ],
)
def test_a_mistake_is_one_line_and_exits_with_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    write(tmp_path / "run.jsonl", *STEPS)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bad.jsonl").write_text('{"epoch": 0}\n')
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    run = _run(*arguments, cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith(message)
    assert run.stderr.count("\n") == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_help_teaches_with_an_example(tmp_path: Path) -> None:
    run = _run("--help", cwd=tmp_path)
    assert run.returncode == 0
    assert "evenrank metrics out/balance.jsonl --html balance.html\n" in run.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize(("width", "columns"), [(390, 1), (1280, 2)])
def test_a_browser_shows_all_of_it_on_a_phone_and_on_a_desktop(tmp_path: Path, width: int, columns: int) -> None:
    large = [dataclasses.replace(metrics, tokens=10**12, bytes=10**15, moved_bytes=10**15) for metrics in STEPS]
    html = _page(tmp_path, *large, name="a-name-without-any-place-to-break-" * 5)
    page, frame, picture, said = (tmp_path / name for name in ("page.html", "frame.html", "page.png", "said"))
    write_page(page, html)
    measured = escape(html.replace("</body>", f"{MEASURE}</body>"))
    frame.write_text(
        "<!DOCTYPE html><title></title><script>console.log('here')</script>"
        f'<iframe style="width: {width}px" frameborder=0 srcdoc="{measured}">'
    )
    dom = _chromium(tmp_path, frame, "--dump-dom", "--enable-logging", f"--log-file={said}")
    title = dom[dom.index("<title>") + len("<title>") : dom.index("</title>")]
    expected = {"window": width, "tooWide": 0, "columns": columns, "readable": True, "sections": SECTIONS}
    assert json.loads(unescape(title)) == expected
    on_console = re.findall(r"CONSOLE.*?\] (.*), source", said.read_text(errors="replace"))
    assert on_console == ['"here"']  # which is the frame's own; the page's would stand beside it
    _chromium(tmp_path, page, f"--window-size={width},844", f"--screenshot={picture}")
    assert int.from_bytes(picture.read_bytes()[16:20], "big") == width  # in a PNG's header
    assert picture.stat().st_size > 10_000  # a page of one colour is smaller
