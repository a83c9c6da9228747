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
    assert (tmp_path / "manifest.json").read_bytes() == (small_dataset / "manifest.json").read_bytes()
    assert str(small_dataset.parent) not in (tmp_path / "manifest.json").read_text()


SHA256 = "0" * 64


def _split(path: str = "train/a", **changes: object) -> dict[str, object]:
    file = {"path": path, "rows": 0, "sha256": SHA256}
    return {"train": {"files": [file], "rows": 0, "interactions": 0, "lengths": {}, **changes}}


def _ids(**changes: object) -> dict[str, object]:
    return {"rule": "dense", "kind": "int64", "versions": [{"size": 3, "sha256": SHA256}], **changes}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"content_hash": value} for value in ("../../../evil", 5)),
        {"vocabulary_sizes": None},
        *({"extra_events": value} for value in ({"q": "int99"}, ["q"], {"item_id": "int64"}, {"segment": "int64"})),
        *({"contextual": value} for value in ({"../x": "int64"}, {"segment": "int32"}, ["segment"])),
        *({"splits": _split(files=[], rows=rows)} for rows in ("x", -1)),
        *({"splits": _split(rows=rows)} for rows in (1 << 62, True, 1)),
        {"splits": _split(interactions=10**30)},
        *({"splits": _split(lengths=lengths)} for lengths in ({"p50": 3}, {"max": float("nan")})),
        {"splits": {"..": _split()["train"]}},
        {"splits": {"train": _split()["train"], "Train": _split()["train"]}},
        *({"splits": _split(path)} for path in ("../a", "/etc/passwd", "C:\\a", "train/a\0b", "")),
        *({"contextual": {"segment": "int64", name: "float32"}} for name in ("Segment", "label")),
        *({"contextual": {name: "float32"}} for name in ("", "x" * 300)),
        {"vocabulary_sizes": {"user_id": 1}},
        *({"ids": {"user_id": ids}} for ids in (None, {}, _ids())),
        *(
            {"ids": {"user_id": _ids(versions=[v]), "item_id": _ids()}}
            for v in ({"size": 3}, {"size": -1, "sha256": SHA256})
        ),
        *({"ids": {"user_id": _ids(**w), "item_id": _ids()}} for w in ({"kind": "int32"}, {"rule": 3}, {"unheard": 1})),
        *({"context_labels": labels} for labels in ({}, {"segment": "abc"})),
    ],
)
def test_a_malformed_field_is_refused(small_dataset: Path, tmp_path: Path, wrong: dict[str, object]) -> None:
    raw = json.loads((small_dataset / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**raw, **wrong}))
    with pytest.raises(
        DataError, match=r"^[^\n]*has a missing or malformed field [^\n]*; preprocess the dataset again"
    ):
        read_manifest(tmp_path)


def test_a_manifest_cannot_claim_the_content_of_another(small_dataset: Path, tmp_path: Path) -> None:
    raw = json.loads((small_dataset / "manifest.json").read_text())
    other: dict[str, Any] = {
        "content_hash": "ab" * 32,
        "contextual": {},
        "vocabulary_sizes": {**raw["vocabulary_sizes"], "item_id": 7},
        "extra_events": {"play_time_ms": "int64"},
        "splits": _split(),
        "ids": {"user_id": _ids(), "item_id": _ids(rule="keep", versions=[])},
    }
    for field, value in other.items():
        (tmp_path / "manifest.json").write_text(json.dumps({**raw, field: value}))
        with pytest.raises(DataError, match=r"has content hash \w{12}, but that of its files and columns is \w{12}"):
            read_manifest(tmp_path)


RESERVED = ["user_id", "item_id", "action", "timestamp_ms", "length", "window", "num_targets"]
NO_FILE_NAMES = ["", ".", "..", ".hidden", "a/b", "a\\b", "a\0b", "a b", "a\n", "x" * 201, "\ud800"]
SAME_FILE = [["a", "a"], ["Sex", "sex"], ["stra\u00dfe", "strasse"], ["\u00e9", "e\u0301"]]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        *(
            (["sex", n], f"no feature can be called '{n}', because")
            for n in (*RESERVED, LABEL, SEMANTIC_ID, CANDIDATE_ID)
        ),
        *(([name], "is not a name; use letters, digits") for name in NO_FILE_NAMES),
        *((names, r"differ at most by case; rename one|is not a name") for names in SAME_FILE),
    ],
)
def test_names_that_are_reserved_or_no_names_of_own_files_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_names(names)


def test_names_with_dots_are_those_of_older_datasets_alone() -> None:
    check_names(["user.age"])
    check_new_names(["user_age", "user-age", "2"])
    with pytest.raises(ConfigError, match=r"called 'user\.age', because .*; rename it, for example to 'user_age'"):
        check_new_names(["sex", "user.age"])
