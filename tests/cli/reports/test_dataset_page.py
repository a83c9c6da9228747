import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.cli.options import STRATEGIES
from evenrank.cli.reports import dataset_data, dataset_page
from evenrank.cli.reports.dataset_page import render_page
from evenrank.dataloader.routing import MODES
from evenrank.datasets.event_statistics import DAY_MS, Statistics, read_statistics
from evenrank.datasets.schema import DataFile, Manifest, SourceFile, Split, read_manifest
from evenrank.datasets.store import SequenceStore
from tests.cli.programs import Evenrank
from tests.cli.reports.pages import check_browser_shows, external_parts, needs_chromium, sections_of, text_of

SCRIPT = "<script>alert('x')</script>"
RANKS = ["8", "16", "32", "64", "128", "256", "512", "1,024"]
SECTIONS = ["counts", "vocabulary", "statistics", "lengths", "events", "context", "balance", "routing", "sources"]


def _split(name: str, lengths: list[int]) -> Split:
    statistics = {"min": min(lengths), "max": max(lengths), "mean": float(np.mean(lengths))} if lengths else {}
    file = DataFile(path=f"{name}/part-00000.parquet", rows=len(lengths), sha256="0" * 64)
    return Split(files=(file,), rows=len(lengths), interactions=sum(lengths), lengths=statistics)


# Of the stores below, of which eval predicts all events.
STATISTICS = Statistics(
    split="user:0.3",
    by="user",
    events={"train": 7, "eval": 1},
    users=4,
    items=3,
    first_ms=100 * DAY_MS,
    last_ms=150 * DAY_MS,
    largest_day_ms=150 * DAY_MS,
    largest_day_events=4,
    hours_of_day=[7, *[0] * 11, 1, *[0] * 11],
    bin_start_ms=100 * DAY_MS,
    bin_width_ms=DAY_MS,
    bins=[3, 1, *[0] * 48, 4],
    ranks=[1, 2, 3],
    ranks_events=[5, 2, 1],
    top_events=5,
    early_eval_events=1,
    eval_items=1,
    cold_items=0,
    cold_item_events=0,
    eval_users=1,
    cold_users=1,
)
OPTIONS = {"seed": 7, "note": SCRIPT, "statistics": dataclasses.asdict(STATISTICS)}
MANIFEST = Manifest(
    schema_version=2,
    dataset=f"tiny {SCRIPT}",
    sources=(SourceFile(path="raw/tiny.csv", bytes=1234, sha256="0" * 64),),
    options={**OPTIONS, "audit": {"duplicate events (kept)": 1234}},
    splits={"train": _split("train", [3, 0, 4]), "eval": _split("eval", [1])},
    contextual={"country": "int64"},
    extra_events={},
    vocabulary_sizes={"user_id": 5, "item_id": 31, "country": 3},
    context_labels={"country": (None, SCRIPT, "Peru")},
    ids={},
    content_hash="ab" * 32,
)


def _store(lengths: list[int], items: list[int], days: Sequence[float], countries: list[int]) -> SequenceStore:
    columns: dict[str, Any] = {
        "user_id": np.arange(len(lengths)),
        "country": np.array(countries, dtype=np.int64),
        "item_id": np.array(items, dtype=np.int64),
        "action": np.zeros(len(items), dtype=np.int32),
        "timestamp_ms": (np.array(days, dtype=np.float64) * DAY_MS).astype(np.int64),
    }
    return SequenceStore(manifest=MANIFEST, split="any", offsets=np.cumsum([0, *lengths]), columns=columns)


# Items: 30 five times, 7 twice, 9 once. Days 100 to 150; country 1 twice, 2 once, missing once.
STORES = {
    "train": _store([3, 0, 4], [30, 30, 7, 30, 9, 30, 30], [100, 100.5, 101, 150, 150, 150, 150], [1, 0, 1]),
    "eval": _store([1], [7], [100], [2]),
}
EMPTY = _store([], [], [], [])


@pytest.fixture(scope="module", autouse=True)
def gains_once() -> Iterator[None]:
    """Plan the steps of equal lengths once, because each page takes seconds."""
    known: dict[bytes, Any] = {}
    plan = dataset_data.balancing_gains

    def planned(lengths: NDArray[np.int64], **options: Any) -> Any:
        if options:
            return plan(lengths, **options)
        return known.get(lengths.tobytes()) or known.setdefault(lengths.tobytes(), plan(lengths))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_data, "balancing_gains", planned)
        yield


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


