import ast
from pathlib import Path
from typing import Any

import pytest

from scripts import mutants
from scripts.mutants import GONE, LIST, SURVIVED, Mutant, first_failing, judge, planted, read

SOURCE = '''"""A file."""


class Shelf:
    def put(self, books: list[int], limit: int = 3) -> int:
        if len(books) > limit:
            raise ValueError(f"at most {1 + 1}")
        first = books[:limit]
        return min(first) + len(first) + 1
'''
CHECK = 'if len(books) > limit:\n            raise ValueError(f"at most {1 + 1}")'
DRAWN = {
    ("comparison", "len(books) > limit", "(len(books) >= limit)"),
    ("check", CHECK, "if False:\n    raise ValueError(f'at most {1 + 1}')"),
    ("bound", ":limit", ":limit + 1"),
    ("operator", "min(first)", "max(first)"),
    ("operator", "min(first) + len(first)", "(min(first) - len(first))"),
    ("operator", "min(first) + len(first) + 1", "(min(first) + len(first) - 1)"),
    ("constant", "1", "(2)"),
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkout of one file, where no test is run."""
    for folder in ("core", "tests/core", "tests/laws"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "core" / "shelf.py").write_text(SOURCE)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "LIST", tmp_path / "mutants.toml")
    return tmp_path


def _drawn(checkout: Path) -> list[Mutant]:
    mutants.draw(seed=0, count=100)
    return read(checkout / "mutants.toml")[0]


def test_faults_are_drawn_and_found_where_lines_and_files_have_moved(checkout: Path) -> None:
    drawn = _drawn(checkout)
    assert {(each.kind, each.before, each.after) for each in drawn} == DRAWN  # none in types, texts and defaults
    for text, file in ((SOURCE, "core/shelf.py"), (f"import os\n\n\n{SOURCE}", "datasets/other.py")):
        (checkout / "core" / "shelf.py").unlink()
        (checkout / file).parent.mkdir(exist_ok=True)
        (checkout / file).write_text(text)
        found: Any = [planted(each, checkout) for each in drawn]
        assert {path for path, _ in found} == {checkout / file}
        assert len({ast.dump(ast.parse(mutated)) for _, mutated in found} - {ast.dump(ast.parse(text))}) == len(drawn)
    (checkout / file).write_text(SOURCE.replace("put", "take"))
    assert [planted(each, checkout) for each in drawn] == [None] * len(drawn)


def test_a_test_that_fails_without_a_mutant_or_only_once_kills_none(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant, sound, runs = _drawn(checkout)[0], dict[str, bool](), list[list[str]]()
    is_sound = {"tests/a.py::test_mutant": True, "tests/a.py::test_always": False}

    def first_failing(_: Path, tests: list[str], limits: object) -> str | None:
        runs.append(tests)
        if len(runs) == 1:
            return "tests/a.py::test_busy"
        is_planted = (checkout / "core" / "shelf.py").read_text() != SOURCE
        chosen = [test for test in is_sound if f"--deselect={test}" not in tests]
        fail = [
            each for each in chosen if (is_planted or not is_sound[each]) and (each in tests or "::" not in tests[0])
        ]
        return fail[-1] if fail else None

    monkeypatch.setattr(mutants, "first_failing", first_failing)
    assert judge(mutant, checkout, SURVIVED, sound, (1, 1)) == "tests/a.py"
    assert sound == is_sound | {"tests/a.py::test_busy": True}
    assert "--deselect=tests/a.py::test_busy" in runs[-1]
    del is_sound["tests/a.py::test_mutant"]
    assert judge(mutant, checkout, SURVIVED, sound, (1, 1)) == SURVIVED
    assert judge(mutant._replace(function="gone"), checkout, SURVIVED, sound, (1, 1)) == GONE
    assert (checkout / "core" / "shelf.py").read_text() == SOURCE


@pytest.mark.processes
def test_a_test_that_does_not_end_fails(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("def test_a(): pass\n\ndef test_b():\n    while True: pass\n")
    assert first_failing(tmp_path, ["tests/test_a.py"], (1, 100)) == "tests/test_a.py::test_b"
    assert first_failing(tmp_path, ["tests/test_a.py", "--deselect=tests/test_a.py::test_b"], (1, 100)) is None


def test_results_are_of_listed_mutants() -> None:
    listed, results = read(LIST)
    assert len(names := {each.name for each in listed}) == len(listed)
    assert results.keys() <= names
