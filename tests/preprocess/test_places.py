"""Where data lie: names of folders that do not matter, and places that nothing can be written to or read from."""

from pathlib import Path
from typing import Any

import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.preprocess import PreprocessConfig, RequestRule, SyntheticConfig, TabularConfig, preprocess
from tests.deep_folder import deep_folder

_NAMES: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}


def _synthetic(out: Path, **options: Any) -> PreprocessConfig:
    return PreprocessConfig(dataset="synthetic", out=out, synthetic=SyntheticConfig(num_users=5), **options)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _make_all(folder: Path) -> dict[str, bytes]:
    """Make datasets of text ids, with features, by an earlier vocabulary and by appending, and return all files."""
    folder.mkdir(parents=True)
    (folder / "log.csv").write_text("user,item,time\nu,a,1600000000\nv,b,1600000001\nu,c,1600000009\n")
    (folder / "later.csv").write_text("user,item,time\nu,d,1700000000\nw,b,1700000001\n")
    (folder / "items.csv").write_text("item,brand\na,x\nb,y\n")
    features: dict[str, Any] = {"item_features": folder / "items.csv", "item_columns": ("brand",)}
    first, later = (TabularConfig(events=(folder / name,), **_NAMES, **features) for name in ("log.csv", "later.csv"))
    options: dict[str, Any] = {"dataset": "custom", "split": "none", "requests": RequestRule(seconds=5)}
    preprocess(PreprocessConfig(out=folder / "out", custom=first, ids="dense", **options))
    preprocess(PreprocessConfig(out=folder / "kept", custom=later, vocabulary=folder / "out", **options))
    preprocess(PreprocessConfig(out=folder / "out", custom=later, ids="dense", append=True, **options))
    return _contents(folder)


@pytest.mark.parametrize("name", ["lr[0]", "lr?", "l*", "**", "[[]", "{a,b}", "$HOME", "~", "a b", "ü"])
def test_names_of_folders_do_not_matter(tmp_path: Path, name: str) -> None:
    expected = _make_all(tmp_path / "plain" / "lr0")
    killed = tmp_path / "any" / "lr0" / ".out.partial" / "work" / "texts of user_id"
    killed.mkdir(parents=True)
    (killed / "00000-00000.arrow").write_text("of a run that was killed")
    assert _make_all(tmp_path / "any" / name) == expected


def test_a_place_that_is_no_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for out, message in (
        (Path("/"), "^/ is no folder; choose another output folder$"),
        (tmp_path / "loop", f"^{tmp_path}/loop is a loop of links; choose another output folder$"),
        (tmp_path / "loop" / "out", f"^{tmp_path}/loop/out could not be written: .*; it is unchanged"),
    ):
        with pytest.raises(DataError, match=message):
            preprocess(_synthetic(out, overwrite=True))
    with pytest.raises(DataError, match=f"^{tmp_path}/loop cannot be read: Too many levels of symbolic links; check"):
        preprocess(_synthetic(tmp_path / "out", split=f"file:{tmp_path}/loop"))
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


def test_folders_of_a_dataset_and_those_in_its_place_may_be_nested_deeper_than_functions(tmp_path: Path) -> None:
    with deep_folder(tmp_path) as out:
        preprocess(_synthetic(out))
        with pytest.raises(DataError, match=r"/d contains 'd/d/.*/part-00000\.parquet', which is no part of a dataset"):
            preprocess(_synthetic(tmp_path / "d"))


@pytest.mark.parametrize("raw", ["u", str(2**63)])
def test_a_vocabulary_of_another_kind_of_ids_is_refused(tmp_path: Path, raw: str) -> None:
    (tmp_path / "log.csv").write_text(f"user,item,time\n{raw},1,1600000000\n")
    log = TabularConfig(events=(tmp_path / "log.csv",), **_NAMES)
    preprocess(PreprocessConfig(dataset="custom", out=tmp_path / "old", custom=log, ids="dense", split="none"))
    with pytest.raises(ConfigError, match=rf"^user_id is int64 in synthetic and \S+ in {tmp_path}/old; leave the voc"):
        preprocess(_synthetic(tmp_path / "out", vocabulary=tmp_path / "old"))