@pytest.mark.parametrize("start_day", [0, 2_932_846])
def test_the_timeline_reaches_the_end_of_calendars(start_day: int) -> None:
    plot = dataset_page.timeline_svg(dataclasses.replace(STATISTICS, bin_start_ms=start_day * DAY_MS))
    assert ("days since 1970" in plot) == (start_day > 0)


def test_context_values_have_labels() -> None:
    all_values = dataset_data.context_values(STORES, "country")
    assert (all_values.rows, all_values.other_values, all_values.other_rows) == (4, 0, 0)
    assert all_values.values == ((SCRIPT, 2), (None, 1), ("Peru", 1))
    one_value = dataset_data.context_values(STORES, "country", max_values=1)
    assert (one_value.values, one_value.other_values, one_value.other_rows) == (((SCRIPT, 2),), 2, 2)


def test_equal_lengths_leave_nothing_to_gain() -> None:
    # Whatever is longer than 512 costs the same, because it is cut.
    gains = dataset_data.balancing_gains(np.array([512, 512, 5000, 100_000]), ranks=[2], batch_size=2)
    assert [(gain.ranks, gain.label) for gain in gains] == [(2, strategy) for strategy in STRATEGIES]
    for gain in gains:
        assert (gain.summary.idle_before, gain.summary.idle_after, gain.summary.speedup) == (0, 0, 1)
        assert (gain.summary.steps, gain.speedup_of_a_step()) == (200, (1, 0))


def test_the_gain_is_that_of_all_drawn_steps() -> None:
    # Every step has all four rows, of two tokens per event. In a third of the draws, one rank loads both long ones.
    long, short = (24 * (10 * s * 1024**2 + 2 * s**2 * 1024) for s in (1000, 200))
    lengths = np.array([500, 100, 500, 100])
    none, _, lpt_swap, _ = dataset_data.balancing_gains(lengths, ranks=[2], batch_size=2, steps=30)
    num_worst = sum(int(step.before.max()) > int(step.before.min()) for step in none.steps)
    assert 0 < num_worst < 15
    heaviest = num_worst * 2 * long + (30 - num_worst) * (long + short)
    idle = 1 - 30 * (long + short) / heaviest
    assert (none.summary.idle_after, lpt_swap.summary.idle_before) == pytest.approx((idle, idle))
    assert (none.summary.speedup, lpt_swap.summary.idle_after) == (1, 0)
    assert lpt_swap.summary.speedup == pytest.approx(heaviest / (30 * (long + short)))
    assert lpt_swap.speedup_of_a_step() == pytest.approx((1, (2 * long / (long + short) - 1) / 2))


def test_a_small_split_is_drawn_from_repeatedly() -> None:
    gains = dataset_data.balancing_gains(np.array([5, 9, 0]), ranks=[1, 64], steps=2)
    rows = [gain.cells() for gain in gains]
    assert [row[:2] for row in rows] == [(ranks, strategy) for ranks in ("1", "64") for strategy in STRATEGIES]
    assert rows[0][2:] == ("0.0%", "0.0%", "1.00x", "1.00 ± 0.00", "1.000", "0%", "0%")
    assert dataset_data.balancing_gains(np.array([], dtype=np.int64)) == ()
    assert dataset_data.balancing_gains(np.array([0]), ranks=[2], batch_size=1)[0].summary.speedup == 1


def test_the_page_is_self_contained_and_escapes_text() -> None:
    html = render_page(MANIFEST, STORES, name=SCRIPT).html
    assert html == render_page(MANIFEST, STORES, name=SCRIPT).html
    assert sections_of(html) == SECTIONS
    assert html.count("<svg") == 7
    assert external_parts(html) == []
    assert html.count("&lt;script&gt;alert(") == 7  # title and heading; twice the dataset; an option, a label, twice
    for label, text in {**STATISTICS.describe(), "duplicate events (kept)": "1,234"}.items():
        assert re.search(f'<th class="label">{re.escape(label)}</th><td>{re.escape(text)}</td>', html)
    assert ">audit<" not in html  # among the options
    assert ">statistics<" not in html


def test_what_a_dataset_lacks_is_left_out() -> None:
    no_rows = {"train": _split("train", []), "eval": _split("eval", [1])}
    options = {"statistics": OPTIONS["statistics"]}
    lacking: dict[str, Any] = {"options": options, "sources": (), "contextual": {}, "context_labels": {}}
    manifest = dataclasses.replace(MANIFEST, splits=no_rows, **lacking)
    html, _, routing = render_page(manifest, {**STORES, "train": EMPTY}, name="empty")
    assert routing is None
    assert sections_of(html) == [name for name in SECTIONS if name != "context"]
    assert html.count("<svg") == 4
    assert "The train split has no rows, so there is nothing to balance." in html
    assert "There are no events in train, or more ids than a table can have rows." in html


