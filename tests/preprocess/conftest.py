import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """Return the folder of a file system of 16 KiB."""
    # Not below pytest's folders, which could not be removed while it is mounted.
    disk = tempfile.mkdtemp(prefix="evenrank-disk-")
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", disk]
    is_mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        if not is_mounted:
            pytest.skip("this user cannot mount a file system")
        yield Path(disk)
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", disk], check=True)
        os.rmdir(disk)
