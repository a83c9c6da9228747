"""Public datasets: the layout of KuaiRand, and archives that are downloaded, checked and unpacked."""

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
from evenrank.preprocess import PreprocessConfig, preprocess
from evenrank.preprocess.read.public import CATALOG, PublicArchive, ensure_raw_files
from tests.preprocess.decoded import bytes_in, decode, read_rows

LOG_HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)
USERS_HEADER = (
    "user_id,user_active_degree,is_lowactive_period,is_live_streamer,is_video_author,follow_user_num,"
    "follow_user_num_range,fans_user_num,fans_user_num_range,friend_user_num,friend_user_num_range,register_days,"
    "register_days_range," + ",".join(f"onehot_feat{number}" for number in range(18))
)
ONE_HOT = "," * 17
USERS = (
    f'1,high_active,0,0,0,5,"(0,10]",0,0,0,0,107,61-90,{ONE_HOT}',
    f'2,full_active,0,0,1,386,"(250,500]",4,"[1,10)",2,"[1,5)",327,181-365,{ONE_HOT}',
    f"3,,0,0,1,0,0,,,,,327,181-365,{ONE_HOT}",
)


def log_line(
    *,
    user: object = 1,
    video: object = 10,
    time: object = 1_650_000_000_000,
    flags: str = "0,0,0,0,0,0,0",
    play: object = 0,
    duration: object = 1000,
    profile: object = 0,
    tab: object = 1,
) -> str:
    """Return a line of a log; `flags` are the columns is_click to long_view."""
    return f"{user},{video},20220415,1320,{time},{flags},{play},{duration},0,0,{profile},0,{tab}"


def write(folder: Path, files: dict[str, tuple[str, ...]]) -> Path:
    for name, lines in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return folder


