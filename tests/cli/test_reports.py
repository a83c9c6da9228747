"""What `inspect`, `metrics` and `simulate` print, and `--json`: one document with the numbers of the text."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from evenrank.dataloader.balance.metrics.step_metrics import SHOWN
from evenrank.dataloader.routing import MODES
from evenrank.datasets import read_manifest
from evenrank.datasets.event_statistics import read_statistics
from evenrank.datasets.schema import MANIFEST_NAME
from tests.cli.programs import printed
from tests.cli.reports.test_dataset_page import text_of
from tests.cli.test_main import CONTROLS, ESCAPED, EVIL
from tests.dataloader.balance.metrics.example_steps import STEPS, TIMED_STEPS, write

RANKS = ["8", "16", "32", "64", "128", "256"]  # of about 400 items


def _both(*arguments: object) -> tuple[str, set[str], dict[str, Any]]:
    """Return what a command prints, its words, and the document that it prints with `--json`."""
    text = printed(*arguments)
    return text, set(text.split()), json.loads(printed(*arguments, "--json"))


def _check_gains(words: set[str], gains: list[dict[str, Any]], compared: str) -> None:
    for gain in gains:
        shares = [f"{gain[name]:.1%}" for name in ("idle_before", "idle_after")]
        shares += [f"{gain[name]:.0%}" for name in ("one_sample", "moved_tokens")]
        cells = [f"{gain['ranks']:,}", *gain[compared].split(), f"{gain['speedup']:.2f}x", f"{gain['ratio_after']:.3f}"]
        assert {*shares, *cells} <= words


def _rows(output: str) -> dict[str, list[str]]:
    """Return the cells of each row of a table by its label."""
    found = ([cell.strip() for cell in line.split("  ") if cell.strip()] for line in output.splitlines())
    return {cells[0]: cells[1:] for cells in found if cells}


def test_inspect_prints_tables_and_the_path_of_a_page_that_escapes_labels(small_dataset: Path, here: Path) -> None:
    data = shutil.copytree(small_dataset, here / "a [/x]")
    values = json.loads((data / MANIFEST_NAME).read_text())
    values["dataset"] = f"made by {EVIL}"
    values["options"][f"{EVIL}<b>"] = EVIL
    (data / MANIFEST_NAME).write_text(json.dumps(values))
    text, words, document = _both("inspect", data)
    assert " ".join(document) == "path dataset content_hash splits vocabulary_sizes statistics gains routing report"
    page = here / "a [/x]-report.html"
    html, lines = page.read_text(), text.splitlines()
    assert (document["report"], lines[-1]) == (str(page), f"report: {page}")
    assert CONTROLS.search(text + html) is None
    assert ESCAPED in text
    assert f"{ESCAPED}&lt;b&gt;" in html
    assert html.count("<svg") == 7
    assert document["content_hash"][:12] in words
    for split in document["splits"].values():
        counts = [split["rows"], split["events"], split["files"], *split["lengths"].values()]
        assert {f"{count:,}" for count in counts} <= words
    assert {f"{size:,}" for size in document["vocabulary_sizes"].values()} <= words
    assert f"{document['statistics']['users']:,}" in words
    _check_gains(words, document["gains"], "model")
    assert [gain["ranks"] for gain in document["gains"]] == [6, 6]  # about 210 rows
    start = next(number for number, line in enumerate(lines) if line.startswith("Routing of item ids"))
    assert max(map(len, lines[start:-1])) <= 80
    ids, lookups = (line.split() for line in lines[start:] if line.split()[:1] in (["distinct"], ["lookups"]))
    assert (ids[2:], lookups[1:]) == (RANKS, RANKS)
    rows = [words for words in map(str.split, lines[start:]) if words and words[0] in MODES]
    assert [row[0] for row in rows] == [*MODES] * 2
    routing, decimals = document["routing"], (2, 1, 0)
    expected = [*routing["ids"].values(), *routing["lookups"].values()]
    for row, ratios in zip(rows, expected, strict=True):
        assert row[1:] == [f"{ratio:.{decimals[(ratio >= 10) + (ratio >= 100)]}f}" for ratio in ratios]


def test_the_run_and_the_page_count_each_event_once(here: Path) -> None:
    # 3,000 events on each of 7 days. Rows of eval repeat the events of train before those to predict.
    events = [f"{n % 4999},{n % 50},{1_704_067_200 + n * 86_400 // 3000}" for n in range(21_000)]
    (here / "log.csv").write_text("\n".join(["user_id,item_id,timestamp", *events]))
    log = ("--dataset", "custom", "--events", "log.csv", "--min-count", "user=5")
    lines = printed("preprocess", *log, "--split", "leave-last:1", "--out", "a log").splitlines()
    assert lines[-1] == "next: evenrank inspect 'a log'"
    described = read_statistics(read_manifest(here / "a log")).describe()
    assert described["events per day"] == "3,000 on average, 3,000 on the busiest, 2024-01-01"
    shown = lines[-len(described) - 1 : -1]
    assert [re.split(": +", line, maxsplit=1) for line in shown] == [list(line) for line in described.items()]
    assert len({line.index(text) for line, text in zip(shown, described.values(), strict=True)}) == 1  # aligned
    inspected = printed("inspect", "a log").splitlines()
    assert set(shown) <= set(inspected)
    rare = ("rare users (kept, with the id 0)", "3,995"), ("events of rare users (kept)", "15,980")
    for texts in (lines, inspected):
        assert {*rare} <= {tuple(re.split(": +", line)) for line in texts}
    assert next(line for line in inspected if line.strip().startswith("all")).split()[-2] == "21,000"
    html = (here / "a log-report.html").read_text()
    assert all(text in text_of(html) for text in described.values())
    assert "37,001" not in html  # events in both splits; 4,999 users have 4 or 5 events
    assert ">2.4k<" in html  # of events per day
    assert ">events per day<" in html


def test_simulations_say_what_would_help() -> None:
    sizes = ("--ranks", "2,4", "--batch-size", 8, "--steps", 5)
    _, words, document = _both("simulate", "zipf:exponent=1.2", *sizes)
    assert list(document) == ["options", "drawn_with_replacement", "remedies", "gains"]
    assert (document["options"]["source"], document["options"]["steps"]) == ("zipf:exponent=1.2", 5)
    _check_gains(words, document["gains"], "strategy")
    assert [gain["ranks"] for gain in document["gains"]] == [2] * 4 + [4] * 4
    helpful = ["as above", "--window 8", "--batch-size 16", "--max-history-length 256"]
    assert [remedy["instead"] for remedy in document["remedies"]] == helpful
    for remedy in document["remedies"]:
        assert {f"{remedy['idle_after']:.1%}", f"{remedy['time_per_sample']:.2f}x"} <= words


def test_the_metrics_of_a_log_are_a_table(here: Path) -> None:
    write(here / "run.jsonl", *STEPS[:4], every=2)
    head, *lines = printed("metrics", "run.jsonl").splitlines()
    assert max(map(len, lines)) <= 80
    first = json.loads((here / "run.jsonl").read_text().splitlines()[0])["run"]
    assert head == f"run.jsonl: 4 steps on 2 ranks, run {first['id']} of {first['started']}"
    rows = _rows("\n".join(lines))
    assert rows["idle before balancing, predicted"] == ["46.9%", "50.0%"]  # 1 - 17/32, 1 - 9/18
    assert rows["idle after balancing, predicted"] == ["0.0%", "0.0%"]
    assert rows["speed-up, predicted"] == ["1.88x", "2.00x"]  # of 6, 8, 10, 8 and 4, 4, 5, 4
    assert rows["heaviest load / lower bound, before"] == ["2.000", "2.250"]
    assert rows["heaviest load / lower bound, worst step"] == ["1.250", "1.250"]
    assert rows["tokens moved"] == ["25.0%", "25.0%"]
    assert rows["in the background: plan"] == ["375.00 ms", "500.00 ms"]
    assert not any("measured" in label for label in rows)
    write(here / "timed.jsonl", *TIMED_STEPS)
    rows = _rows(printed("metrics", "timed.jsonl"))
    numbers = [f"idle {when} balancing, {how}" for when in ("before", "after") for how in ("predicted", "measured")]
    assert list(rows)[3:9] == [*numbers, "speed-up, predicted", "speed-up, measured"]
    assert rows["idle before balancing, measured"] == ["31.2%", "-"]  # the last step was balanced
    assert rows["idle after balancing, measured"] == ["6.2%", "6.2%"]
    assert (rows["speed-up, measured"], rows["step time"]) == (["2.00x", "-"], ["1,000.00 ms"] * 2)


def test_runs_are_compared_by_their_numbers_and_options(here: Path) -> None:
    a: dict[str, Any] = {"seed": 7, "strategy": "none", "data": {"datasets": ["ml-20m"], "batch_size": 8}}
    b = {**a, "strategy": "lpt-swap", "data": {**a["data"], "batch_size": 32}, "x": 1}
    write(here / "a.jsonl", *STEPS, options=a)
    write(here / "b.jsonl", *TIMED_STEPS, options=b)
    with (here / "b.jsonl").open("a") as file:
        file.write("{")
    text, words, document = _both("metrics", "a.jsonl", "b.jsonl")
    lines = text.splitlines()
    assert lines[0].startswith("a.jsonl: 5 steps on 2 ranks, run ")
    assert lines[1].startswith("b.jsonl: 4 steps on 2 ranks, run ")
    assert lines[2] == "skipped 1 line that could not be read"
    rows = _rows("\n".join(lines[3:]))
    assert rows["idle before balancing, predicted"] == ["44.7%", "33.3%"]
    assert rows["speed-up, measured"] == ["-", "2.00x"]
    assert (rows["strategy"], rows["data.batch_size"], rows["x"]) == (["none", "lpt-swap"], ["8", "32"], ["-", "1"])
    assert not {"seed", "data.datasets"} & rows.keys()
    assert sorted(path.name for path in here.iterdir()) == ["a.jsonl", "b.jsonl"]
    units = {shown.name: shown.unit for shown in SHOWN}
    for log, name in zip(document["logs"], ("a.jsonl", "b.jsonl"), strict=True):
        assert list(log) == ["log", "steps", "ranks", "run", "all", "last", "skipped"]
        assert (log["log"], log["ranks"], log["skipped"]) == (name, 2, int(name == "b.jsonl"))
        assert log["run"]["id"] in words
        assert all(set(units[number].show(value).split()) <= words for number, value in log["all"].items())
