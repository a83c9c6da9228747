from pathlib import Path

import pytest
from pyarrow import fs

from evenrank.core.errors import DataError, escape_controls
from evenrank.core.storage import Remote, is_url, join, local_path, locate


def test_a_url_is_recognized_also_after_it_has_become_a_path() -> None:
    for url in (
        "s3://bucket/log/*.csv",
        "gs://bucket",
        "abfs://c@a.dfs.core.windows.net/x",
        "hdfs://host:8020/x",
        "S3://b",
        "foo://b/x",
        "Foo+b://x",
    ):
        assert is_url(url)
        assert is_url(Path(url))
    for path in (
        "log.csv",
        "/s3/x",
        "s3:x",
        "day=1/log.csv",
        "lognormal:mean=5,std=1",
        "C:/x",
        "c:/x",
        "file:///out/mine",
        "FILE:///out",
    ):
        assert not is_url(path)
        assert not is_url(Path(path))


def test_file_urls_are_paths_of_this_host() -> None:
    for url in ("file:///out/my%20log.csv", Path("file:///out/my%20log.csv"), "File:///out/my%20log.csv"):
        assert locate(url) == local_path(url) == Path("/out/my log.csv")
    assert locate("out/mine") == Path("out/mine")


@pytest.mark.parametrize(
    ("url", "path", "shown"),
    [
        ("s3://key:secret@bucket/my%20log/*.csv?region=us-east-1", "bucket/my log/*.csv", "s3://bucket/my log/*.csv"),
        ("s3://bucket/?region=us-east-1", "bucket", "s3://bucket"),
        ("S3://key:secret@bucket/A?region=us-east-1", "bucket/A", "s3://bucket/A"),
        ("s3://bucket/a/b@c/?region=us-east-1", "bucket/a/b@c", "s3://bucket/a/b@c"),
        ("gs://anonymous@bucket/x", "bucket/x", "gs://anonymous@bucket/x"),
    ],
)
def test_a_remote_has_a_path_and_a_url_without_credentials_and_options(url: str, path: str, shown: str) -> None:
    for given in (url, Path(url)):
        remote = locate(given)
        assert isinstance(remote, Remote)
        assert (remote.path, str(remote)) == (path, shown)
        assert (remote / "a.csv").path == f"{path}/a.csv"
        assert str(remote / "a.csv") == f"{shown}/a.csv"


def test_names_are_joined_to_folders_and_before_the_options_of_a_url() -> None:
    assert join("out", "ml-1m") == join(Path("out"), "ml-1m") == Path("out/ml-1m")
    assert join("s3://bucket/out/?region=x", "ml-1m") == "s3://bucket/out/ml-1m?region=x"
    assert join(Path("s3://bucket/out?region=x"), "ml-1m") == "s3:/bucket/out/ml-1m?region=x"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://key:h1d/den@bucket/out", "s3://bucket/out cannot be opened: its credentials have characters"),
        ("s3://key:h1dden@bucket/out?token=h1dden", "s3://bucket/out cannot be opened: Unexpected query parameter"),
        ("s3://key:h1dden@bu cket/out", "s3://bu cket/out cannot be opened: "),
        ("foo://user:h1dden@host/x", "foo://host/x cannot be opened: Unrecognized filesystem type in URI"),
        ("https://user:h1dden@host/x", "https://host/x cannot be opened: Unrecognized filesystem type in URI"),
    ],
)
def test_a_url_that_cannot_be_opened_is_reported_without_credentials(url: str, message: str) -> None:
    with pytest.raises(DataError, match=f"^{message}") as raised:
        locate(url)
    text = str(raised.value)
    assert "h1d" not in text
    assert "\n" not in text
    assert raised.value.__suppress_context__  # the message of pyarrow's error has them


def test_credentials_and_options_are_left_out_of_all_messages() -> None:
    secret = "s3://key:h1d/d@n@bucket/out?endpoint_override=h1dden"
    shown = "'s3://bucket/out' and 's3://bucket/out'"
    for first, second in ((secret, secret), (Path(secret), secret)):
        assert escape_controls(f"'{first}' and '{second}'") == shown
        assert "h1d" not in str(DataError(f"{first} is read"))
    for harmless in ("hdfs://host:8020/a@b", "abfs://c@a.net/x", "s3://bucket/a@b", "a:b@c", "https://a.b/?q=1"):
        assert escape_controls(harmless) == harmless


def test_files_are_listed_and_read_as_they_are_stored(tmp_path: Path) -> None:
    (tmp_path / "day=1").mkdir()
    (tmp_path / "day=1" / "log.csv.gz").write_bytes(b"not gzip")
    remote = Remote(files=fs.LocalFileSystem(), path=str(tmp_path), url="s3://bucket")
    (name, info), *others = remote.files_below().items()
    assert (name, info.size, others) == ("day=1/log.csv.gz", 8, [])
    assert info.mtime_ns == (tmp_path / "day=1" / "log.csv.gz").stat().st_mtime_ns
    assert (remote / "missing").files_below() == {}
    assert (remote / "day=1/log.csv.gz").read() == b"not gzip"
    (remote / "copy").upload(tmp_path / "day=1" / "log.csv.gz")
    assert (tmp_path / "copy").read_bytes() == b"not gzip"
    (remote / "day=1").delete(is_folder=True)
    assert [*remote.files_below()] == ["copy"]
    with pytest.raises(DataError, match=r"^s3://bucket/missing cannot be read: .*; check the URL, your credentials"):
        (remote / "missing").read()


@pytest.mark.parametrize("url", ["s3://", "gs://", Path("s3://"), "s3://key:secret@?region=x"])
def test_a_url_without_a_bucket_is_refused(url: Path | str) -> None:
    assert is_url(url)
    with pytest.raises(DataError, match=r"^(s3|gs):// names no bucket; write (s3|gs)://BUCKET/PATH$"):
        locate(url)
