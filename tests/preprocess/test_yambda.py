"""Yambda's log, drawn for some users, compared with a plain reading of its files; killed, appended and counted."""

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets import open_store
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
from evenrank.preprocess.build.buckets import Buckets
from evenrank.preprocess.engine import UnfinishedError
from evenrank.preprocess.read import computed
from tests.preprocess.decoded import bytes_in, read_rows

_DAY, _KINDS = 86_400, ("listen", "like", "dislike", "unlike", "undislike")
_SPLIT = "time:first:300d,gap:30m,eval:1d"
_TYPES = {"text": pl.String(), "enum": pl.Enum(_KINDS), "dictionary": pl.Categorical()}


def _draw(num_users: int = 30) -> list[dict[str, Any]]:
    """Draw a log sorted by user and time, with many events of one time and around the limits of the split."""
    draw, events = random.Random(5), []
    for user in draw.sample(range(100), num_users):
        near = [299 * _DAY, 300 * _DAY, 300 * _DAY + 900, 300 * _DAY + 1800, 301 * _DAY + 1800]
        times = [draw.choice([draw.randrange(0, 301 * _DAY, 5), *near]) + 5 * draw.randrange(1, 5) for _ in range(40)]
        for time in sorted([5, *times]):
            kind = draw.choices(_KINDS, (20, 5, 1, 1, 1))[0]
            ratio = draw.choice([0, 49, 50, 100, None]) if kind == "listen" else None
            seconds = draw.randrange(60, 400) if kind == "listen" else None
            events.append((user, time, draw.randrange(40), draw.randrange(2), ratio, seconds, kind))
    names = ("uid", "timestamp", "item_id", "is_organic", "played_ratio_pct", "track_length_seconds", "event_type")
    return [dict(zip(names, event, strict=True)) for event in events]


def _write(folder: Path, events: list[dict[str, Any]], kind: str = "enum") -> None:
    for name in ("raw/50m", "shared_metadata"):
        (folder / "yambda" / name).mkdir(parents=True, exist_ok=True)
    types: dict[str, Any] = {"uid": pl.UInt32, "timestamp": pl.UInt32, "item_id": pl.UInt32, "is_organic": pl.UInt8}
    types |= {"played_ratio_pct": pl.UInt16, "track_length_seconds": pl.UInt32, "event_type": _TYPES[kind]}
    frame = pl.DataFrame(events, schema=types)
    frame.write_parquet(folder / "yambda/raw/50m/multi_event.parquet", row_group_size=97)
    mappings = {
        "artist": [(7, 3), (8, 3), (1, 0), (7, 3)],
        "album": [(item % 11 + 1, item) for item in range(39, 3, -1)],
    }
    for name, rows in mappings.items():
        mapping = pl.DataFrame(rows, schema={f"{name}_id": pl.UInt32, "item_id": pl.UInt32}, orient="row")
        mapping.write_parquet(folder / f"yambda/shared_metadata/{name}_item_mapping.parquet")


def _run(folder: Path, out: str = "out", **options: Any) -> dict[str, Any]:
    preprocess(PreprocessConfig(dataset="yambda-50m", raw_dir=folder, out=folder / out, **options))
    manifest: dict[str, Any] = json.loads((folder / out / "manifest.json").read_text())
    return manifest


def _plain(event: dict[str, Any]) -> dict[str, int]:
    """Return the columns of an event."""
    ratio, kind = event["played_ratio_pct"] or 0, event["event_type"]
    is_good = kind == "listen" and ratio >= 50
    return {
        "item_id": event["item_id"],
        "action": 1 if is_good else {"listen": 4, "like": 2}.get(kind, 0),
        "timestamp_ms": event["timestamp"] * 1000,
        "is_organic": event["is_organic"],
        "played_ratio_pct": ratio,
        "track_length_seconds": event["track_length_seconds"] or 0,
        "listen_plus": int(is_good),
    }


def _rows(split: Path) -> dict[int, list[dict[str, int]]]:
    """Return the events by user."""
    found = {}
    for row in read_rows(split):
        names = [name for name in row if isinstance(row[name], list)]
        found[row["user_id"]] = [dict(zip(names, of, strict=True)) for of in zip(*(row[n] for n in names), strict=True)]
    return found


