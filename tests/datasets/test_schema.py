import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.codes import CANDIDATE_ID, SEMANTIC_ID
from evenrank.dataloader.collate.parts import LABEL
from evenrank.datasets.schema import check_names, check_new_names, read_manifest, user_hash


def test_user_hash_never_changes() -> None:
    # The order of rows on disk and the split by user rely on these values.
    hashes = [0, 6238072747940578789, 15839785061582574730, 13029008266876403067]
    assert user_hash(np.array([0, 1, 2, -1])).tolist() == hashes
    assert user_hash(np.array([1]), salt=1).tolist() != user_hash(np.array([1]), salt=2).tolist()


def test_a_manifest_survives_writing_and_reading(small_dataset: Path, tmp_path: Path) -> None:
    manifest = read_manifest(small_dataset)
    manifest.write(tmp_path)
    assert read_manifest(tmp_path) == manifest
    text = (tmp_path / "manifest.json").read_text()
    assert text == (small_dataset / "manifest.json").read_text()
    assert str(small_dataset.parent) not in text


SHA256 = "0" * 64


def _split(path: str = "train/a", **changes: Any) -> dict[str, Any]:
    file = {"path": path, "rows": 0, "sha256": SHA256}
    return {"train": {"files": [file], "rows": 0, "interactions": 0, "lengths": {}, **changes}}


def _ids(**changes: Any) -> dict[str, Any]:
    return {"rule": "dense", "kind": "int64", "versions": [{"size": 3, "sha256": SHA256}], **changes}


WRONG_IDS: list[dict[str, Any]] = [{"kind": "int32"}, {"rule": 3}, {"unheard": 1}, {"versions": [{"size": 3}]}]
NUMBERS: list[dict[str, Any]] = [*({"rows": rows} for rows in ("x", -1, 1 << 62, True, 1))]
NUMBERS += [{"lengths": {"p50": 3}}, {"lengths": {"max": float("nan")}}]
MALFORMED: dict[str, list[Any]] = {
    "content_hash": ["../../../evil", 5],
    "vocabulary_sizes": [None, {"user_id": 1}],
    "extra_events": [{"q": "int99"}, ["q"], {"item_id": "int64"}, {"segment": "int64"}],
    "contextual": [{"../x": "int64"}, {"segment": "int32"}, ["segment"], {"Segment": "float32", "segment": "int64"}],
    "splits": [
        *(_split(**numbers) for numbers in NUMBERS),
        *({name: _split()["train"]} for name in ("..", "a/b")),
        *(_split(path) for path in ("../a", "/etc/passwd", "C:\\a", "train/a\0b", "")),
        _split(interactions=10**30) | {"Train": _split()["train"]},
    ],
    "ids": [{"user_id": None}, {"user_id": _ids()}, *({"user_id": _ids(**w), "item_id": _ids()} for w in WRONG_IDS)],
    "context_labels": [{}, {"segment": "abc"}],
}
OTHERS: dict[str, Any] = {  # a manifest cannot claim the content of another
    "content_hash": "ab" * 32,
    "contextual": {},
    "extra_events": {"play_time_ms": "int64"},
    "splits": _split(),
    "ids": {"user_id": _ids(), "item_id": _ids(rule="keep", versions=[])},
}


def test_a_malformed_or_claimed_field_is_refused(small_dataset: Path, tmp_path: Path) -> None:
    raw = json.loads((small_dataset / "manifest.json").read_text())
    fault = r"^.*has a missing or malformed field .*; preprocess the dataset again"
    faults = [(field, value, fault) for field, values in MALFORMED.items() for value in values]
    for field, value, fault in [*faults, *((*other, r"^.*has content hash \w{12}, ") for other in OTHERS.items())]:
        (tmp_path / "manifest.json").write_text(json.dumps({**raw, field: value}))
        with pytest.raises(DataError, match=fault):
            read_manifest(tmp_path)


RESERVED = ["user_id", "item_id", "action", "timestamp_ms", "length", "window", "num_targets", LABEL]
NO_FILE_NAMES = ["", ".", "..", ".hidden", "a/b", "a\\b", "a\0b", "a b", "a\n", "x" * 201, "\ud800", "e\u0301"]
SAME_FILE = [["a", "a"], ["Sex", "sex"], ["stra\u00dfe", "strasse"]]


def test_names_that_are_reserved_or_no_names_of_own_files_are_refused() -> None:
    refused: list[tuple[list[str], str]] = [(["a", "A"], "differ at most by case; rename one")]
    refused += [
        ([name], f"no feature can be called '{name}', because") for name in (*RESERVED, SEMANTIC_ID, CANDIDATE_ID)
    ]
    refused += [([name], "is not a name; use letters, digits") for name in NO_FILE_NAMES]
    refused += [(names, "differ at most by case; rename one") for names in SAME_FILE]
    for names, message in refused:
        with pytest.raises(ConfigError, match=message):
            check_names(["age", *names])
    check_names(["user.age"])
    check_new_names(["user_age", "user-age", "2"])
    with pytest.raises(ConfigError, match=r"called 'user\.age', because .*; rename it, for example to 'user_age'"):
        check_new_names(["sex", "user.age"])
