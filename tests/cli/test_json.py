"""`--json`: one document with the numbers of the text, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from evenrank.dataloader.balance.metrics.step_metrics import SHOWN
from tests.cli.programs import Evenrank
from tests.dataloader.balance.metrics.example_steps import STEPS, TIMED_STEPS, write


def _text_and_json(evenrank: Evenrank, *arguments: object) -> tuple[set[str], dict[str, Any]]:
    """Return the words of what a command prints, and the document that it prints with `--json`."""
    text, document = evenrank(*arguments), evenrank(*arguments, "--json")
    assert (text.returncode, document.returncode, text.stderr, document.stderr) == (0, 0, "", "")
    return set(text.stdout.split()), json.loads(document.stdout)


def _check_gains(words: set[str], gains: list[dict[str, Any]], compared: str) -> None:
    for gain in gains:
        shares = [f"{gain[name]:.1%}" for name in ("idle_before", "idle_after")]
        cells = [
            f"{gain['ranks']:,}",
            *gain[compared].split(),
            f"{gain['speedup']:.2f}x",
            f"{gain['moved_tokens']:.0%}",
        ]
        assert {*shares, *cells, f"{gain['ratio_after']:.3f}", f"{gain['one_sample']:.0%}"} <= words


def test_inspect(small_dataset: Path, here: Path, evenrank: Evenrank) -> None:
    words, document = _text_and_json(evenrank, "inspect", small_dataset, "--html", "page.html")
    assert list(document) == [
        *("path", "dataset", "content_hash", "splits", "vocabulary_sizes", "statistics", "gains", "routing", "report")
    ]
    assert document["report"] in words
    assert document["content_hash"][:12] in words
    for split in document["splits"].values():
        counts = [split["rows"], split["events"], split["files"], *split["lengths"].values()]
        assert {f"{count:,}" for count in counts} <= words
    assert {f"{size:,}" for size in document["vocabulary_sizes"].values()} <= words
    assert f"{document['statistics']['users']:,}" in words
    _check_gains(words, document["gains"], "model")
    assert [gain["ranks"] for gain in document["gains"]] == [6, 6]  # about 210 rows
    assert {f"{ratio:.2f}" for ratio in document["routing"]["most_frequent"] if ratio < 10} <= words


def test_simulate(evenrank: Evenrank) -> None:
    sizes = ("--ranks", "2,4", "--batch-size", 8, "--steps", 5)
    words, document = _text_and_json(evenrank, "simulate", "zipf:exponent=1.2", *sizes)
    assert list(document) == ["options", "drawn_with_replacement", "remedies", "gains"]
    assert (document["options"]["source"], document["options"]["steps"]) == ("zipf:exponent=1.2", 5)
    _check_gains(words, document["gains"], "strategy")
    assert [gain["ranks"] for gain in document["gains"]] == [2] * 4 + [4] * 4
    assert [remedy["instead"] for remedy in document["remedies"]] == [
        *("as above", "--window 8", "--batch-size 16", "--max-history-length 256")
    ]
    for remedy in document["remedies"]:
        assert {f"{remedy['idle_after']:.1%}", f"{remedy['time_per_sample']:.2f}x"} <= words


def test_metrics(here: Path, evenrank: Evenrank) -> None:
    write(here / "a.jsonl", *TIMED_STEPS)
    write(here / "b.jsonl", *STEPS)
    with (here / "b.jsonl").open("a") as file:
        file.write("{")
    for logs in (["a.jsonl"], ["a.jsonl", "b.jsonl"]):
        words, document = _text_and_json(evenrank, "metrics", *logs)
        assert list(document) == ["logs"]
        for log, name in zip(document["logs"], logs, strict=True):
            assert list(log) == ["log", "steps", "ranks", "run", "all", "last", "skipped"]
            assert (log["log"], log["ranks"], log["skipped"]) == (name, 2, int(name == "b.jsonl"))
            assert log["run"]["id"] in words
            units = {shown.name: shown.unit for shown in SHOWN}
            for number, value in log["all"].items():
                assert set(units[number].show(value).split()) <= words


@pytest.mark.parametrize("command", ["inspect no", "simulate no", "metrics no", "fit no", "simulate zipf --ranks 0"])
def test_a_mistake_is_a_line_and_no_document(here: Path, evenrank: Evenrank, command: str) -> None:
    run = evenrank(*command.split(), "--json")
    assert (run.returncode, run.stdout, run.stderr.count("\n"), run.stderr[:7]) == (2, "", 1, "error: ")
    assert evenrank("simulate", "zipf", "--ranks", 2, "--steps", 1).stdout.startswith("zipf: 1 steps of ")
