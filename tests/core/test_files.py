import os
from collections.abc import Callable
from pathlib import Path

import pytest

from evenrank.core import files
from evenrank.core.errors import DataError
from evenrank.core.files import check_regular, locked, open_regular, opener_of_own_files


@pytest.mark.timeout(60, method="thread")  # a read that waits cannot be interrupted
@pytest.mark.parametrize("refuse", [check_regular, open_regular])
def test_only_regular_files_are_opened(tmp_path: Path, refuse: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    faults = {tmp_path / "pipe": "{} is a named pipe, not a regular file; put the data itself there"}
    faults |= {tmp_path: "{} is a folder, not a regular file", Path("/dev/zero"): "{} is a device, not a regular file"}
    faults |= dict.fromkeys((tmp_path / "missing", Path("a\0b")), r"cannot be read: .*; check the path and its permis")
    for path, fault in faults.items():
        with pytest.raises(DataError, match=fault.format(path)):
            refuse(path)


def test_files_are_read_through_links_and_own_files_not_written_through_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    check_regular(tmp_path / "link")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"kept"
    with pytest.raises(OSError, match="symbolic links"), open(tmp_path / "link", "w", opener=opener_of_own_files):
        pass
    for name, message in (("link", "symbolic links"), ("precious", "precious is not a lock file"), (".", "not a lock")):
        with pytest.raises(OSError, match=message), locked(tmp_path / name):
            pass
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    (tmp_path / ".out.guessed.partial").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        files.write_text(tmp_path / "out", "written")
    files.write_text(tmp_path / "out", "written")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"link": "kept", "out": "written", "precious": "kept"}
