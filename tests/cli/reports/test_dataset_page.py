import dataclasses
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import escape, unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.cli.reports import dataset_data, dataset_page
from evenrank.cli.reports.dataset_page import render_page
from evenrank.dataloader.routing import MODES, KeyMap
from evenrank.datasets.event_statistics import DAY_MS, Statistics
from evenrank.datasets.schema import DataFile, Manifest, SourceFile, Split
from evenrank.datasets.store import SequenceStore

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCRIPT = "<script>alert('x')</script>"
SECTIONS = ["counts", "vocabulary", "statistics", "lengths", "events", "context", "balance", "routing", "sources"]
# What would run or load something: scripts, style sheets, images, frames, links.
EXTERNAL = re.compile(r"<script|<link|<img|<iframe|@import|(?:src|href)=.[^#]|url\([^#]")


def _split(name: str, lengths: list[int]) -> Split:
    statistics = {"min": min(lengths), "max": max(lengths), "mean": float(np.mean(lengths))} if lengths else {}
    file = DataFile(path=f"{name}/part-00000.parquet", rows=len(lengths), sha256="0" * 64)
    return Split(files=(file,), rows=len(lengths), interactions=sum(lengths), lengths=statistics)


# Of the stores below, of which eval predicts all events.
STATISTICS = Statistics(
    split="user:0.3", by="user", events={"train": 7, "eval": 1}, users=4, items=3,
    first_ms=100 * DAY_MS, last_ms=150 * DAY_MS, largest_day_ms=150 * DAY_MS, largest_day_events=4,
    hours_of_day=[7, *[0] * 11, 1, *[0] * 11], bin_start_ms=100 * DAY_MS, bin_width_ms=DAY_MS,
    bins=[3, 1, *[0] * 48, 4], ranks=[1, 2, 3], ranks_events=[5, 2, 1], top_events=5, early_eval_events=1,
    eval_items=1, cold_items=0, cold_item_events=0, eval_users=1, cold_users=1,
)  # fmt: skip
OPTIONS = {"seed": 7, "note": SCRIPT, "statistics": dataclasses.asdict(STATISTICS)}
MANIFEST = Manifest(
    schema_version=2, dataset=f"tiny {SCRIPT}", content_hash="ab" * 32, ids={}, extra_events={},
    sources=(SourceFile(path="raw/tiny.csv", bytes=1234, sha256="0" * 64),),
    options={**OPTIONS, "audit": {"duplicate events (kept)": 1234}},
    splits={"train": _split("train", [3, 0, 4]), "eval": _split("eval", [1])},
    vocabulary_sizes={"user_id": 5, "item_id": 31, "country": 3},
    contextual={"country": "int64"}, context_labels={"country": (None, SCRIPT, "Peru")},
)  # fmt: skip


def _store(lengths: list[int], items: list[int], days: Sequence[float], countries: list[int]) -> SequenceStore:
    times, numbers = (np.array(days) * DAY_MS).astype(np.int64), np.array(items, dtype=np.int64)
    columns: dict[str, Any] = {"user_id": np.arange(len(lengths)), "country": np.array(countries, dtype=np.int64)}
    columns |= {"item_id": numbers, "action": np.zeros(len(items), dtype=np.int32), "timestamp_ms": times}
    return SequenceStore(manifest=MANIFEST, split="any", offsets=np.cumsum([0, *lengths]), columns=columns)


# Items: 30 five times, 7 twice, 9 once. Days 100 to 150; country 1 twice, 2 once, missing once.
STORES = {
    "train": _store([3, 0, 4], [30, 30, 7, 30, 9, 30, 30], [100, 100.5, 101, 150, 150, 150, 150], [1, 0, 1]),
    "eval": _store([1], [7], [100], [2]),
}


def text_of(html: str) -> str:
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html)))


def _parts(html: str) -> tuple[list[str], int]:
    """Return the sections of a page, and how many plots it has."""
    return re.findall(r'<section id="(\w+)"', html), html.count("<svg")


def test_lengths_are_counted_per_doubling_and_every_length_has_a_bin() -> None:
    histogram = dataset_data.length_histogram(STORES)
    assert histogram.edges.tolist() == [1, 2, 3, 4, 5]
    # One row of three has length 3, in a bin of log2(4 / 3) doublings; one has 4, in log2(5 / 4).
    assert histogram.density["train"] == pytest.approx([0, 0, 1 / 3 / np.log2(4 / 3), 1 / 3 / np.log2(5 / 4)])
    assert histogram.density["eval"] == pytest.approx([1, 0, 0, 0])
    assert histogram.empty == {"train": 1, "eval": 0}
    for longest in (1, 2, 8, 9, 4095, 4096, 200_001):
        histogram = dataset_data.length_histogram({"train": _store([longest, 1], [], [], [])})
        assert np.sum(histogram.density["train"] * np.diff(np.log2(histogram.edges))) == pytest.approx(1)


