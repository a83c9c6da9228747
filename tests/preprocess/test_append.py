"""Later days appended to a dataset, compared byte by byte with all of them at once."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.preprocess import Filters, RequestRule, job, preprocess
from tests.preprocess.decoded import BEGIN, bytes_in, of_log, without_versions
from tests.s3_server import S3

DAY = 86_400
Day = list[tuple[int, int, int, int]]  # user, item, seconds after the begin of the day, action
_EVENT = st.tuples(st.integers(0, 12), st.integers(0, 20), st.integers(0, DAY - 1), st.integers(0, 3))
_DAYS = st.lists(st.lists(_EVENT, max_size=25), min_size=2, max_size=4).filter(lambda days: len(days[0]) > 0)
_OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "user": {"split": "user:0.5", "filters": Filters(window=3, stride=2)},
    "leave-last": {"split": "leave-last:2", "filters": Filters(window=4), "requests": RequestRule(seconds=60)},
    "time": {"split": f"time:{BEGIN + DAY}", "allow_empty": True},
    "time-last": {"split": "time:last:9h", "allow_empty": True},
    "kept": {"split": "user:0.5", "ids": "item=keep,user=dense"},
    "file": {"split": "file:users.txt", "allow_empty": True},
}
_FEATURES = {"context": Path("users.csv"), "item_features": (Path("items.csv"),)}
_COLUMNS = {"context_columns": ("city",), "item_columns": ("brand",), "action_columns": ("action",)}
_LOG = {"event_columns": ("price:float?",), **_FEATURES, **_COLUMNS}


def _write(days: list[Day], *, user: str = "", bad_rows: int = 0, name: str = "day-{}.csv") -> list[Path]:
    """Write logs of days, and features, into the current folder."""
    paths = [Path(name.format(number)) for number in range(len(days))]
    for number, (path, events) in enumerate(zip(paths, days, strict=True)):
        rows = [f"{user}{u},{i},{BEGIN + number * DAY + t},{a},{a / 7 if a else ''}\n" for u, i, t, a in events]
        path.parent.mkdir(exist_ok=True)
        path.write_text("user,item,time,action,price\n" + "".join(["bad row\n"] * bad_rows + rows))
    Path("users.txt").write_text(f"{user}1\n{user}5\nnobody\n")
    Path("users.csv").write_text("user,city\n" + "".join(f"{user}{u},city {u % 3}\n" for u in range(9)))
    Path("items.csv").write_text("item,brand\n" + "".join(f"{i},brand {i % 4}\n" for i in range(15)))
    return paths


def _run(out: Path | str, *paths: Path, **options: Any) -> list[str]:
    """Preprocess, and return what was said to be added."""
    added: list[str] = []
    given: dict[str, Any] = {"ids": "dense", "on_error": "skip", "rejects": True, **options}
    preprocess(of_log(out, *paths, log=_LOG, **given), on_added=added.append)
    return added


@pytest.mark.parametrize(("name", "user"), [*zip(_OPTIONS, ["", "u"] * 4, strict=False)])
def test_days_one_after_another_are_all_days_at_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, name: str, user: str
) -> None:
    monkeypatch.setattr(job, "EVENTS_PER_FILE", 12)  # so that later days have more files

    @settings(max_examples=3)
    @example([[(1, 1, 5, 1)], [], [(2, 1, 6, 1), (1, 3, 7, 1)], []], 1, "day={}/log.csv", True)
    @given(
        _DAYS, st.integers(0, 2), st.sampled_from(["day-{}.csv", "day={}/log.csv", "part={}/log.csv"]), st.booleans()
    )
    def check(days: list[Day], bad_rows: int, path: str, again: bool) -> None:
        monkeypatch.chdir(tmp_path_factory.mktemp("days"))
        once, appended = Path("once"), Path("appended")
        paths = _write(days, user=user, bad_rows=bad_rows, name=path)
        _run(once, *paths, **_OPTIONS[name])
        for number, path_of_day in enumerate(paths):
            for _ in range(1 + (again and number > 0)):  # again as after a kill at the very end
                _run(appended, path_of_day, append=number > 0, **_OPTIONS[name])
        assert bytes_in(appended, versions=False) == bytes_in(once, versions=False)

    check()


def test_a_day_that_is_there_already_changes_nothing_and_what_was_added_is_described(here: Path, s3: S3) -> None:
    first, second, empty = _write([[(1, 1, 5, 1), (2, 7, 6, 1)], [(1, 5, 1, 1), (3, 5, 9, 1)], []])
    for out in (Path("out"), s3.url("appended")):
        assert _run(out, first) == []
        (line,) = _run(out, second, append=True)
        assert line == "2 events, 1 user, 1 item, 1 file, from 2023-11-15T22:13:21Z to 2023-11-15T22:13:29Z"
        before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in here.rglob("*")}
        assert _run(out, second, append=True) == []
        assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in here.rglob("*")} == before
    _run("once", first, second)
    at_url = without_versions(s3.read("appended/manifest.json"))
    assert at_url == bytes_in(Path("once"), versions=False)["manifest.json"]
    assert _run("out", empty, append=True) == ["0 events, 0 users, 0 items, 1 file"]


def test_a_damaged_dataset_is_not_continued(here: Path) -> None:
    first, second = _write([[(1, 1, 5, 1)], [(3, 5, 1, 1)]])
    _run("out", first)
    part = next(Path("out/train").iterdir())
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    before = bytes_in(here)
    with pytest.raises(DataError, match=r"part-00000\.parquet does not match its manifest"):
        _run("out", second, append=True)
    assert bytes_in(here) == before
