"""`FolderLock`: one job at a time writes to a folder."""

import contextlib
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from evenrank.core.errors import DataError
from evenrank.core.files import locked, open_regular, write_text


class FolderLock:
    """The lock of a folder, held until it is closed or the process ends, even by SIGKILL.

    OUT/.lock          empty, locked by the process that writes to OUT
    OUT/.lock-holder   says which one that is

    Args:
        folder: created if missing.

    Raises:
        DataError: another process holds the lock, or the file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        holder = folder / ".lock-holder"
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(folder / ".lock", seconds=0.1))
            except TimeoutError:
                raise DataError(
                    f"{folder} is in use by {_read(holder) or 'another process'}; wait for it, or choose another folder"
                ) from None
            except OSError as error:
                raise DataError(f"{folder} cannot be locked: {error.strerror}; choose another folder") from error
            write_text(holder, f"process {os.getpid()} on host {socket.gethostname()}")
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def _read(path: Path) -> str:
    with contextlib.suppress(DataError, OSError), open_regular(path) as file:
        return file.read().decode(errors="replace")
    return ""
