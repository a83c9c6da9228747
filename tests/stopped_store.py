"""A store whose server stops answering, as if its host were stopped or cut off."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from tests.ranks import rank_context


class StoreServer:
    """A process that serves a TCPStore at a port of this machine."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid, self.port = pid, port

    def stop(self) -> None:
        """Stop the process, and return once none of its threads runs; its connections stay open."""
        os.kill(self.pid, signal.SIGSTOP)
        while any(") T " not in stat.read_text() for stat in Path(f"/proc/{self.pid}/task").glob("*/stat")):
            time.sleep(0.01)


@contextmanager
def store_server() -> Iterator[StoreServer]:
    context = rank_context()
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    try:
        yield StoreServer(process.pid or 0, pipe.recv())
    finally:
        process.kill()
        process.join()


def _serve(pipe: Connection) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipe.send(server.port)
    signal.pause()
