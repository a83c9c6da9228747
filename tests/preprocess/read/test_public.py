"""Archives of public datasets: downloaded, checked and unpacked; for layouts, see golden/public.toml."""

import http.server
import io
import random
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import md5
from pathlib import Path
from typing import cast

import pytest
import requests

from evenrank.core.errors import DataError
from evenrank.preprocess.read.public import CATALOG, PublicArchive, ensure_raw_files
from tests.preprocess.decoded import bytes_in

PURE, ML_20M = CATALOG["kuairand-pure"], CATALOG["ml-20m"]
PURE_FILES = {f"KuaiRand-Pure/{name}": name.encode() for name in PURE.files}
RATINGS = {"ml-20m/ratings.csv": b"userId,movieId,rating,timestamp\n1,2,3.0,4\n"}


def _zip(members: dict[str, bytes], link: str = "") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        if link:
            info = zipfile.ZipInfo(link)
            info.external_attr = 0o120777 << 16
            archive.writestr(info, "/etc/passwd")
    return buffer.getvalue()


def _tar(members: dict[str, bytes], other: str = "", kind: bytes = tarfile.REGTYPE) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in {**members, **({other: b""} if other else {})}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if name == other:
                info.type, info.linkname = kind, "KuaiRand-Pure/data/user_features_pure.csv"
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


# Incompressible, and large enough to be received in several chunks.
LARGE = random.Random(0).randbytes(400_000)
LARGE_ZIP = _zip({"ml-20m/ratings.csv": LARGE})
UNPACKED = {"ml-20m.zip": LARGE_ZIP, "ml-20m/ratings.csv": LARGE}


class _Server(http.server.ThreadingHTTPServer):
    """Serves one archive, perhaps without ranges, or only the first bytes before the connection is closed."""

    archive, has_ranges, max_bytes = b"", True, 1 << 30

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ranges: list[str] = []  # that were requested

    def dataset(self, archive: bytes = LARGE_ZIP, of: PublicArchive = ML_20M) -> PublicArchive:
        self.archive = archive
        return replace(of, url=f"http://127.0.0.1:{self.server_port}/{of.archive}", md5=md5(archive).hexdigest())


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        served, start = cast(_Server, self.server), 0
        served.ranges.append(self.headers["Range"])
        if self.path == "/nothing.zip":
            self.send_error(404)
            return
        size = len(served.archive)
        if served.has_ranges:
            start = int(served.ranges[-1].removeprefix("bytes=").removesuffix("-"))
        self.send_response(200 if not served.has_ranges else 206 if start < size else 416)
        self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.send_header("Content-Length", str(max(0, size - start)))
        self.end_headers()
        self.wfile.write(served.archive[start:][: served.max_bytes])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as served:
        threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True).start()
        yield served
        served.shutdown()


