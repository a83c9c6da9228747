"""Later days appended to a dataset, compared byte by byte with all of them at once."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.preprocess import Filters, PreprocessConfig, RequestRule, TabularConfig, job, preprocess
from tests.preprocess.build.id_logs import NAMES
from tests.preprocess.decoded import bytes_in as all_bytes_in
from tests.s3_server import S3

BEGIN, DAY = 1_700_000_000, 86_400
Day = list[tuple[int, int, int, int]]  # user, item, seconds after the begin of the day, action
_EVENT = st.tuples(st.integers(0, 12), st.integers(0, 20), st.integers(0, DAY - 1), st.integers(0, 3))
_DAYS = st.lists(st.lists(_EVENT, max_size=25), min_size=2, max_size=4).filter(lambda days: len(days[0]) > 0)
_OPTIONS: dict[str, dict[str, Any]] = {
    "none": {"split": "none"},
    "user": {"split": "user:0.5", "filters": Filters(window=3, stride=2)},
    "leave-last": {"split": "leave-last:2", "filters": Filters(window=4), "requests": RequestRule(seconds=60)},
    "time": {"split": f"time:{BEGIN + DAY}", "allow_empty": True},
    "time-last": {"split": "time:last:9h", "allow_empty": True},
    "kept": {"split": "user:0.5", "ids": "item=keep,user=dense"},
    "file": {"split": "file:users.txt", "allow_empty": True},
}
_DEFAULTS: dict[str, Any] = {"ids": "dense", "on_error": "skip", "rejects": True}


def write_days(
    folder: Path, days: list[Day], *, user: str = "", bad_rows: int = 0, name: str = "day-{}.csv"
) -> list[Path]:
    paths = []
    for number, events in enumerate(days):
        rows = [f"{user}{u},{i},{BEGIN + number * DAY + t},{a},{a / 7 if a else ''}\n" for u, i, t, a in events]
        paths.append(folder / name.format(number))
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        paths[-1].write_text("user,item,time,action,price\n" + "".join(["bad row\n"] * bad_rows + rows))
    (folder / "users.txt").write_text(f"{user}1\n{user}5\nnobody\n")
    (folder / "users.csv").write_text("user,city\n" + "".join(f"{user}{u},city {u % 3}\n" for u in range(9)))
    (folder / "items.csv").write_text("item,brand\n" + "".join(f"{i},brand {i % 4}\n" for i in range(15)))
    return paths


def run(out: Path | str, *paths: Path, **options: Any) -> list[str]:
    """Preprocess, and return what was said to be added."""
    folder = paths[0].parent
    folder = folder.parent if "=" in folder.name else folder
    features: dict[str, Any] = {"context": folder / "users.csv", "item_features": (folder / "items.csv",)}
    of_events: dict[str, Any] = {"action_columns": ("action",), "event_columns": ("price:float?",), **NAMES}
    log = TabularConfig(events=paths, context_columns=("city",), item_columns=("brand",), **of_events, **features)
    split = options.pop("split", "none").replace("users.txt", str(folder / "users.txt"))
    added: list[str] = []
    config = PreprocessConfig(dataset="custom", out=out, custom=log, split=split, **_DEFAULTS | options)
    preprocess(config, on_added=added.append)
    return added


def bytes_in(folder: Path) -> dict[str, bytes]:
    """Return all files, without the earlier versions of vocabularies in the manifest."""
    files = all_bytes_in(folder)
    return files | {"manifest.json": without_versions(files["manifest.json"])}


def without_versions(content: bytes) -> bytes:
    manifest = json.loads(content)
    for ids in manifest["ids"].values():
        ids["versions"] = ids["versions"][-1:]
    return json.dumps(manifest).encode()


@pytest.mark.parametrize(("name", "user"), [*zip(_OPTIONS, ["", "u"] * 4, strict=False)])
def test_days_one_after_another_are_all_days_at_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, user: str
) -> None:
    @settings(max_examples=3)
    @example([[(1, 1, 5, 1)], [], [(2, 1, 6, 1), (1, 3, 7, 1)], []], 1, "day={}/log.csv", True)
    @given(
        _DAYS, st.integers(0, 2), st.sampled_from(["day-{}.csv", "day={}/log.csv", "part={}/log.csv"]), st.booleans()
    )
    def check(days: list[Day], bad_rows: int, path: str, again: bool) -> None:
        folder = tmp_path_factory.mktemp("days")
        paths = write_days(folder, days, user=user, bad_rows=bad_rows, name=path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(job, "EVENTS_PER_FILE", 12)  # so that later days have more files
            run(folder / "once", *paths, **_OPTIONS[name])
            for number, path_of_day in enumerate(paths):
                run(folder / "appended", path_of_day, append=number > 0, **_OPTIONS[name])
                if again and number:  # as after a kill at the very end
                    run(folder / "appended", path_of_day, append=True, **_OPTIONS[name])
        assert bytes_in(folder / "appended") == bytes_in(folder / "once")

    check()


def test_a_day_that_is_there_already_changes_nothing_and_what_was_added_is_described(tmp_path: Path) -> None:
    days: list[Day] = [[(1, 1, 5, 1), (2, 7, 6, 1)], [(1, 5, 1, 1), (3, 5, 9, 1)], []]
    first, second, empty = write_days(tmp_path, days)
    assert run(tmp_path / "out", first) == []
    (line,) = run(tmp_path / "out", second, append=True)
    assert line == "2 events, 1 user, 1 item, 1 file, from 2023-11-15T22:13:21Z to 2023-11-15T22:13:29Z"
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")}
    assert run(tmp_path / "out", second, append=True) == []
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")} == before
    assert run(tmp_path / "out", empty, append=True) == ["0 events, 0 users, 0 items, 1 file"]


def test_a_dataset_at_a_url_is_continued(tmp_path: Path, s3: S3) -> None:
    first, second = write_days(tmp_path, [[(1, 1, 5, 1), (2, 7, 6, 1)], [(3, 5, 1, 1)]])
    run(s3.url("appended"), first)
    for _ in range(2):  # the second time as after a kill at the very end
        run(s3.url("appended"), second, append=True)
    run(tmp_path / "once", first, second)
    assert without_versions(s3.read("appended/manifest.json")) == bytes_in(tmp_path / "once")["manifest.json"]


def test_a_damaged_dataset_is_not_continued(tmp_path: Path) -> None:
    first, second = write_days(tmp_path, [[(1, 1, 5, 1)], [(3, 5, 1, 1)]])
    run(tmp_path / "out", first)
    part = next((tmp_path / "out" / "train").iterdir())
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    before = bytes_in(tmp_path / "out")
    with pytest.raises(DataError, match=r"part-00000\.parquet does not match its manifest"):
        run(tmp_path / "out", second, append=True)
    assert bytes_in(tmp_path / "out") == before
