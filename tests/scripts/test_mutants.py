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


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkout of one file, where no test is run."""
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "shelf.py").write_text(SOURCE)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "LIST", tmp_path / "mutants.toml")
    return tmp_path


def _drawn(checkout: Path) -> list[Mutant]:
    mutants.draw(seed=0, count=100)
    return read(checkout / "mutants.toml")[0]


def test_each_kind_of_fault_is_drawn_and_none_in_types_texts_and_defaults(checkout: Path) -> None:
    assert {(each.kind, each.before, each.after) for each in _drawn(checkout)} == {
        ("comparison", "len(books) > limit", "(len(books) >= limit)"),
        (
            "check",
            'if len(books) > limit:\n            raise ValueError(f"at most {1 + 1}")',
            "if False:\n    raise ValueError(f'at most {1 + 1}')",
        ),
        ("bound", ":limit", ":limit + 1"),
        ("operator", "min(first)", "max(first)"),
        ("operator", "min(first) + len(first)", "(min(first) - len(first))"),
        ("operator", "min(first) + len(first) + 1", "(min(first) + len(first) - 1)"),
        ("constant", "1", "(2)"),
    }


def test_mutants_are_found_where_lines_and_files_have_moved(checkout: Path) -> None:
    drawn = _drawn(checkout)
    for text, file in ((SOURCE, "core/shelf.py"), (f"import os\n\n\n{SOURCE}", "datasets/other.py")):
        (checkout / "core" / "shelf.py").unlink()
        (checkout / file).parent.mkdir(exist_ok=True)
        (checkout / file).write_text(text)
        found: Any = [planted(each, checkout) for each in drawn]
        assert {path for path, _ in found} == {checkout / file}
        assert len({ast.dump(ast.parse(mutated)) for _, mutated in found} - {ast.dump(ast.parse(text))}) == len(drawn)
    (checkout / file).write_text(SOURCE.replace("put", "take"))
    assert [planted(each, checkout) for each in drawn] == [None] * len(drawn)


def test_a_test_that_fails_without_a_mutant_kills_none(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = {"tests/a.py::test_mutant": False, "tests/a.py::test_always": True}

    def first_failing(_: Path, tests: list[str], limits: object) -> str | None:
        is_planted = (checkout / "core" / "shelf.py").read_text() != SOURCE
        chosen = [test for test in failing if f"--deselect={test}" not in tests]
        fail = [test for test in chosen if (is_planted or failing[test]) and (test in tests or "::" not in tests[0])]
        return fail[-1] if fail else None

    monkeypatch.setattr(mutants, "first_failing", first_failing)
    (checkout / "tests" / "core").mkdir(parents=True)
    mutant, sound = _drawn(checkout)[0], dict[str, bool]()
    assert judge(mutant, checkout, SURVIVED, sound, (1, 1)) == "tests/a.py"
    del failing["tests/a.py::test_mutant"]
    assert judge(mutant, checkout, SURVIVED, sound, (1, 1)) == SURVIVED
    assert judge(mutant._replace(function="gone"), checkout, SURVIVED, sound, (1, 1)) == GONE
    assert sound == {"tests/a.py::test_mutant": True, "tests/a.py::test_always": False}
    assert (checkout / "core" / "shelf.py").read_text() == SOURCE


def test_a_test_that_fails_once_kills_none(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [None, "tests/a.py::test_busy", None, "tests/a.py::test_mutant", "tests/a.py::test_mutant"]

    def first_failing(_: Path, tests: list[str], limits: object) -> str | None:
        assert "--deselect=tests/a.py::test_always" in tests
        assert ("--deselect=tests/a.py::test_busy" in tests) == (len(failures) < 3)
        return failures.pop(0)

    monkeypatch.setattr(mutants, "first_failing", first_failing)
    for folder in ("tests/core", "tests/laws"):
        (checkout / folder).mkdir(parents=True)
    sound = {"tests/a.py::test_busy": True, "tests/a.py::test_mutant": True, "tests/a.py::test_always": False}
    assert judge(_drawn(checkout)[0], checkout, SURVIVED, sound, (1, 1)) == "tests/a.py"
    assert not failures


@pytest.mark.processes
def test_a_test_that_does_not_end_fails(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("def test_a(): pass\n\ndef test_b():\n    while True: pass\n")
    assert first_failing(tmp_path, ["tests/test_a.py"], (1, 100)) == "tests/test_a.py::test_b"
    assert first_failing(tmp_path, ["tests/test_a.py", "--deselect=tests/test_a.py::test_b"], (1, 100)) is None


def test_results_are_of_listed_mutants() -> None:
    listed, results = read(LIST)
    names = {each.name for each in listed}
    assert len(names) == len(listed)
    assert results.keys() <= names