def test_context_values_have_labels() -> None:
    all_values = dataset_data.context_values(STORES, "country")
    assert (all_values.rows, all_values.other_values, all_values.other_rows) == (4, 0, 0)
    assert all_values.values == ((SCRIPT, 2), (None, 1), ("Peru", 1))
    one_value = dataset_data.context_values(STORES, "country", max_values=1)
    assert (one_value.values, one_value.other_values, one_value.other_rows) == (((SCRIPT, 2),), 2, 2)


def test_a_gain_is_that_of_all_drawn_steps_on_as_many_ranks_as_the_rows_fill_and_a_padded_model_has_none() -> None:
    # Every step has all four rows, of two tokens per event. In a third of the draws, one rank loads both long ones.
    long, short = (24 * (10 * s * 1024**2 + 2 * s**2 * 1024) for s in (1000, 200))
    jagged, padded = dataset_data.balancing_gains(np.array([500, 100, 500, 100]), ranks=[2], batch_size=2)
    assert [(gain.ranks, gain.label) for gain in (jagged, padded)] == [(2, "jagged HSTU"), (2, "padded")]
    num_worst = sum(int(step.before.max()) > int(step.before.min()) for step in jagged.steps)
    assert 30 < num_worst < 100
    heaviest = num_worst * 2 * long + (200 - num_worst) * (long + short)
    assert jagged.summary.idle_before == pytest.approx(1 - 200 * (long + short) / heaviest)
    assert jagged.summary.speedup == pytest.approx(heaviest / (200 * (long + short)))
    assert jagged.speedup_of_a_step() == pytest.approx((1, (2 * long / (long + short) - 1) / 2))
    assert (jagged.summary.idle_after, padded.summary.speedup) == (0, 1)
    for count, ranks in ((0, []), (7, []), (8, [2]), (31, [7]), (32, [8]), (255, [8]), (256, [8, 64]), (9999, [8, 64])):
        gains = dataset_data.balancing_gains(np.full(count, 600), ranks=(8, 64), batch_size=4)
        assert [gain.ranks for gain in gains[::2]] == ranks
        assert {gain.summary.speedup for gain in gains} <= {1}  # what is longer than 512 is cut
    described = dataset_data.describe_gains(1406, "out")
    assert "drawn from the 1,406 rows of train, which fill a step of up to 43 ranks." in described


