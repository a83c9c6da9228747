import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.cli.reports import dataset_data, dataset_page
from evenrank.cli.reports.dataset_page import render_page
from evenrank.dataloader.routing import MODES
from evenrank.datasets.schema import DataFile, Manifest, SourceFile, Split, read_manifest
from evenrank.datasets.store import SequenceStore
from tests.cli.programs import Evenrank
from tests.cli.reports.pages import check_browser_shows, external_parts, needs_chromium, sections_of, text_of

SCRIPT = "<script>alert('x')</script>"
RANKS = ["8", "16", "32", "64", "128", "256", "512", "1,024"]
SECTIONS = ["counts", "vocabulary", "lengths", "items", "time", "context", "audit", "balance", "routing", "sources"]


def _split(name: str, lengths: list[int]) -> Split:
    statistics = {"min": min(lengths), "max": max(lengths), "mean": float(np.mean(lengths))} if lengths else {}
    file = DataFile(path=f"{name}/part-00000.parquet", rows=len(lengths), sha256="0" * 64)
    return Split(files=(file,), rows=len(lengths), interactions=sum(lengths), lengths=statistics)


MANIFEST = Manifest(
    schema_version=1,
    dataset=f"tiny {SCRIPT}",
    sources=(SourceFile(path="raw/tiny.csv", bytes=1234, sha256="0" * 64),),
    options={"seed": 7, "note": SCRIPT, "audit": {"eval events before the newest train event": 1234}},
    splits={"train": _split("train", [3, 0, 4]), "eval": _split("eval", [1])},
    contextual={"country": "int64"},
    extra_events={},
    vocabulary_sizes={"user_id": 5, "item_id": 31, "country": 3},
    context_labels={"country": (None, SCRIPT, "Peru")},
    content_hash="ab" * 32,
)


def _store(lengths: list[int], items: list[int], days: Sequence[float], countries: list[int]) -> SequenceStore:
    events: dict[str, Any] = {
        "item_id": np.array(items, dtype=np.int64),
        "action": np.zeros(len(items), dtype=np.int32),
        "timestamp_ms": (np.array(days, dtype=np.float64) * dataset_data.DAY_MS).astype(np.int64),
    }
    rows = {"user_id": np.arange(len(lengths)), "country": np.array(countries, dtype=np.int64)}
    return SequenceStore(manifest=MANIFEST, split="any", offsets=np.cumsum([0, *lengths]), events=events, rows=rows)


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


@pytest.mark.parametrize("longest", [1, 2, 8, 9, 4095, 4096, 200_001])
def test_every_length_has_a_bin(longest: int) -> None:
    histogram = dataset_data.length_histogram({"train": _store([longest, 1], [], [], [])})
    assert np.sum(histogram.density["train"] * np.diff(np.log2(histogram.edges))) == pytest.approx(1)


@pytest.mark.usefixtures("_chunks")
def test_items_and_days_are_counted_over_all_splits() -> None:
    line = dataset_data.timeline(STORES)
    assert line is not None
    assert (line.start_ms, line.width_ms, line.unit) == (100 * dataset_data.DAY_MS, dataset_data.DAY_MS, "day")
    assert line.counts.tolist() == [3, 1, *[0] * 48, 4]
    ids, counts = dataset_data.count_items(STORES)
    assert (ids.tolist(), counts.tolist()) == ([7, 9, 30], [2, 1, 5])
    counts = np.sort(counts)[::-1]
    assert dataset_data.top_share(counts, 0.01) == (1, 5 / 8)
    assert dataset_data.top_share(counts, 0.5) == (2, 7 / 8)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("far", [3, -5, 2**62])
def test_values_of_any_size_are_counted(far: int) -> None:
    parts = [np.array([4, far, 4]), np.array([], dtype=np.int64), np.array([9, 4, far])]
    values, counts = dataset_data.count_values(parts)
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == {4: 3, far: 2, 9: 1}
    assert values.tolist() == sorted(values.tolist())


@pytest.mark.parametrize(
    ("first", "last", "unit"),
    [(0, 0, "second"), (0, 0.5, "hour"), (-3, 300, "week"), (0, 8000, "13 weeks"), (0, 400 * 364, "3.3 years")],
)
def test_the_width_of_time_bins_suits_the_range(first: float, last: float, unit: str) -> None:
    line = dataset_data.timeline({"train": _store([2], [1, 1], [first, last], [0])})
    assert line is not None
    assert line.unit == unit
    assert line.counts.sum() == 2
    assert (line.counts[0], line.counts[-1]) == ((2, 2) if first == last else (1, 1))
    assert len(line.counts) <= 120
    assert dataset_page.timeline_svg(line).startswith("<svg")


def test_context_values_have_labels() -> None:
    all_values = dataset_data.context_values(STORES, "country")
    assert (all_values.rows, all_values.other_values, all_values.other_rows) == (4, 0, 0)
    assert all_values.values == ((SCRIPT, 2), (None, 1), ("Peru", 1))
    one_value = dataset_data.context_values(STORES, "country", max_values=1)
    assert (one_value.values, one_value.other_values, one_value.other_rows) == (((SCRIPT, 2),), 2, 2)


def test_equal_lengths_leave_nothing_to_gain() -> None:
    # Whatever is longer than 2048 costs the same, because it is cut.
    (gain,) = dataset_data.balancing_gains(np.array([2048, 2048, 5000, 100_000]), ranks=[2], batch_size=2)
    assert not gain.repeated
    assert gain.ratios == gain.speedups == {"none": 1, "karmarkar-karp": 1, "lpt-swap": 1, "min-move": 1}


