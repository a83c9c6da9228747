import http.server
import io
import random
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import md5
from pathlib import Path

import pytest
import requests

from evenrank.core.errors import DataError
from evenrank.preprocess.read.catalog import CATALOG, PublicArchive
from evenrank.preprocess.read.download import ensure_raw_files

RATINGS = b"userId,movieId,rating,timestamp\n1,2,3.0,4\n"
PURE = CATALOG["kuairand-pure"]
PURE_FILES = {f"KuaiRand-Pure/{name}": name.encode() for name in PURE.files}


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


@dataclass
class Server:
    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)  # contents by path
    has_ranges: bool = True  # whether Range headers are honoured
    max_bytes: int | None = None  # body bytes to send before the connection is closed; None: all
    requests: list[tuple[str, str | None]] = field(default_factory=list)  # path and Range header of each so far

    def dataset(self, archive: bytes, of: str = "ml-20m") -> PublicArchive:
        name = CATALOG[of].archive
        self.files[f"/{name}"] = archive
        return replace(CATALOG[of], url=f"{self.url}/{name}", md5=md5(archive).hexdigest())


@pytest.fixture
def server() -> Iterator[Server]:
    served = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested_range = self.headers["Range"]
            served.requests.append((self.path, requested_range))
            if self.path not in served.files:
                self.send_error(404)
                return
            data, status, start = served.files[self.path], 200, 0
            if requested_range and served.has_ranges:
                start = int(requested_range.removeprefix("bytes=").removesuffix("-"))
                status = 206 if start < len(data) else 416
            self.send_response(status)
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            self.wfile.write(data[start:][: served.max_bytes])

        def log_message(self, *args: object) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{httpd.server_port}"
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    yield served
    httpd.shutdown()
    httpd.server_close()


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_server_that_does_not_send_the_file_is_named(tmp_path: Path, server: Server) -> None:
    dataset = replace(CATALOG["ml-20m"], url=f"{server.url}/nothing.zip")
    with pytest.raises(DataError, match="could not be downloaded: the server returned status 404; check"):
        ensure_raw_files(dataset, tmp_path / "raw")
    with pytest.raises(DataError, match=r"the server cannot be reached; check the network, or put ml-20m.zip, or a"):
        ensure_raw_files(replace(dataset, url="http://127.0.0.1:9/ml-20m.zip"), tmp_path / "raw")
    assert not (tmp_path / "raw").exists()


ONE = {"ml-20m/ratings.csv": RATINGS}
ZIP = _zip({"ml-20m/ratings.csv": RATINGS * 50})
TAR = _tar(PURE_FILES)
BROKEN = "could not be unpacked .* check that the archive is complete"


