"""A server with the S3 protocol, in a process of its own, and a bucket in it."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from pyarrow import fs

BUCKET, SECRET = "histories", "h1dden"

# Prints its port when it is ready, serves until its standard input is closed, and logs the bytes and user of requests.
_SERVER = """
import sys
from moto.moto_server.threaded_moto_server import MotoRequestHandler
from moto.server import ThreadedMotoServer
def log_request(self, code="-", size="-"):
    user = self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]
    self.log("info", '"%s" %s %s %s', self.requestline, code, self.headers.get("Range"), user)
MotoRequestHandler.log_request = log_request
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class Read(NamedTuple):
    """A request for bytes first..end-1 of an object."""

    user: str
    key: str
    first: int
    end: int


@dataclass(frozen=True, kw_only=True)
class S3:
    """A running server. URLs have credentials in them."""

    port: int
    log: Path

    def url(self, key: str, bucket: str = BUCKET, user: str = "key") -> str:
        options = f"scheme=http&endpoint_override=127.0.0.1:{self.port}&region=us-east-1"
        return f"s3://{user}:{SECRET}@{bucket}/{key}?{options}"

    @property
    def files(self) -> fs.FileSystem:
        return fs.FileSystem.from_uri(self.url("") + "&allow_bucket_creation=true")[0]

    def put(self, source: Path, key: str) -> None:
        """Copy a file or folder into the bucket."""
        places = {"source_filesystem": fs.LocalFileSystem(), "destination_filesystem": self.files}
        fs.copy_files(str(source), f"{BUCKET}/{key}", **places)

    def keys(self, key: str) -> set[str]:
        """Return the files below a key, relative to it."""
        found = self.files.get_file_info(fs.FileSelector(f"{BUCKET}/{key}", recursive=True, allow_not_found=True))
        return {info.path.removeprefix(f"{BUCKET}/{key}/") for info in found if info.is_file}

    def read(self, key: str) -> bytes:
        with self.files.open_input_file(f"{BUCKET}/{key}") as file:
            return bytes(file.read())

    def num_reads(self, key: str) -> int:
        """Return how many requests have read an object."""
        return self.log.read_text().count(f'"GET /{BUCKET}/{key}')

    def reads(self, key: str) -> list[Read]:
        """Return the requests that have read objects below a key."""
        pattern = rf'"GET /{BUCKET}/({re.escape(key)}/\S+) HTTP/1.1" 206 bytes=(\d+)-(\d+) (\w+)'
        found = re.findall(pattern, self.log.read_text())
        return [Read(user, name, int(first), int(last) + 1) for name, first, last, user in found]


@contextlib.contextmanager
def run_s3(folder: Path, *, checks_credentials: bool = False) -> Iterator[S3]:
    """Start a server with an empty bucket; one that checks credentials has no bucket, and knows no user."""
    pytest.importorskip("moto", reason="needs moto, of the tools of tests")
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    environment |= {"INITIAL_NO_AUTH_ACTION_COUNT": "0"} if checks_credentials else {}
    command, pipe = [sys.executable, "-P", "-c", _SERVER], subprocess.PIPE
    with (folder / "requests.log").open("xb") as log:
        server = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, env=environment)
    try:
        assert server.stdout is not None
        s3 = S3(port=int(server.stdout.readline()), log=folder / "requests.log")
        if not checks_credentials:
            s3.files.create_dir(BUCKET)
        yield s3
    finally:
        server.kill()
        server.communicate()