def test_the_gain_is_the_mean_over_the_drawn_steps() -> None:
    # Every step has all four rows, of two tokens per event. In a third of the draws, one rank loads both long ones.
    long, short = (24 * (10 * s * 1024**2 + 2 * s**2 * 1024) for s in (4000, 200))
    (gain,) = dataset_data.balancing_gains(np.array([2000, 100, 2000, 100]), ranks=[2], batch_size=2, steps=30)
    worst_ratio = 2 * long / (long + short)
    num_worst = round((gain.ratios["none"] - 1) * 30 / (worst_ratio - 1))
    assert 0 < num_worst < 30
    assert gain.ratios["none"] == pytest.approx((num_worst * worst_ratio + 30 - num_worst) / 30)
    assert gain.ratios["karmarkar-karp"] == gain.ratios["lpt-swap"] == 1
    assert gain.speedups["lpt-swap"] == pytest.approx(gain.ratios["none"])


def test_a_small_split_is_drawn_from_repeatedly() -> None:
    gains = dataset_data.balancing_gains(np.array([5, 9, 0]), ranks=[1, 4], batch_size=2)
    assert [(gain.ranks, gain.repeated) for gain in gains] == [(1, False), (4, True)]
    assert dataset_data.balancing_gains(np.array([], dtype=np.int64)) == ()
    assert dataset_data.balancing_gains(np.array([0]), ranks=[2], batch_size=1)[0].speedups["lpt-swap"] == 1


def test_the_page_is_self_contained_and_escapes_text() -> None:
    html = render_page(MANIFEST, STORES, name=SCRIPT).html
    assert html == render_page(MANIFEST, STORES, name=SCRIPT).html
    assert sections_of(html) == SECTIONS
    assert html.count("<svg") == 6
    assert external_parts(html) == []
    assert html.count("&lt;script&gt;alert(") == 6  # title and heading; twice the dataset; an option, a label
    assert re.search(r"<h2>Split audit</h2>.*\n.*\n.*\n.*newest train event</th><td class=.n.>1,234</td>", html)
    assert ">audit<" not in html  # among the options


def test_what_a_dataset_lacks_is_left_out() -> None:
    no_rows = {"train": _split("train", []), "eval": _split("eval", [])}
    manifest = dataclasses.replace(MANIFEST, splits=no_rows, options={}, sources=())
    html, routing = render_page(manifest, EMPTY, name="empty")
    assert routing is None
    assert sections_of(html) == [name for name in SECTIONS if name not in ("context", "audit")]
    assert "<svg" not in html
    assert "The train split has no rows, so there is nothing to balance." in html
    assert "There are no events, or more ids than a table can have rows." in html


def test_the_page_shows_the_routing_of_the_items() -> None:
    html, routing = render_page(MANIFEST, STORES, name="tiny")
    assert routing is not None
    assert (routing.num_embeddings, routing.most_frequent[0]) == (31, 8 * 5 / 8)
    section = text_of(html[html.index('<section id="routing"') : html.index('<section id="sources"')])
    assert "for a table of 31 rows" in section
    # Of 8 ranks with 4 rows each, ids 7, 9 and 30 are on ranks 1, 2 and 7, and with one key after the other on 7, 1, 6.
    assert "distinct ids, continuous 2.667 5.333" in section
    assert "lookups, roundrobin 5 " in section
    assert "lookups, most frequent id alone 5 10 20 40 80 160 320 640" in section


def test_inspect_prints_tables_and_the_path_of_a_page(small_dataset: Path, tmp_path: Path, evenrank: Evenrank) -> None:
    page = tmp_path / "page.html"
    run = evenrank("inspect", small_dataset, "--html", page)
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    rows = sum(split.rows for split in read_manifest(small_dataset).splits.values())
    assert str(rows) in next(line for line in lines if line.strip().startswith("all")).split()
    assert lines[-1] == f"report: {page}"
    start = next(number for number, line in enumerate(lines) if line.startswith("Routing of item ids"))
    assert max(map(len, lines[start:-1])) <= 80
    tables = [line.split() for line in lines[start + 4 : -1] if line.strip()]
    assert tables[::5] == [["distinct", "ids", *RANKS], ["lookups", *RANKS], tables[10]]
    assert tables[10][:2] == ["most", "frequent"]
    for rows_of_modes in (tables[2:5], tables[7:10]):
        assert [(row[0], len(row)) for row in rows_of_modes] == [(mode, 1 + len(RANKS)) for mode in MODES]
    assert page.read_text().count("<svg") == 6


@needs_chromium
@pytest.mark.parametrize(("width", "columns"), [(390, 1), (1280, 2)])
def test_a_browser_shows_the_whole_page_on_a_phone_and_on_a_desktop(tmp_path: Path, width: int, columns: int) -> None:
    long = "a-path-without-any-place-to-break-" * 5
    source = SourceFile(path=long, bytes=10**12, sha256="0" * 64)
    options = {"audit": {long: 1, "b": 2.5}, "long": long}
    manifest = dataclasses.replace(MANIFEST, sources=(source,), options=options)
    html = render_page(manifest, STORES, name=long).html
    check_browser_shows(tmp_path, html, width=width, columns=columns, sections=SECTIONS)
