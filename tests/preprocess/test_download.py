"""Downloads from a real server on this machine."""

import http.server
import io
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from hashlib import md5
from pathlib import Path

import pytest

from evenrank.datasets.errors import DataError
from evenrank.preprocess.catalog import CATALOG, PublicDataset
from evenrank.preprocess.download import ensure_raw_files

RATINGS = b"userId,movieId,rating,timestamp\n1,2,3.0,4\n"


def _zip(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *args: object) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


def _served(tmp_path: Path, server: str, archive: bytes, checksum: str | None = None) -> PublicDataset:
    (tmp_path / "served" / "ml-20m.zip").write_bytes(archive)
    return replace(CATALOG["ml-20m"], url=f"{server}/ml-20m.zip", md5=checksum or md5(archive).hexdigest())


def test_what_is_missing_is_downloaded_and_unpacked(tmp_path: Path, server: str) -> None:
    dataset = _served(tmp_path, server, _zip({"ml-20m/ratings.csv": RATINGS, "ml-20m/links.csv": b"unused"}))
    folder = ensure_raw_files(dataset, tmp_path / "raw")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"ratings.csv": RATINGS}


def test_what_is_there_is_not_downloaded_again(tmp_path: Path) -> None:
    (tmp_path / "raw" / "ml-20m").mkdir(parents=True)
    (tmp_path / "raw" / "ml-20m" / "ratings.csv").write_bytes(RATINGS)
    assert ensure_raw_files(CATALOG["ml-20m"], tmp_path / "raw") == tmp_path / "raw" / "ml-20m"


def test_a_wrong_checksum_leaves_nothing(tmp_path: Path, server: str) -> None:
    dataset = _served(tmp_path, server, _zip({"ml-20m/ratings.csv": RATINGS}), checksum="0" * 32)
    with pytest.raises(DataError, match="what came has another MD5 than the catalog says"):
        ensure_raw_files(dataset, tmp_path / "raw")
    assert not (tmp_path / "raw").exists()


def test_a_missing_file_on_the_server_is_one_line(tmp_path: Path, server: str) -> None:
    dataset = replace(CATALOG["ml-20m"], url=f"{server}/nothing.zip")
    with pytest.raises(DataError, match="could not be downloaded: the server answers with status 404; check"):
        ensure_raw_files(dataset, tmp_path / "raw")
    assert not (tmp_path / "raw").exists()


def test_an_unreachable_server_is_one_line(tmp_path: Path) -> None:
    dataset = replace(CATALOG["ml-20m"], url="http://127.0.0.1:9/ml-20m.zip")
    with pytest.raises(DataError, match=r"the server cannot be reached; check the network, or put ml-20m.zip, or a"):
        ensure_raw_files(dataset, tmp_path / "raw")


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (_zip({"ml-20m/links.csv": b""}), "does not hold ml-20m/ratings.csv"),
        (b"not a zip", "could not be unpacked .* is it whole"),
        (_zip({"ml-20m/ratings.csv": RATINGS * 50})[:-40], "could not be unpacked .* is it whole"),
    ],
)
def test_a_broken_archive_leaves_nothing_unpacked(tmp_path: Path, server: str, archive: bytes, message: str) -> None:
    dataset = _served(tmp_path, server, archive)
    with pytest.raises(DataError, match=message):
        ensure_raw_files(dataset, tmp_path / "raw")
    assert [path.name for path in (tmp_path / "raw").iterdir()] == ["ml-20m.zip"]
