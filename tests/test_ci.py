"""`.ci/run` runs its checks on what is committed, in a folder with the name of the package."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "run"
CHECKS = ["check", "check-imports", "package", "docs", "test"]


@pytest.mark.parametrize("name", ["evenrank", "a clone-2"])
def test_checks_run_in_a_folder_called_evenrank_whatever_the_clone_is_called(tmp_path: Path, name: str) -> None:
    clone, programs, log = tmp_path / name, tmp_path / "bin", tmp_path / "log"
    script = clone / ".ci" / "run"
    script.parent.mkdir(parents=True)
    script.write_bytes(SCRIPT.read_bytes())
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "message"]):
        subprocess.run([*git, *command], cwd=clone, check=True)
    programs.mkdir()
    for program, line in (("chromium", "true"), ("make", f"""echo "$1:$PWD:$(git status -s)" >> '{log}'""")):
        (programs / program).write_text(f"#!/bin/sh\n{line}\n")
        (programs / program).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    subprocess.run(["bash", str(script)], cwd="/", env=environment, check=True)
    checks, folders, changes = zip(*(line.split(":") for line in log.read_text().splitlines()), strict=True)
    assert list(checks) == CHECKS
    (folder,) = {Path(folder) for folder in folders}
    assert folder.name == "evenrank"
    assert (folder == clone) == (name == "evenrank")
    assert set(changes) == {""}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "bin", "log"])  # the copy is deleted
