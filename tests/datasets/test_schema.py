import json
from pathlib import Path

import numpy as np
import pytest

from evenrank.core.errors import DataError
from evenrank.datasets.schema import read_manifest, user_hash


def test_user_hash_never_changes() -> None:
    # The order of rows on disk and the split by user rely on these values.
    assert user_hash(np.array([0, 1, 2, -1])).tolist() == [
        0,
        6238072747940578789,
        15839785061582574730,
        13029008266876403067,
    ]
    assert user_hash(np.array([1]), salt=1).tolist() != user_hash(np.array([1]), salt=2).tolist()


def test_a_manifest_survives_writing_and_reading(small_dataset: Path, tmp_path: Path) -> None:
    manifest = read_manifest(small_dataset)
    manifest.write(tmp_path)
    assert read_manifest(tmp_path) == manifest
    assert (tmp_path / "manifest.json").read_bytes() == (small_dataset / "manifest.json").read_bytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "not a dataset: it contains no manifest.json; make one with"),
        ("{", "not valid JSON"),
        ('{"schema_version": 99}', "schema version 99, this version of evenrank reads 1"),
        ("[]", "schema version None"),
        ('{"schema_version": 1}', "has a missing or malformed field"),
    ],
)
def test_a_broken_manifest_is_refused_in_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=message) as raised:
        read_manifest(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"content_hash": "../../../evil"},
        {"content_hash": 5},
        {"vocabulary_sizes": None},
        {"extra_events": {"q": "int99"}},
        {"extra_events": ["q"]},
        {"contextual": ["../x"]},
        {"splits": {"train": {"files": [], "rows": "x", "interactions": 0, "lengths": {}}}},
        {"splits": {"train": {"files": [], "rows": -1, "interactions": 0, "lengths": {}}}},
        {"splits": {"train": {"files": [{"path": "../a", "rows": 0, "sha256": "0" * 64}], "rows": 0}}},
    ],
)
def test_a_malformed_field_is_refused(small_dataset: Path, tmp_path: Path, wrong: dict[str, object]) -> None:
    raw = json.loads((small_dataset / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**raw, **wrong}))
    with pytest.raises(DataError, match=r"has a missing or malformed field .*; preprocess the dataset again"):
        read_manifest(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere is not a dataset: no such folder"):
        read_manifest(tmp_path / "nowhere")


def test_a_manifest_contains_no_absolute_path(small_dataset: Path) -> None:
    assert str(small_dataset.parent) not in (small_dataset / "manifest.json").read_text()
    assert read_manifest(small_dataset).splits["train"].files[0].path.startswith("train/")
