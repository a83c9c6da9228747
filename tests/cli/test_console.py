import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from evenrank.cli import console
from evenrank.cli.main import run_command
from evenrank.core.errors import ConfigError, MissingPackageError, RankLostError
from evenrank.datasets.schema import MANIFEST_NAME
from tests.cli.programs import Evenrank

EVIL = "\x1b[31m\x07\x9b2J\u202e"
ESCAPED = r"\x1b[31m\x07\x9b2J\u202e"


def _has_controls(text: str) -> bool:
    return re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", text) is not None


def test_results_and_tables_and_errors_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    table = console.new_table(EVIL, left=[EVIL])
    table.add_row(f"[/x] {EVIL}")
    console.print_result(table)
    console.print_result(f"{EVIL}\n[/x] :warning:")
    console.print_error(f"{EVIL}\n[/x]")
    output = capsys.readouterr()
    assert not _has_controls(output.out + output.err)
    assert output.out.count(ESCAPED) == 3
    assert f"{ESCAPED}\n[/x] :warning:\n" in output.out
    assert output.err == f"error: {ESCAPED}\\n[/x]\n"


@pytest.mark.parametrize("kind", [ConfigError, MissingPackageError, RankLostError, OSError])
def test_a_command_that_fails_prints_one_printable_line(
    kind: type[Exception], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command() -> None:
        raise kind(f"a\r\nb{EVIL}")

    monkeypatch.setattr(sys, "argv", ["command"])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as ended:
        run_command(command)
    (line,) = capsys.readouterr().err.splitlines()
    assert (ended.value.code, line.isprintable(), line.startswith("error: ")) == (2, True, True)
    assert rf"a\r\nb{ESCAPED}" in line


def test_progress_is_escaped_on_one_rank(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with console.stages() as on_stage:
        on_stage(f"reading [/x] {EVIL}")
    assert f"reading [/x] {ESCAPED}" in capsys.readouterr().err
    with console.stages(shown=False) as on_stage:
        on_stage("importing torch")
    assert capsys.readouterr().err == ""


def test_arguments_in_usage_errors_are_escaped(evenrank: Evenrank) -> None:
    for arguments in ((f"--{EVIL}",), ("inspect", "a", EVIL), ("preprocess", f"--{EVIL}"), (EVIL,)):
        run = evenrank(*arguments)
        assert run.returncode == 2
        assert not _has_controls(run.stderr)
        assert "\\x1b[31m" in run.stderr


def test_labels_of_a_dataset_are_escaped(small_dataset: Path, tmp_path: Path, evenrank: Evenrank) -> None:
    folder = tmp_path / "a [/x]"
    shutil.copytree(small_dataset, folder)
    values = json.loads((small_dataset / MANIFEST_NAME).read_text())
    values["dataset"] = f"made by {EVIL}"
    values["options"][f"{EVIL}<b>"] = EVIL
    (folder / MANIFEST_NAME).write_text(json.dumps(values))
    run = evenrank("inspect", folder)
    assert run.returncode == 0, run.stderr
    assert ESCAPED in run.stdout
    (page,) = tmp_path.rglob("*.html")
    html = page.read_text()
    assert not _has_controls(run.stdout + html)
    assert f"{ESCAPED}&lt;b&gt;" in html