@pytest.mark.parametrize(
    ("of", "archive", "message"),
    [
        ("ml-20m", _zip({"ml-20m/links.csv": b""}), "does not contain ml-20m/ratings.csv; delete it"),
        ("ml-20m", ZIP[:-40], BROKEN),
        ("ml-20m", ZIP.replace(b"1,2,3.0,4", b"1,2,3.0,5"), "not be unpacked .* Bad CRC-32 .* check that the arch"),
        ("ml-20m", _zip({**ONE, "../x": b""}), r"contains '\.\./x', a path outside its folder"),
        ("ml-20m", _zip({**ONE, "/x": b""}), "contains '/x', a path outside its folder"),
        ("ml-20m", _zip({**ONE, "a\\..\\x": b""}), "a path outside its folder"),
        ("ml-20m", _zip({**ONE, "C:x": b""}), "contains 'C:x', a path outside its folder"),
        ("ml-20m", _zip(ONE, link="ml-20m/x"), "contains 'ml-20m/x', a link or a device"),
        ("kuairand-pure", _tar({}, next(iter(PURE_FILES)), tarfile.DIRTYPE), "does not contain KuaiRand-Pure/data/log"),
        ("kuairand-pure", b"not a gzip", BROKEN),
        ("kuairand-pure", TAR[: len(TAR) // 2], BROKEN),
        ("kuairand-pure", _tar(PURE_FILES, "a/../../x"), r"contains 'a/\.\./\.\./x', a path outside its folder"),
        ("kuairand-pure", _tar(PURE_FILES, "x", tarfile.SYMTYPE), "contains 'x', a link or a device"),
        ("kuairand-pure", _tar(PURE_FILES, "x", tarfile.FIFOTYPE), "contains 'x', a link or a device"),
    ],
)
def test_an_invalid_archive_raises(tmp_path: Path, server: Server, of: str, archive: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        ensure_raw_files(server.dataset(archive, of=of), tmp_path / "raw")
    assert "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "raw").iterdir()] == [CATALOG[of].archive]


def test_a_tar_is_unpacked_in_any_order_of_its_members(tmp_path: Path, server: Server) -> None:
    first, second, users = (f"./{name}" for name in PURE_FILES)
    members = {"./KuaiRand-Pure/load.py": b"unused", users: b"u", second: b"two" * 10_000, first: b"one"}
    folder = ensure_raw_files(server.dataset(_tar(members), of="kuairand-pure"), tmp_path / "raw")
    assert folder == tmp_path / "raw" / "KuaiRand-Pure"
    assert _contents(folder) == dict(zip(PURE.files, (b"one", b"two" * 10_000, b"u"), strict=True))


def test_an_existing_archive_is_used_if_it_is_the_right_one_and_its_folder_is_free(tmp_path: Path) -> None:
    (tmp_path / "KuaiRand-Pure.tar.gz").write_bytes(TAR)
    with pytest.raises(DataError, match=r"has MD5 .*, expected 0820331067a3784d9691136f772b35a7; delete it"):
        ensure_raw_files(PURE, tmp_path)
    dataset = replace(PURE, md5=md5(TAR).hexdigest())
    (tmp_path / "KuaiRand-Pure").write_bytes(b"mine")
    with pytest.raises(DataError, match="could not be unpacked into"):
        ensure_raw_files(dataset, tmp_path)
    assert _contents(tmp_path) == {"KuaiRand-Pure.tar.gz": TAR, "KuaiRand-Pure": b"mine"}
    with pytest.raises(DataError, match=r"Pure cannot be used for raw files: .*; choose another folder"):
        ensure_raw_files(dataset, tmp_path / "KuaiRand-Pure")
    (tmp_path / "KuaiRand-Pure").unlink()
    assert _contents(ensure_raw_files(dataset, tmp_path)) == {name: name.encode() for name in PURE.files}


# Incompressible, and large enough to be received in several chunks.
LARGE = random.Random(0).randbytes(400_000)
LARGE_ZIP = _zip({"ml-20m/ratings.csv": LARGE})
UNPACKED = {"ml-20m.zip": LARGE_ZIP, "ml-20m/ratings.csv": LARGE}


def _write_partial(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "ml-20m.zip.partial").write_bytes(content)


@pytest.mark.parametrize("has_ranges", [True, False])
def test_an_interrupted_download_is_completed(tmp_path: Path, server: Server, has_ranges: bool) -> None:
    server.has_ranges, server.max_bytes = has_ranges, 300_000
    dataset = server.dataset(LARGE_ZIP)
    with pytest.raises(DataError, match="connection was interrupted, and the next attempt resumes from there; check"):
        ensure_raw_files(dataset, tmp_path / "raw")
    ((name, received),) = _contents(tmp_path / "raw").items()
    assert name == "ml-20m.zip.partial"
    assert 0 < len(received) <= 300_000
    assert LARGE_ZIP.startswith(received)

    server.max_bytes = None
    ensure_raw_files(dataset, tmp_path / "raw")
    assert _contents(tmp_path / "raw") == UNPACKED
    assert server.requests == [("/ml-20m.zip", "bytes=0-"), ("/ml-20m.zip", f"bytes={len(received)}-")]


@pytest.mark.parametrize("partial", [b"of another file", b"longer than the archive" * 100_000])
def test_a_wrong_checksum_removes_the_partial_file(tmp_path: Path, server: Server, partial: bytes) -> None:
    dataset = server.dataset(LARGE_ZIP)
    _write_partial(tmp_path, LARGE_ZIP)  # complete, so it is used
    ensure_raw_files(dataset, tmp_path / "raw")
    assert _contents(tmp_path / "raw") == UNPACKED
    shutil.rmtree(tmp_path / "raw")
    _write_partial(tmp_path, partial)
    with pytest.raises(DataError, match="the MD5 of the received file differs from the catalog's"):
        ensure_raw_files(dataset, tmp_path / "raw")
    assert _contents(tmp_path / "raw") == {}
    ensure_raw_files(dataset, tmp_path / "raw")
    assert _contents(tmp_path / "raw") == UNPACKED


def test_ctrl_c_keeps_only_the_partial_file(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_partial(tmp_path, LARGE_ZIP[:100])
    receive = requests.Response.iter_content

    def receive_one_chunk(response: requests.Response, chunk_size: int) -> Iterator[bytes]:
        yield next(receive(response, chunk_size))[:60_000]
        raise KeyboardInterrupt  # where a thread that waits for the next chunk is interrupted

    monkeypatch.setattr(requests.Response, "iter_content", receive_one_chunk)
    with pytest.raises(KeyboardInterrupt):
        ensure_raw_files(server.dataset(LARGE_ZIP), tmp_path / "raw")
    assert _contents(tmp_path / "raw") == {"ml-20m.zip.partial": LARGE_ZIP[:60_100]}


def test_one_of_several_concurrent_calls_downloads_and_shows_progress_on_request(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = server.dataset(LARGE_ZIP)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ensure_raw_files, [dataset] * 4, [tmp_path / "raw"] * 4))
    assert _contents(tmp_path / "raw") == UNPACKED
    assert len(server.requests) == 1
    assert capsys.readouterr() == ("", "")
    ensure_raw_files(dataset, tmp_path / "other", show_progress=True)
    assert "400k/400k" in capsys.readouterr().err