def test_the_page_shows_the_routing_of_the_items() -> None:
    html, _, routing = render_page(MANIFEST, STORES, name="tiny")
    assert routing is not None
    assert (routing.num_embeddings, routing.most_frequent[0]) == (31, 8 * 5 / 7)
    section = text_of(html[html.index('<section id="routing"') : html.index('<section id="sources"')])
    assert "for a table of 31 rows" in section
    # Of 8 ranks with 4 rows each, ids 7, 9 and 30 are on ranks 1, 2 and 7, and with one key after the other on 7, 1, 6.
    ids, lookups = section.split(" distinct ids 8 16 ")[1].split(" lookups 8 16 ")
    assert " continuous 2.67 5.33 " in ids
    assert " roundrobin 5.71 " in lookups
    assert " most frequent 5.71 11.4 22.9 45.7 91.4 183 366 731" in lookups


def test_the_page_has_the_gains_that_the_terminal_prints() -> None:
    html, gains, _ = render_page(MANIFEST, STORES, name="tiny")
    section = text_of(html[html.index('<section id="balance"') : html.index('<section id="routing"')])
    assert "ranks strategy idle before idle after speed- up of a step bound one moved 8 none " in section
    for gain in gains:
        assert " ".join(gain.cells()) in section
    assert "speed-up total time of the steps before balancing / after" in section
    assert "From 8 ranks on, a step needs more rows than the split has" in section


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
    assert page.read_text().count("<svg") == 7


def test_the_run_and_the_page_count_each_event_once(tmp_path: Path, evenrank: Evenrank) -> None:
    # 3,000 events on each of 7 days. Rows of eval repeat the events of train before those to predict.
    lines = [f"{n % 4999},{n % 50},{1_704_067_200 + n * 86_400 // 3000}" for n in range(21_000)]
    (tmp_path / "log.csv").write_text("\n".join(["user_id,item_id,timestamp", *lines]))
    out = tmp_path / "a log"
    log = ("--dataset", "custom", "--events", tmp_path / "log.csv")
    run = evenrank("preprocess", *log, "--split", "leave-last:1", "--out", out)
    assert run.returncode == 0, run.stderr
    printed = run.stdout.splitlines()
    assert printed[-1] == f"next: evenrank inspect '{out}'"
    manifest = read_manifest(out)
    repeated = sum(split.interactions for split in manifest.splits.values())
    statistics = read_statistics(manifest)
    assert repeated == 37_001  # 4,999 users have 4 or 5 events
    assert (statistics.num_events, statistics.bins, statistics.bin_width_ms) == (21_000, [3000] * 7, DAY_MS)
    assert statistics.hours_of_day == [875] * 24
    described = statistics.describe()
    assert described["events per day"] == "3,000 on average, 3,000 on the busiest, 2024-01-01"
    shown = [line for line in printed if line.partition(":")[0] in described]
    assert [re.split(": +", line, maxsplit=1) for line in shown] == [list(line) for line in described.items()]
    assert shown == printed[-len(shown) - 1 : -1]
    assert len({line.index(text) for line, text in zip(shown, described.values(), strict=True)}) == 1  # aligned
    inspected = evenrank("inspect", out)
    assert set(shown) <= set(inspected.stdout.splitlines())
    (of_all,) = [line.split() for line in inspected.stdout.splitlines() if line.strip().startswith("all")]
    assert of_all[-2] == "21,000"
    html = (tmp_path / "a log-report.html").read_text()
    assert all(text in text_of(html) for text in described.values())
    assert f"{repeated:,}" not in html
    assert re.findall(r">([\d.]+k?)<", dataset_page.timeline_svg(statistics))[-4:] == ["0", "800", "1.6k", "2.4k"]
    assert ">events per day<" in html


@needs_chromium
@pytest.mark.parametrize(("width", "columns"), [(390, 1), (1280, 2)])
def test_a_browser_shows_the_whole_page_on_a_phone_and_on_a_desktop(tmp_path: Path, width: int, columns: int) -> None:
    long = "a-path-without-any-place-to-break-" * 5
    source = SourceFile(path=long, bytes=10**12, sha256="0" * 64)
    options = {**OPTIONS, "audit": {long: 1, "b": 2.5}, "long": long}
    manifest = dataclasses.replace(MANIFEST, sources=(source,), options=options)
    html = render_page(manifest, STORES, name=long).html
    check_browser_shows(tmp_path, html, width=width, columns=columns, sections=SECTIONS)
