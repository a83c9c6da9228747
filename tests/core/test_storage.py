from pathlib import Path

import pytest
from pyarrow import fs

from evenrank.core.errors import DataError, escape_controls
from evenrank.core.storage import Remote, is_url, join, local_path, locate


def test_a_url_is_recognized_also_after_it_has_become_a_path() -> None:
    for url in ("s3://b/log/*.csv", "abfs://c@a.dfs.core.windows.net/x", "hdfs://host:8020/x", "S3://b", "Foo+b://x"):
        assert (is_url(url), is_url(Path(url))) == (True, True)
    for path in ("log.csv", "/s3/x", "s3:x", "day=1/log.csv", "lognormal:mean=5,std=1", "C:/x", "FILE:///out"):
        assert (is_url(path), is_url(Path(path))) == (False, False)
    for of_file in ("file:///out/my%20log.csv", Path("file:///out/my%20log.csv"), "File:///out/my%20log.csv"):
        assert locate(of_file) == local_path(of_file) == Path("/out/my log.csv")
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
        below = remote / "a.csv"
        assert (remote.path, str(remote), below.path, str(below)) == (path, shown, f"{path}/a.csv", f"{shown}/a.csv")


def test_names_are_joined_to_folders_and_before_the_options_of_a_url() -> None:
    assert join("out", "ml-1m") == join(Path("out"), "ml-1m") == Path("out/ml-1m")
    assert join("s3://bucket/out/?region=x", "ml-1m") == "s3://bucket/out/ml-1m?region=x"
    assert join(Path("s3://bucket/out?region=x"), "ml-1m") == "s3:/bucket/out/ml-1m?region=x"


def test_credentials_and_options_are_left_out_of_all_messages() -> None:
    for host in ("key:h1d/den@bucket/out", "key:h1dden@bucket/out?token=h1dden", "key:h1dden@bu cket/out"):
        with pytest.raises(DataError, match="cannot be opened: ") as raised:
            locate(f"s3://{host}")
        assert "h1d" not in str(raised.value)
        assert raised.value.__suppress_context__  # the message of pyarrow's error has them
    secret = "s3://key:h1d/d@n@bucket/out?endpoint_override=h1dden"
    for first, second in ((secret, secret), (Path(secret), secret)):
        assert escape_controls(f"'{first}' and '{second}'") == "'s3://bucket/out' and 's3://bucket/out'"
        assert "h1d" not in str(DataError(f"{first} is read"))
    for harmless in ("hdfs://host:8020/a@b", "abfs://c@a.net/x", "s3://bucket/a@b", "a:b@c", "https://a.b/?q=1"):
        assert escape_controls(harmless) == harmless


def test_files_are_listed_and_read_as_they_are_stored(tmp_path: Path) -> None:
    (stored := tmp_path / "day=1" / "log.csv.gz").parent.mkdir()
    stored.write_bytes(b"not gzip")
    remote = Remote(files=fs.LocalFileSystem(), path=str(tmp_path), url="s3://bucket")
    ((name, info),) = remote.files_below().items()
    assert (name, info.size, info.mtime_ns) == ("day=1/log.csv.gz", 8, stored.stat().st_mtime_ns)
    assert ((remote / "missing").files_below(), (remote / name).read()) == ({}, b"not gzip")
    (remote / "copy").upload(stored)
    assert (tmp_path / "copy").read_bytes() == b"not gzip"
    (remote / "day=1").delete(is_folder=True)
    assert [*remote.files_below()] == ["copy"]
    with pytest.raises(DataError, match=r"^s3://bucket/missing cannot be read: .*; check the URL, your credentials"):
        (remote / "missing").read()