@given(
    st.dictionaries(st.integers(0, 999), st.integers(1, 50), min_size=1, max_size=40),
    st.integers(1000, 1100),
    st.integers(1, 20),
    st.sampled_from([1, 7, 100]),
)
def test_routing_loads_are_those_of_the_ranges_of_rows(
    counts_of: dict[int, int], num_embeddings: int, world_size: int, chunk: int
) -> None:
    ids, counts = np.array(list(counts_of)), np.array(list(counts_of.values()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_data, "_CHUNK", chunk)
        loads = dataset_data.routing_loads(ids, counts, num_embeddings, ranks=[3, world_size])
    assert loads is not None
    assert (loads.num_embeddings, list(loads.ranks)) == (num_embeddings, [3, world_size])
    assert list(loads.ids) == list(loads.lookups) == list(MODES)
    for mode in MODES:
        rows = KeyMap(num_embeddings=num_embeddings, world_size=world_size, mode=mode)(ids)
        owners = rows // -(-num_embeddings // world_size)
        num_lookups = max(counts[owners == rank].sum() for rank in range(world_size))
        assert loads.ids[mode][1] == pytest.approx(np.bincount(owners).max() * world_size / len(ids))
        assert loads.lookups[mode][1] == pytest.approx(num_lookups * world_size / counts.sum())
    assert loads.most_frequent[1] == pytest.approx(counts.max() * world_size / counts.sum())


def test_no_events_and_hashed_ids_have_no_routing() -> None:
    none, one, seen = np.zeros(0, dtype=np.int64), np.ones(1, dtype=np.int64), list[int]()
    assert dataset_data.routing_loads(none, none, 31) is None
    assert dataset_data.routing_loads(one, one, (1 << 62) + 1) is None
    assert dataset_data.routing_loads(one, one, 1 << 62, on_ranks=seen.append) is not None
    assert seen == [8, 16, 32, 64, 128, 256, 512, 1024]


def test_the_page_is_self_contained_escapes_text_and_has_the_numbers() -> None:
    rows = _store([3] * 64, [30] * 192, [100] * 192, [1] * 64)
    html, gains, routing = render_page(MANIFEST, {**STORES, "train": rows}, name=SCRIPT)
    assert (*_parts(html), EXTERNAL.findall(html)) == (SECTIONS, 7, [])
    # Title, heading, gains; twice the dataset; an option, a label, twice.
    assert html.count("&lt;script&gt;alert(") == 8
    for label, text in {**STATISTICS.describe(), "duplicate events (kept)": "1,234"}.items():
        assert re.search(f'<th class="label">{re.escape(label)}</th><td>{re.escape(text)}</td>', html)
    assert not re.search(">(audit|statistics)<", html)  # among the options
    balance, routed = (
        text_of(part) for part in re.findall(r'<section id="(?:balance|routing)".*?</section>', html, re.S)
    )
    assert "drawn from the 64 rows of train, which fill a step of up to 2 ranks." in balance
    assert "model idle before idle after speed-up per step bound one moved 2 jagged HSTU 0.0% 0.0% 1.00x " in balance
    assert "All numbers are predictions of the cost model" in balance
    assert [gain.ranks for gain in gains] == [2, 2]
    assert routing is not None
    assert "for a table of 31 rows" in routed
    # Of 8 ranks with 4 rows each, the only item that train has here, 30, is on one.
    assert routed.strip().endswith(" most frequent 8.00 16.0")
    # What a dataset lacks is left out.
    splits = {"train": _split("train", []), "eval": _split("eval", [1])}
    lacking: dict[str, Any] = {"options": {"statistics": OPTIONS["statistics"]}, "sources": (), "splits": splits}
    manifest = dataclasses.replace(MANIFEST, **lacking, contextual={}, context_labels={})
    html, _, routing = render_page(manifest, {**STORES, "train": _store([], [], [], [])}, name="empty")
    assert routing is None
    assert _parts(html) == ([name for name in SECTIONS if name != "context"], 4)
    assert "Train has too few rows for a step of two ranks, so there is nothing to balance." in html
    assert "There are no events in train, or more ids than a table can have rows." in html


def test_plots_show_all_modes_reach_the_end_of_calendars_and_take_names_as_they_are() -> None:
    loads = dataset_data.routing_loads(np.arange(100), np.arange(1, 101), 1000)
    assert loads is not None
    ids, lookups = (dataset_page.routing_svg(loads, load) for load in ("distinct ids", "lookups"))
    assert all(f">{mode}<" in plot for mode in MODES for plot in (ids, lookups))
    assert ("most frequent id" in lookups, "most frequent id" in ids) == (True, False)
    for start_day in (0, 2_932_846):
        plot = dataset_page.timeline_svg(dataclasses.replace(STATISTICS, bin_start_ms=start_day * DAY_MS))
        assert ("days since 1970" in plot) == (start_day > 0)
    name = r"$\frac{ <b>"  # no formula
    of_name: dict[str, Any] = {"density": {name: np.array([0.5, 0.5])}, "empty": {name: 0}}
    histogram = dataset_data.LengthHistogram(edges=np.array([1, 2, 4]), **of_name)
    assert r"$\frac{ &lt;b&gt;" in dataset_page.lengths_svg(histogram)


# Runs inside the page, which is in a frame: a frame can be as narrow as a phone, a window cannot.
MEASURE = """<script>
const root = document.documentElement;
const measure = (selector, width) => [...document.querySelectorAll(selector)].map(width);
parent.document.title = JSON.stringify([
  [innerWidth, root.scrollWidth - root.clientWidth],
  getComputedStyle(document.querySelector(".columns")).gridTemplateColumns.split(" ").length,
  Math.min(...measure("figure svg", (svg) => svg.getBoundingClientRect().width)),
  Math.max(...measure(".scroll", (table) => table.scrollWidth - table.clientWidth)),
  measure("section", (section) => section.id),
]);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_shows_the_whole_page_on_a_phone_and_on_a_desktop(tmp_path: Path) -> None:
    long, log = "a-path-without-any-place-to-break-" * 5, tmp_path / "chromium.log"
    source = SourceFile(path=long, bytes=10**12, sha256="0" * 64)
    options = {**OPTIONS, "audit": {long: 1, "b": 2.5}, "long": long}
    manifest = dataclasses.replace(MANIFEST, sources=(source,), options=options)
    rows = _store([3] * 33_000, [30] * 99_000, [100] * 99_000, [1] * 33_000)
    html = escape(
        render_page(manifest, {**STORES, "train": rows}, name=long).html.replace("</body>", f"{MEASURE}</body>")
    )
    switches = ["headless", "no-sandbox", "no-first-run", "dump-dom", "enable-logging", f"log-file={log}"]
    switches += [f"disable-{part}" for part in ("gpu", "background-networking", "component-update", "sync")]
    command = [str(CHROMIUM), *(f"--{switch}" for switch in switches), f"--user-data-dir={tmp_path / 'profile'}"]
    for width, columns in ((390, 1), (1280, 2)):
        frame = f'<iframe frameborder=0 style="width: {width}px" srcdoc="{html}">'
        (tmp_path / "frame.html").write_text(
            f"<!DOCTYPE html><title></title><script>console.log('the frame')</script>{frame}"
        )
        run = subprocess.run(
            [*command, (tmp_path / "frame.html").as_uri()],
            capture_output=True,
            text=True,
            timeout=250,
            check=True,
            env={**os.environ, "HOME": str(tmp_path)},
        )
        # No errors. Without the line of the frame, the log would have no messages of the console at all.
        assert re.findall(r"CONSOLE.*?\] (.*), source", log.read_text(errors="replace")) == ['"the frame"']
        window, num_columns, narrowest_plot, cut_off, sections = json.loads(
            unescape(run.stdout.partition("<title>")[2].partition("</title>")[0])
        )
        assert (window, num_columns, sections) == ([width, 0], columns, SECTIONS)
        assert narrowest_plot > 250
        assert width < 1280 or cut_off == 0  # no table has to be scrolled on a desktop
        log.unlink()
