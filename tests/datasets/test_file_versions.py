"""Versions of files on file systems other than that of this machine."""

from pathlib import Path
from typing import Any

from pyarrow import fs

from evenrank.datasets.stream import version_of, versions_of


class _Bucket:
    """An object store, of which only what `versions_of` needs is there: requests for files, and listings."""

    def __init__(self, *, may_list: bool) -> None:
        self._files = fs.LocalFileSystem()
        self._may_list = may_list

    def get_file_info(self, wanted: Any) -> Any:
        if isinstance(wanted, fs.FileSelector) and not self._may_list:
            raise PermissionError("ACCESS_DENIED during ListObjectsV2 operation")
        return self._files.get_file_info(wanted)


def test_versions_are_the_same_listed_and_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("22")
    paths = [str(tmp_path / name) for name in ("a", "b", "missing")]
    bucket: Any = _Bucket(may_list=True)
    versions = versions_of(bucket, paths)
    assert [version and version[0] for version in versions.values()] == [1, 2, None]
    assert versions == {path: version_of(bucket, path) for path in paths}
    forbidden: Any = _Bucket(may_list=False)
    assert versions_of(forbidden, paths) == versions