ZIP, TAR = _zip({"ml-20m/ratings.csv": RATINGS["ml-20m/ratings.csv"] * 50}), _tar(PURE_FILES)
INTERRUPTED = "connection was interrupted, and the next attempt resumes from there; check"
BROKEN, OUTSIDE = "could not be unpacked .* check that the archive is complete", "a path outside its folder"
INVALID = [
    (ML_20M, _zip({"ml-20m/links.csv": b""}), "does not contain ml-20m/ratings.csv; delete it"),
    (ML_20M, ZIP[:-40], BROKEN),
    (ML_20M, ZIP.replace(b"1,2,3.0,4", b"1,2,3.0,5"), "not be unpacked .* Bad CRC-32 .* check that the arch"),
    (ML_20M, _zip({**RATINGS, "../x": b""}), rf"contains '\.\./x', {OUTSIDE}"),
    (ML_20M, _zip({**RATINGS, "/x": b""}), f"contains '/x', {OUTSIDE}"),
    (ML_20M, _zip({**RATINGS, "a\\..\\x": b""}), OUTSIDE),
    (ML_20M, _zip({**RATINGS, "C:x": b""}), f"contains 'C:x', {OUTSIDE}"),
    (ML_20M, _zip(RATINGS, link="ml-20m/x"), "contains 'ml-20m/x', a link or a device"),
    (PURE, _tar({}, next(iter(PURE_FILES)), tarfile.DIRTYPE), "does not contain KuaiRand-Pure/data/log"),
    (PURE, b"not a gzip", BROKEN),
    (PURE, TAR[: len(TAR) // 2], BROKEN),
    (PURE, _tar(PURE_FILES, "x", tarfile.SYMTYPE), "contains 'x', a link or a device"),
]


def test_an_invalid_archive_or_a_server_without_it_is_an_error(tmp_path: Path, server: _Server) -> None:
    for number, (of, archive, message) in enumerate(INVALID):
        raw = tmp_path / f"{number}"
        with pytest.raises(DataError, match=rf"\A[^\n]*{message}[^\n]*\Z"):
            ensure_raw_files(server.dataset(archive, of), raw)
        assert [path.name for path in raw.iterdir()] == [of.archive]
    for url, message in (
        (f"http://127.0.0.1:{server.server_port}/nothing.zip", "the server returned status 404; check"),
        ("http://127.0.0.1:9/ml-20m.zip", "the server cannot be reached; check the network, or put ml-20m.zip, or a"),
    ):
        with pytest.raises(DataError, match=f"could not be downloaded: {message}"):
            ensure_raw_files(replace(ML_20M, url=url), tmp_path / "raw")
        assert not (tmp_path / "raw").exists()


def test_an_existing_archive_is_used_if_it_is_the_right_one_and_its_folder_is_free(tmp_path: Path) -> None:
    first, second, users = (f"./{name}" for name in PURE_FILES)  # in any order of its members
    tar = _tar({"./KuaiRand-Pure/load.py": b"unused", users: b"u", second: b"two" * 10_000, first: b"one"})
    (tmp_path / "KuaiRand-Pure.tar.gz").write_bytes(tar)
    (tmp_path / "KuaiRand-Pure").write_bytes(b"mine")
    dataset = replace(PURE, md5=md5(tar).hexdigest())
    for of, raw, message in (
        (PURE, tmp_path, "has MD5 .*, expected 0820331067a3784d9691136f772b35a7; delete it"),
        (dataset, tmp_path, "could not be unpacked into"),
        (dataset, tmp_path / "KuaiRand-Pure", "Pure cannot be used for raw files: .*; choose another folder"),
    ):
        with pytest.raises(DataError, match=message):
            ensure_raw_files(of, raw)
        assert bytes_in(tmp_path) == {"KuaiRand-Pure.tar.gz": tar, "KuaiRand-Pure": b"mine"}
    (tmp_path / "KuaiRand-Pure").unlink()
    folder = ensure_raw_files(dataset, tmp_path)
    assert folder == tmp_path / "KuaiRand-Pure"
    assert bytes_in(folder) == dict(zip(PURE.files, (b"one", b"two" * 10_000, b"u"), strict=True))


@pytest.mark.parametrize(("has_ranges", "error"), [(True, DataError), (False, DataError), (True, KeyboardInterrupt)])
def test_an_interrupted_download_is_completed(
    tmp_path: Path, server: _Server, monkeypatch: pytest.MonkeyPatch, has_ranges: bool, error: type[BaseException]
) -> None:
    receive = requests.Response.iter_content

    def receive_some(response: requests.Response, chunk_size: int) -> Iterator[bytes]:
        for chunk in receive(response, chunk_size):
            yield chunk
            if error is KeyboardInterrupt:  # where a thread that waits for the next chunk is interrupted
                raise KeyboardInterrupt

    server.has_ranges, server.max_bytes = has_ranges, 300_000
    with monkeypatch.context() as patch:
        patch.setattr(requests.Response, "iter_content", receive_some)
        with pytest.raises(error, match=INTERRUPTED if error is DataError else None):
            ensure_raw_files(server.dataset(), tmp_path / "raw")
    ((name, received),) = bytes_in(tmp_path / "raw").items()
    assert name == "ml-20m.zip.partial"
    assert 0 < len(received) <= 300_000
    assert LARGE_ZIP.startswith(received)
    server.max_bytes = 1 << 30
    ensure_raw_files(server.dataset(), tmp_path / "raw")
    assert bytes_in(tmp_path / "raw") == UNPACKED
    assert server.ranges == ["bytes=0-", f"bytes={len(received)}-"]


def test_a_partial_file_is_used_if_it_is_complete_and_removed_if_it_is_wrong(tmp_path: Path, server: _Server) -> None:
    for number, content in enumerate((LARGE_ZIP, b"of another file", b"longer than the archive" * 100_000)):
        (raw := tmp_path / f"{number}").mkdir()
        (raw / "ml-20m.zip.partial").write_bytes(content)
        if content != LARGE_ZIP:
            with pytest.raises(DataError, match="the MD5 of the received file differs from the catalog's"):
                ensure_raw_files(server.dataset(), raw)
            assert bytes_in(raw) == {}
        ensure_raw_files(server.dataset(), raw)
        assert bytes_in(raw) == UNPACKED


def test_one_of_several_concurrent_calls_downloads_and_shows_progress_on_request(
    tmp_path: Path, server: _Server, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ensure_raw_files, [server.dataset()] * 4, [tmp_path / "raw"] * 4))
    assert bytes_in(tmp_path / "raw") == UNPACKED
    assert len(server.ranges) == 1
    assert capsys.readouterr() == ("", "")
    ensure_raw_files(server.dataset(), tmp_path / "other", show_progress=True)
    assert "400k/400k" in capsys.readouterr().err