@pytest.mark.parametrize("kind", _TYPES)
def test_rows_are_those_of_a_plain_reading_of_the_files(tmp_path: Path, kind: str) -> None:
    _write(tmp_path, events := _draw(), kind)
    manifest = _run(tmp_path, split=_SPLIT)
    by_user = defaultdict[int, list[dict[str, int]]](list)
    for event in events:  # which are in time order
        by_user[event["uid"]].append(_plain(event))
    first = min(event["timestamp"] for event in events)
    begin, end = ((first + 300 * _DAY + more) * 1000 for more in (1800, 1800 + _DAY))
    train = {user: [e for e in of if e["timestamp_ms"] < begin - 1_800_000] for user, of in by_user.items()}
    targets = {user: [e for e in of if begin <= e["timestamp_ms"] < end] for user, of in by_user.items()}
    assert _rows(tmp_path / "out/train") == {user: of for user, of in train.items() if of}
    assert _rows(tmp_path / "out/eval") == {user: train[user] + of for user, of in targets.items() if of}
    assert {row["user_id"]: row["num_targets"] for row in read_rows(tmp_path / "out/eval")} == {
        user: len(of) for user, of in targets.items() if of
    }
    used = [event for of in (*train.values(), *targets.values()) for event in of]
    table = pl.read_parquet(tmp_path / "out/item_features.parquet").rows()
    items = {event["item_id"] for event in used}
    assert table == [(i, {3: 7, 0: 1}.get(i, 0), (i % 11 + 1) * (i > 3)) for i in sorted(items) if i > 3 or i in (0, 3)]
    after = sum(event["timestamp_ms"] >= end for of in by_user.values() for event in of)
    audit = manifest["options"]["audit"]
    assert audit["events after eval (left out)"] == after > 0
    assert audit["events in the gap of the split (left out)"] == len(events) - len(used) - after > 0
    assert audit["rows of features after the first of their item (left out)"] == 1
    assert manifest["options"]["statistics"]["events"] == {
        "train": sum(map(len, train.values())),
        "eval": sum(map(len, targets.values())),
    }
    sizes = manifest["vocabulary_sizes"]
    assert (sizes["artist_id"], sizes["album_id"]) == (8, 12)
    assert manifest["ids"]["item_id"]["rule"] == manifest["ids"]["user_id"]["rule"] == "keep"
    counts = np.bincount([e["item_id"] for of in train.values() for e in of], minlength=max(items) + 1)
    for split in ("train", "eval"):
        assert open_store(tmp_path / "out", split).item_counts().tolist() == counts.tolist()


def test_a_run_that_ended_while_times_were_left_out_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, _draw())
    _run(tmp_path, split=_SPLIT)
    with monkeypatch.context() as patch:
        keep = Buckets.keep

        def keep_some(self: Buckets, index: int, mask: Any, *, reason: int) -> int:
            if reason == 5:
                raise UnfinishedError("ended here")
            return keep(self, index, mask, reason=reason)

        patch.setattr(Buckets, "keep", keep_some)
        with pytest.raises(UnfinishedError):
            _run(tmp_path, "again", split=_SPLIT)
    _run(tmp_path, "again", split=_SPLIT)
    assert bytes_in(tmp_path / "again") == bytes_in(tmp_path / "out")


def test_a_missing_file_is_named_with_the_place_that_has_it(tmp_path: Path) -> None:
    _write(tmp_path, _draw(2))
    (path := tmp_path / "yambda/shared_metadata/album_item_mapping.parquet").unlink()
    with pytest.raises(DataError) as caught:
        _run(tmp_path)
    assert str(caught.value) == (
        f"there is no {path}; put raw/50m/multi_event.parquet and shared_metadata/artist_item_mapping.parquet and "
        f"shared_metadata/album_item_mapping.parquet of https://huggingface.co/datasets/yandex/yambda into "
        f"{tmp_path / 'yambda'}"
    )


def test_texts_among_numbers_of_an_expression_are_bad_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computed, "_SAMPLED_ROWS", 1)
    (tmp_path / "log.csv").write_text("user_id,item_id,time,n\n1,2,1600000000,3\n1,2,1600000001,x\n1,2,1600000002,\n")
    log = TabularConfig(events=(tmp_path / "log.csv",), timestamp_column="time", compute=("big=n > 2",))
    config = PreprocessConfig(dataset="custom", custom=log, out=tmp_path / "out", split="none", on_error="skip")
    audit = preprocess(config).options["audit"]
    assert [*audit] == [
        "log.csv: 1 bad row, first line 3 ('1,2,1600000001,x'): n is not a number, which --compute needs; all skipped"
    ]
    assert read_rows(tmp_path / "out/train")[0]["big"] == [1, 0]


def test_days_that_are_appended_have_the_same_bytes_as_all_at_once_unless_a_split_left_events_out(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {
        "timestamp_column": "t",
        "compute": ("action=2 if n > 2 else n", "odd=n % 2"),
        "label": "odd",
    }
    days = [[(1, 2, 10, 3), (2, 2, 10, 1)], [(1, 3, 20, 2), (3, 2, 30, 4)]]
    for number, rows in enumerate(days):
        lines = [",".join(map(str, row)) for row in rows]
        (tmp_path / f"{number}.csv").write_text("\n".join(["user_id,item_id,t,n", *lines, ""]))

    def run(out: str, *numbers: int, **others: Any) -> None:
        log = TabularConfig(events=tuple(tmp_path / f"{number}.csv" for number in numbers), **options)
        given = {"split": "none", "ids": "dense", "allow_empty": True, **others}
        preprocess(PreprocessConfig(dataset="custom", custom=log, out=tmp_path / out, **given))

    run("days", 0)
    run("days", 1, append=True)
    run("once", 0, 1)
    assert bytes_in(tmp_path / "days", versions=False) == bytes_in(tmp_path / "once", versions=False)
    run("split", 0, split="time:first:1m,eval:1d")
    with pytest.raises(ConfigError, match="events cannot be appended: the split left out events that may count by now"):
        run("split", 1, split="time:first:1m,eval:1d", append=True)
