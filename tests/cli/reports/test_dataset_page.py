"""The report of `evenrank inspect`: its numbers by hand, its page in a browser."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from html import escape, unescape
from pathlib import Path

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from evenrank.cli.inspect import inspect_command
from evenrank.cli.reports import dataset_data, dataset_plots
from evenrank.cli.reports.dataset_page import page_path, render_page, write_page
from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.schema import DataFile, Manifest, SourceFile, Split, read_manifest
from evenrank.datasets.store import SequenceStore

SCRIPT = "<script>alert('x')</script>"
SECTIONS = ["counts", "vocabulary", "lengths", "items", "time", "context", "audit", "balance", "sources"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def _split(name: str, lengths: list[int]) -> Split:
    known = {"min": min(lengths), "max": max(lengths), "mean": float(np.mean(lengths))} if lengths else {}
    file = DataFile(path=f"{name}/part-00000.parquet", rows=len(lengths), sha256="0" * 64)
    return Split(files=(file,), rows=len(lengths), interactions=sum(lengths), lengths=known)


def _manifest(**changes: object) -> Manifest:
    settings = {
        "schema_version": 1,
        "dataset": f"tiny {SCRIPT}",
        "sources": (SourceFile(path="raw/tiny.csv", bytes=1234, sha256="0" * 64),),
        "options": {"seed": 7, "note": SCRIPT, "audit": {"eval events before the newest train event": 1234}},
        "splits": {"train": _split("train", [3, 0, 4]), "eval": _split("eval", [1])},
        "contextual": ("country",),
        "extra_events": {},
        "vocabulary_sizes": {"user_id": 5, "item_id": 31, "country": 3},
        "context_labels": {"country": (None, SCRIPT, "Peru")},
        "content_hash": "ab" * 32,
    }
    return Manifest(**{**settings, **changes})  # type: ignore[arg-type]


def _store(lengths: list[int], items: list[int], days: Sequence[float], countries: list[int]) -> SequenceStore:
    return SequenceStore(
        manifest=_manifest(),
        split="any",
        offsets=np.cumsum([0, *lengths]),
        events={
            "item_id": np.array(items, dtype=np.int64),
            "action": np.zeros(len(items), dtype=np.int32),
            "timestamp_ms": (np.array(days, dtype=np.float64) * dataset_data.DAY_MS).astype(np.int64),
        },
        rows={"user_id": np.arange(len(lengths)), "country": np.array(countries, dtype=np.int64)},
    )


# Items: 30 five times, 7 twice, 9 once. Days 100 to 150; country 1 twice, 2 once, missing once.
STORES = {
    "train": _store([3, 0, 4], [30, 30, 7, 30, 9, 30, 30], [100, 100.5, 101, 150, 150, 150, 150], [1, 0, 1]),
    "eval": _store([1], [7], [100], [2]),
}
EMPTY = {"train": _store([], [], [], []), "eval": _store([], [], [], [])}


@pytest.fixture(params=[1, 3, 1 << 22])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_data, "_CHUNK", request.param)


def test_lengths_are_counted_per_doubling() -> None:
    histogram = dataset_data.length_histogram(STORES)
    assert histogram.edges.tolist() == [1, 2, 3, 4, 5]
    # One row of three has length 3, in a bin of log2(4 / 3) doublings; one has 4, in log2(5 / 4).
    assert histogram.density["train"] == pytest.approx([0, 0, 1 / 3 / np.log2(4 / 3), 1 / 3 / np.log2(5 / 4)])
    assert histogram.density["eval"] == pytest.approx([1, 0, 0, 0])
    assert histogram.empty == {"train": 1, "eval": 0}


@pytest.mark.parametrize("longest", [1, 2, 7, 8, 9, 1000, 4095, 4096, 200_001])
def test_every_length_has_a_bin(longest: int) -> None:
    histogram = dataset_data.length_histogram({"train": _store([longest, 1], [], [], [])})
    assert np.sum(histogram.density["train"] * np.diff(np.log2(histogram.edges))) == pytest.approx(1)


@pytest.mark.usefixtures("_chunks")
def test_items_are_counted_over_all_splits() -> None:
    popularity = dataset_data.item_popularity(STORES)
    assert popularity.counts.tolist() == [5, 2, 1]
    assert popularity.top(0.01) == (1, 5 / 8)
    assert popularity.top(0.5) == (2, 7 / 8)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("far", [3, -5, 2**62])
def test_values_are_counted_whatever_their_size(far: int) -> None:
    values, counts = dataset_data.count_values(
        [np.array([4, far, 4]), np.array([], dtype=np.int64), np.array([9, 4, far])]
    )
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == {4: 3, far: 2, 9: 1}
    assert values.tolist() == sorted(values.tolist())


@pytest.mark.usefixtures("_chunks")
def test_events_are_counted_by_the_day() -> None:
    line = dataset_data.timeline(STORES)
    assert line is not None
    assert (line.start_ms, line.width_ms, line.unit) == (100 * dataset_data.DAY_MS, dataset_data.DAY_MS, "day")
    assert line.counts.tolist() == [3, 1, *[0] * 48, 4]


@pytest.mark.parametrize(
    ("first", "last", "unit"),
    [(0, 0, "second"), (0, 0.5, "hour"), (-3, 300, "week"), (0, 8000, "13 weeks"), (0, 400 * 364, "3.3 years")],
)
def test_stretches_of_time_suit_the_range(first: float, last: float, unit: str) -> None:
    line = dataset_data.timeline({"train": _store([2], [1, 1], [first, last], [0])})
    assert line is not None
    assert line.unit == unit
    assert line.counts.sum() == 2
    assert (line.counts[0], line.counts[-1]) == ((2, 2) if first == last else (1, 1))
    assert len(line.counts) <= 120
    assert dataset_plots.timeline_svg(line).startswith("<svg")


@pytest.mark.parametrize("day", [-1e7, 1e9])
def test_times_beyond_calendars_are_numbers(day: float) -> None:
    line = dataset_data.timeline({"train": _store([2], [1, 1], [day, day + 1], [0])})
    assert line is not None
    assert "ms since 1970" in dataset_plots.timeline_svg(line)
    assert dataset_plots.as_time(line.start_ms, precise=False).endswith(" ms")


def test_context_values_have_labels() -> None:
    found = dataset_data.context_values(STORES, "country")
    assert (found.rows, found.other_values, found.other_rows) == (4, 0, 0)
    assert found.values == ((SCRIPT, 2), (None, 1), ("Peru", 1))
    found = dataset_data.context_values(STORES, "country", most=1)
    assert (found.values, found.other_values, found.other_rows) == (((SCRIPT, 2),), 2, 2)


def test_equal_lengths_leave_nothing_to_gain() -> None:
    # Whatever is longer than 2048 costs the same, because it is cut.
    (gain,) = dataset_data.balancing_gain(np.array([2048, 2048, 5000, 100_000]), ranks=[2], batch_size=2)
    assert not gain.repeated
    assert gain.ratios == {"identity": 1, "karmarkar-karp": 1, "lpt-swap": 1, "min-move": 1}
    assert gain.speedups == {"identity": 1, "karmarkar-karp": 1, "lpt-swap": 1, "min-move": 1}


def test_the_gain_is_that_of_the_drawn_steps() -> None:
    # Every step holds all four rows. Dealt badly, in a third of the draws for each pairing, two long ones meet.
    long, short = (24 * (10 * s * 1024**2 + 2 * s**2 * 1024) for s in (2000, 100))
    (gain,) = dataset_data.balancing_gain(np.array([2000, 100, 2000, 100]), ranks=[2], batch_size=2, steps=30)
    bad = 2 * long / (long + short)
    met = round((gain.ratios["identity"] - 1) * 30 / (bad - 1))
    assert 0 < met < 30
    assert gain.ratios["identity"] == pytest.approx((met * bad + 30 - met) / 30)
    assert gain.ratios["karmarkar-karp"] == gain.ratios["lpt-swap"] == 1
    assert gain.speedups["lpt-swap"] == pytest.approx(gain.ratios["identity"])


def test_a_small_split_is_drawn_from_repeatedly() -> None:
    gains = dataset_data.balancing_gain(np.array([5, 9, 0]), ranks=[1, 4], batch_size=2)
    assert [(gain.ranks, gain.repeated) for gain in gains] == [(1, False), (4, True)]
    assert dataset_data.balancing_gain(np.array([], dtype=np.int64)) == ()
    assert dataset_data.balancing_gain(np.array([0]), ranks=[2], batch_size=1)[0].speedups["lpt-swap"] == 1


def _sections(html: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', html)


def test_the_page_stands_alone_and_shows_text_as_text() -> None:
    html = render_page(_manifest(), STORES, name=SCRIPT)
    assert html == render_page(_manifest(), STORES, name=SCRIPT)
    assert _sections(html) == SECTIONS
    assert html.count("<svg") == 4
    assert re.findall(r"<script|<link|<img|<iframe|@import|(?:src|href)=.[^#]|url\([^#]", html) == []
    assert html.count("&lt;script&gt;alert(") == 6  # title and heading; twice the dataset; an option, a label
    assert re.search(r"<h2>Split audit</h2>.*\n.*\n.*\n.*newest train event</th><td class=.n.>1,234</td>", html)
    assert ">audit<" not in html  # among the options


def test_what_a_dataset_lacks_is_left_out() -> None:
    manifest = _manifest(splits={"train": _split("train", []), "eval": _split("eval", [])}, options={}, sources=())
    html = render_page(manifest, EMPTY, name="empty")
    assert _sections(html) == [name for name in SECTIONS if name not in ("context", "audit")]
    assert "<svg" not in html
    assert "The train split has no rows, so there is nothing to balance." in html


def test_without_torch_only_the_balance_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("evenrank.dataloader")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "torch", None)
    html = render_page(_manifest(), STORES, name="tiny")
    assert _sections(html) == SECTIONS
    assert html.count("<svg") == 3
    assert "the planner needs torch, which is not installed here" in html


def test_the_page_goes_beside_the_dataset_and_never_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "out" / "ml.v2"
    data.mkdir(parents=True)
    assert page_path(data, None) == tmp_path / "out" / "ml.v2-report.html"
    monkeypatch.chdir(data)
    assert page_path(Path(), None) == tmp_path / "out" / "ml.v2-report.html"
    (tmp_path / "link").symlink_to(data)
    for inside in (data / "page.html", tmp_path / "link" / "page.html", Path("train/page.html")):
        with pytest.raises(ConfigError, match="is inside the dataset"):
            page_path(data, inside)
    with pytest.raises(ConfigError, match="is a folder"):
        page_path(data, tmp_path)


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "new" / "page.html"
    write_page(page, "old")
    assert page.read_text() == "old"

    def fail(self: Path, target: Path) -> None:
        assert self.read_text() == "new"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(DataError, match=r"page\.html could not be written: No space left on device; choose another"):
        write_page(page, "new")
    assert page.read_text() == "old"
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_inspect_prints_the_tables_and_then_where_the_page_is(small_dataset: Path, tmp_path: Path) -> None:
    app = Typer()
    app.command()(inspect_command)
    page = tmp_path / "page.html"
    run = CliRunner().invoke(app, [str(small_dataset), "--html", str(page)])
    assert run.exit_code == 0, run.output
    lines = run.output.splitlines()
    rows = sum(split.rows for split in read_manifest(small_dataset).splits.values())
    assert str(rows) in next(line for line in lines if line.strip().startswith("all")).split()
    assert lines[-1] == f"report: {page}"
    assert page.read_text().count("<svg") == 4


# Only the page that is measured has it. A frame is as narrow as it is told to be, windows have a least width.
MEASURE = """<script>
const root = document.documentElement;
const widths = [...document.querySelectorAll("figure svg")].map((svg) => svg.getBoundingClientRect().width);
parent.document.title = JSON.stringify({
  window: innerWidth,
  tooWide: root.scrollWidth - root.clientWidth,
  columns: getComputedStyle(document.querySelector(".columns")).gridTemplateColumns.split(" ").length,
  readable: widths.every((width) => width > 250),
  sections: [...document.querySelectorAll("section")].map((section) => section.id),
});
</script>"""


def _chromium(folder: Path, page: Path, *options: str) -> str:
    assert CHROMIUM
    quiet = ["disable-gpu", "no-first-run", "disable-background-networking", "disable-component-update", "disable-sync"]
    switches = [f"--{name}" for name in ("headless", "no-sandbox", *quiet)]
    command = [CHROMIUM, *switches, f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()]
    environment = {**os.environ, "HOME": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize(("width", "columns"), [(390, 1), (1280, 2)])
def test_a_browser_shows_all_of_it_on_a_phone_and_on_a_desktop(tmp_path: Path, width: int, columns: int) -> None:
    long = "a-path-without-any-place-to-break-" * 5
    manifest = _manifest(
        sources=(SourceFile(path=long, bytes=10**12, sha256="0" * 64),),
        options={"audit": {long: 1, "b": 2.5}, "long": long},
    )
    html = render_page(manifest, STORES, name=long)
    page, frame, picture = (tmp_path / name for name in ("page.html", "frame.html", "page.png"))
    write_page(page, html)
    measured = escape(html.replace("</body>", f"{MEASURE}</body>"))
    frame.write_text(
        f'<!DOCTYPE html><title></title><iframe style="width: {width}px" frameborder=0 srcdoc="{measured}">'
    )
    dom = _chromium(tmp_path, frame, "--dump-dom")
    title = dom[dom.index("<title>") + len("<title>") : dom.index("</title>")]
    expected = {"window": width, "tooWide": 0, "columns": columns, "readable": True, "sections": SECTIONS}
    assert json.loads(unescape(title)) == expected
    _chromium(tmp_path, page, f"--window-size={width},844", f"--screenshot={picture}")
    assert int.from_bytes(picture.read_bytes()[16:20], "big") == width  # in a PNG's header
    assert picture.stat().st_size > 10_000  # a page of one colour is smaller