PURE = CATALOG["kuairand-pure"]
PARTS_OF_27K = [f"{dates}_27k_part{number}" for dates in ("4_08_to_4_21", "4_22_to_5_08") for number in (1, 2)]
DATES = {"Pure": ["4_08_to_4_21_pure", "4_22_to_5_08_pure"], "1K": ["4_08_to_4_21_1k", "4_22_to_5_08_1k"]}
# The folder, the logs and the features of each dataset.
LAYOUTS = {
    f"kuairand-{size.lower()}": (
        f"KuaiRand-{size}",
        [f"log_standard_{log}.csv" for log in logs],
        f"user_features_{size.lower()}.csv",
    )
    for size, logs in {**DATES, "27K": PARTS_OF_27K}.items()
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_value_of_each_layout(tmp_path: Path, name: str) -> None:
    folder, logs, users = LAYOUTS[name]
    # User 1 is in every log, user 2 only in the second, user 4 only in the first and without features; user 3 has
    # features and no event.
    contents: dict[str, tuple[str, ...]] = {
        f"data/{log}": (LOG_HEADER, log_line(user=1, video=100 + number, time=1_650_000_000_000 + number))
        for number, log in enumerate(logs)
    }
    flags = {"time": 10**11, "flags": "1,0,1,0,1,0,1", "play": 2**53 + 1, "duration": 0, "profile": 1}
    contents[f"data/{logs[0]}"] += (log_line(user=4, video=7, **flags),)  # type: ignore[arg-type]
    flags = {"time": 253_402_300_799_999, "flags": "0,1,0,1,0,1,0", "play": -1, "duration": 34, "tab": 4}
    contents[f"data/{logs[1]}"] += (log_line(user=2, video=2**63 - 1, **flags),)  # type: ignore[arg-type]
    write(tmp_path / "raw" / folder, contents | {f"data/{users}": (USERS_HEADER, *USERS)})
    config = PreprocessConfig(dataset=name, raw_dir=tmp_path / "raw", out=tmp_path / "out", split="none")
    manifest = preprocess(replace(config, allow_empty=True))
    names = ["item_id", "action", "timestamp_ms", "play_time_ms", "duration_ms", "user_active_degree"]
    names += ["follow_user_num_range", "fans_user_num_range", "register_days_range"]
    rows = decode(tmp_path / "out", read_rows(tmp_path / "out" / "train"), features=True)
    count = len(logs)
    events = [range(100, 100 + count), [0] * count, range(1_650_000_000_000, 1_650_000_000_000 + count)]
    assert {row["user_id"]: [row[name] for name in names] for row in rows} == {
        1: [*map(list, events), [0] * count, [1000] * count, "high_active", "(0,10]", "0", "61-90"],
        4: [[7], [1 + 4 + 16 + 64 + 128], [10**11], [2**53 + 1], [0], None, None, None, None],
        2: [[2**63 - 1], [42], [253_402_300_799_999], [-1], [34], "full_active", "(250,500]", "[1,10)", "181-365"],
    }
    assert manifest.vocabulary_sizes["action"] == 256
    assert [source.path for source in manifest.sources] == [*logs, users]


RATINGS = b"userId,movieId,rating,timestamp\n1,2,3.0,4\n"
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


class _Server(http.server.ThreadingHTTPServer):
    """Serves one archive, perhaps without ranges, or only the first bytes before the connection is closed."""

    archive, has_ranges, max_bytes = b"", True, 1 << 30

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ranges: list[str] = []  # that were requested

    def dataset(self, archive: bytes, of: str = "ml-20m") -> PublicArchive:
        self.archive = archive
        url = f"http://127.0.0.1:{self.server_port}/{CATALOG[of].archive}"
        return replace(CATALOG[of], url=url, md5=md5(archive).hexdigest())


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
        ("kuairand-pure", _tar(PURE_FILES, "x", tarfile.SYMTYPE), "contains 'x', a link or a device"),
    ],
)
def test_an_invalid_archive_raises(tmp_path: Path, server: _Server, of: str, archive: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        ensure_raw_files(server.dataset(archive, of=of), tmp_path / "raw")
    assert "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "raw").iterdir()] == [CATALOG[of].archive]


def test_a_server_that_does_not_send_the_file_is_named(tmp_path: Path, server: _Server) -> None:
    dataset = replace(CATALOG["ml-20m"], url=f"http://127.0.0.1:{server.server_port}/nothing.zip")
    with pytest.raises(DataError, match="could not be downloaded: the server returned status 404; check"):
        ensure_raw_files(dataset, tmp_path / "raw")
    with pytest.raises(DataError, match=r"the server cannot be reached; check the network, or put ml-20m.zip, or a"):
        ensure_raw_files(replace(dataset, url="http://127.0.0.1:9/ml-20m.zip"), tmp_path / "raw")
    assert not (tmp_path / "raw").exists()


def test_an_existing_archive_is_used_if_it_is_the_right_one_and_its_folder_is_free(tmp_path: Path) -> None:
    first, second, users = (f"./{name}" for name in PURE_FILES)  # in any order of its members
    tar = _tar({"./KuaiRand-Pure/load.py": b"unused", users: b"u", second: b"two" * 10_000, first: b"one"})
    (tmp_path / "KuaiRand-Pure.tar.gz").write_bytes(tar)
    with pytest.raises(DataError, match=r"has MD5 .*, expected 0820331067a3784d9691136f772b35a7; delete it"):
        ensure_raw_files(PURE, tmp_path)
    dataset = replace(PURE, md5=md5(tar).hexdigest())
    (tmp_path / "KuaiRand-Pure").write_bytes(b"mine")
    with pytest.raises(DataError, match="could not be unpacked into"):
        ensure_raw_files(dataset, tmp_path)
    assert bytes_in(tmp_path) == {"KuaiRand-Pure.tar.gz": tar, "KuaiRand-Pure": b"mine"}
    with pytest.raises(DataError, match=r"Pure cannot be used for raw files: .*; choose another folder"):
        ensure_raw_files(dataset, tmp_path / "KuaiRand-Pure")
    (tmp_path / "KuaiRand-Pure").unlink()
    folder = ensure_raw_files(dataset, tmp_path)
    assert folder == tmp_path / "KuaiRand-Pure"
    assert bytes_in(folder) == dict(zip(PURE.files, (b"one", b"two" * 10_000, b"u"), strict=True))


# Incompressible, and large enough to be received in several chunks.
LARGE = random.Random(0).randbytes(400_000)
LARGE_ZIP = _zip({"ml-20m/ratings.csv": LARGE})
UNPACKED = {"ml-20m.zip": LARGE_ZIP, "ml-20m/ratings.csv": LARGE}


@pytest.mark.parametrize("has_ranges", [True, False])
def test_an_interrupted_download_is_completed(tmp_path: Path, server: _Server, has_ranges: bool) -> None:
    server.has_ranges, server.max_bytes = has_ranges, 300_000
    dataset = server.dataset(LARGE_ZIP)
    with pytest.raises(DataError, match="connection was interrupted, and the next attempt resumes from there; check"):
        ensure_raw_files(dataset, tmp_path / "raw")
    ((name, received),) = bytes_in(tmp_path / "raw").items()
    assert name == "ml-20m.zip.partial"
    assert 0 < len(received) <= 300_000
    assert LARGE_ZIP.startswith(received)
    server.max_bytes = 1 << 30
    ensure_raw_files(dataset, tmp_path / "raw")
    assert bytes_in(tmp_path / "raw") == UNPACKED
    assert server.ranges == ["bytes=0-", f"bytes={len(received)}-"]


def test_a_partial_file_is_used_if_it_is_complete_and_removed_if_it_is_wrong(tmp_path: Path, server: _Server) -> None:
    dataset = server.dataset(LARGE_ZIP)
    for number, content in enumerate((LARGE_ZIP, b"of another file", b"longer than the archive" * 100_000)):
        raw = tmp_path / f"{number}"
        raw.mkdir()
        (raw / "ml-20m.zip.partial").write_bytes(content)
        if content != LARGE_ZIP:
            with pytest.raises(DataError, match="the MD5 of the received file differs from the catalog's"):
                ensure_raw_files(dataset, raw)
            assert bytes_in(raw) == {}
        ensure_raw_files(dataset, raw)
        assert bytes_in(raw) == UNPACKED


def test_ctrl_c_keeps_only_the_partial_file(tmp_path: Path, server: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ml-20m.zip.partial").write_bytes(LARGE_ZIP[:100])
    receive = requests.Response.iter_content

    def receive_one_chunk(response: requests.Response, chunk_size: int) -> Iterator[bytes]:
        yield next(receive(response, chunk_size))[:60_000]
        raise KeyboardInterrupt  # where a thread that waits for the next chunk is interrupted

    monkeypatch.setattr(requests.Response, "iter_content", receive_one_chunk)
    with pytest.raises(KeyboardInterrupt):
        ensure_raw_files(server.dataset(LARGE_ZIP), tmp_path)
    assert bytes_in(tmp_path) == {"ml-20m.zip.partial": LARGE_ZIP[:60_100]}


def test_one_of_several_concurrent_calls_downloads_and_shows_progress_on_request(
    tmp_path: Path, server: _Server, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = server.dataset(LARGE_ZIP)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ensure_raw_files, [dataset] * 4, [tmp_path / "raw"] * 4))
    assert bytes_in(tmp_path / "raw") == UNPACKED
    assert len(server.ranges) == 1
    assert capsys.readouterr() == ("", "")
    ensure_raw_files(dataset, tmp_path / "other", show_progress=True)
    assert "400k/400k" in capsys.readouterr().err
