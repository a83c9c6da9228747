"""Later days appended to a dataset, compared byte by byte with all of them at once."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.schema import read_manifest
from evenrank.preprocess import Filters, PreprocessConfig, RequestRule, TabularConfig, job, preprocess
from evenrank.preprocess.log_config import KEEP
from tests.preprocess.decoded import decode, read_rows, read_vocabulary
from tests.preprocess.read.test_log import write_table
from tests.s3_server import S3

BEGIN, DAY = 1_700_000_000, 86_400
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


_DEFAULTS: dict[str, Any] = {"ids": "dense", "on_error": "skip"}


def write_days(
    folder: Path, days: list[list[tuple[int, int, int, int]]], *, user: str, bad_rows: int = 0, name: str = "day-{}.csv"
) -> list[Path]:
    paths = []
    for number, events in enumerate(days):
        rows = [f"{user}{u},{i},{BEGIN + number * DAY + t},{a},{a / 7 if a else ''}\n" for u, i, t, a in events]
        paths.append(folder / name.format(number))
        paths[-1].parent.mkdir(exist_ok=True)
        paths[-1].write_text("user,item,time,action,price\n" + "".join(["bad row\n"] * bad_rows + rows))
    (folder / "users.txt").write_text(f"{user}1\n{user}5\nnobody\n")
    (folder / "users.csv").write_text("user,city\n" + "".join(f"{user}{u},city {u % 3}\n" for u in range(9)))
    (folder / "items.csv").write_text("item,brand\n" + "".join(f"{i},brand {i % 4}\n" for i in range(15)))
    return paths


def run(out: Path | str, *paths: Path, **options: Any) -> list[str]:
    """Preprocess, and return what was said to be added."""
    folder = paths[0].parent
    folder = folder.parent if "=" in folder.name else folder
    log = TabularConfig(
        events=paths,
        user_column="user",
        item_column="item",
        timestamp_column="time",
        action_columns=("action",),
        event_columns=("price:float?",),
        context=folder / "users.csv",
        context_columns=("city",),
        item_features=folder / "items.csv",
        item_columns=("brand",),
    )
    split = options.pop("split", "none").replace("users.txt", str(folder / "users.txt"))
    added: list[str] = []
    config = PreprocessConfig(dataset="custom", out=out, custom=log, split=split, **_DEFAULTS | options)
    preprocess(config, on_added=added.append)
    return added


def bytes_in(folder: Path) -> dict[str, bytes]:
    """Return all files, without the earlier versions of vocabularies in the manifest."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return files | {"manifest.json": without_versions(files["manifest.json"])}


def without_versions(content: bytes) -> bytes:
    manifest = json.loads(content)
    for ids in manifest["ids"].values():
        ids["versions"] = ids["versions"][-1:]
    return json.dumps(manifest).encode()


@pytest.mark.parametrize("name", _OPTIONS)
@pytest.mark.parametrize("user", ["", "u"], ids=["integers", "texts"])
def test_days_one_after_another_are_all_days_at_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, user: str
) -> None:
    @settings(max_examples=3)
    @example([[(1, 1, 5, 1)], [], [(2, 1, 6, 1), (1, 3, 7, 1)], []], 1, "day={}/log.csv", True)
    @given(
        _DAYS, st.integers(0, 2), st.sampled_from(["day-{}.csv", "day={}/log.csv", "part={}/log.csv"]), st.booleans()
    )
    def check(days: list[list[tuple[int, int, int, int]]], bad_rows: int, path: str, again: bool) -> None:
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


def test_a_day_that_is_there_already_changes_nothing(tmp_path: Path) -> None:
    first, second = write_days(tmp_path, [[(1, 1, 5, 1), (2, 7, 6, 1)], [(3, 5, 1, 1)]], user="")
    run(tmp_path / "out", first)
    run(tmp_path / "out", second, append=True)
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")}
    run(tmp_path / "out", second, append=True)
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("typed", [0, 1])
def test_times_with_types_and_numbers_of_a_unit_follow_one_another(tmp_path: Path, typed: int) -> None:
    paths = write_days(tmp_path, [[(1, 1, 5, 1), (2, 7, 6, 1)], [(3, 5, 1, 1), (1, 2, 3, 1)]], user="")
    path = paths[typed].with_suffix(".parquet")
    write_table(path, pl.read_csv(paths[typed]).with_columns(pl.from_epoch("time", time_unit="s")))
    paths[typed] = path
    run(tmp_path / "out", paths[0])
    run(tmp_path / "out", paths[1], append=True)
    run(tmp_path / "once", *paths)
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "once")


def test_days_may_differ_in_what_files_decide_but_not_in_the_unit_of_times(tmp_path: Path) -> None:
    write_days(tmp_path, [[]], user="")
    header, row = "user,item,time,action,price", f"7,3,{BEGIN}001,1,0.5\n"
    days = {
        "empty.csv": "",
        "more.csv": row.replace(",", ";").replace(str(BEGIN), str(BEGIN + DAY)),
        "last.parquet": "",
    }
    first = tmp_path / "first.csv"
    first.write_text(f"{header}\n{row}")
    run(tmp_path / "out", first)
    for name, text in days.items():
        (tmp_path / name).write_text(f"{header.replace(',', ';' if text else ',')}\n{text}")
    write_table(tmp_path / "last.parquet", pl.read_csv(first).with_columns(pl.col("time") + 2 * DAY * 1000))
    for name in days:
        run(tmp_path / "out", tmp_path / name, append=True)
    run(tmp_path / "once", first, *(tmp_path / name for name in days))
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "once")
    (tmp_path / "seconds.csv").write_text(f"{header}\n7,3,{BEGIN + 3 * DAY},1,0.5\n")
    with pytest.raises(ConfigError, match=r"^timestamp_unit is 's', and was 'ms' when .*out was made; append with the"):
        run(tmp_path / "out", tmp_path / "seconds.csv", append=True)


def test_values_of_features_that_changed_are_in_all_files_and_keep_their_ids(tmp_path: Path) -> None:
    first, second = write_days(tmp_path, [[(1, 1, 5, 1), (2, 7, 6, 1)], [(3, 5, 1, 1)]], user="")
    run(tmp_path / "out", first)
    before = read_manifest(tmp_path / "out")
    (tmp_path / "users.csv").write_text("user,city\n1,Bonn\n2,city 2\n")
    (tmp_path / "items.csv").write_text("item,brand\n1,a brand\n7,brand 3\n")
    run(tmp_path / "out", second, append=True)
    after = read_manifest(tmp_path / "out")
    labels = after.context_labels["city"]
    assert labels == (*before.context_labels["city"], "Bonn")
    brands = read_vocabulary(tmp_path / "out", "brand")
    rows = {row["user_id"]: row for row in decode(tmp_path / "out", read_rows(tmp_path / "out" / "train"))}
    assert {user: labels[row["city"]] for user, row in rows.items()} == {1: "Bonn", 2: "city 2", 3: None}
    assert {user: [brands[brand] for brand in row["brand"]] for user, row in rows.items()} == {
        1: ["a brand"],
        2: ["brand 3"],
        3: [None],
    }
    assert all(after.ids[name].extends(ids.version) for name, ids in before.ids.items())
    assert after.ids.keys() == {"user_id", "item_id", "city", "brand"}


def test_a_dataset_at_a_url_is_continued(tmp_path: Path, s3: S3) -> None:
    first, second = write_days(tmp_path, [[(1, 1, 5, 1), (2, 7, 6, 1)], [(3, 5, 1, 1)]], user="")
    run(s3.url("appended"), first)
    for _ in range(2):  # the second time as after a kill at the very end
        run(s3.url("appended"), second, append=True)
    run(tmp_path / "once", first, second)
    assert without_versions(s3.read("appended/manifest.json")) == bytes_in(tmp_path / "once")["manifest.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "user:0.5"}, r"^split is 'user:0\.5', and was 'none' when .*out was made; append with the same opt"),
        (
            {"seed": 7},
            r"^PreprocessConfig: seed=7 applies to split=user:FRACTION or dataset='synthetic', not to split=",
        ),
        ({"ids": "keep"}, r"^the rule of user_id is keep, and the ids of .*out are dense; give --ids as for that"),
        (
            {"filters": Filters(min_length=2)},
            r"^events cannot be appended: min_length left out events that may count by",
        ),
        ({"filters": Filters(window=2)}, r"^filters is \{'window': 2\}, and was \{\} when"),
    ],
)
def test_other_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    first, second = write_days(tmp_path, [[(1, 1, 5, 1)], [(3, 5, 1, 1)]], user="")
    run(tmp_path / "out", first)
    before = bytes_in(tmp_path / "out")
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "out", second, append=True, **options)
    assert bytes_in(tmp_path / "out") == before


def test_events_that_are_not_later_and_what_is_no_dataset_are_refused(tmp_path: Path) -> None:
    first, second = write_days(tmp_path, [[(1, 1, 5, 1)], [(3, 5, 1, 1)]], user="")
    with pytest.raises(DataError, match=r"out is not a dataset: no such folder"):
        run(tmp_path / "out", second, append=True)
    run(tmp_path / "out", second)
    other = second.with_name("other.csv")
    other.write_bytes(second.read_bytes())
    for path in (first, other):
        for on_error, begin in (("fail", r"csv: "), ("skip", "no events could be read: ")):
            with pytest.raises(DataError, match=f"{begin}.*1 bad row, first line 2 .*: time is not after 2023-11-15T"):
                run(tmp_path / "out", path, append=True, on_error=on_error)
    part = next((tmp_path / "out" / "train").iterdir())
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    third = write_days(tmp_path, [[], [], [(4, 5, 1, 1)]], user="")[2]
    with pytest.raises(DataError, match=r"part-00000\.parquet does not match its manifest"):
        run(tmp_path / "out", third, append=True)


def test_what_was_added_is_described(tmp_path: Path) -> None:
    days = [[(1, 1, 5, 1), (2, 7, 6, 1)], [(1, 5, 1, 1), (3, 5, 9, 1)], []]
    first, second, empty = write_days(tmp_path, days, user="")
    assert run(tmp_path / "out", first) == []
    (line,) = run(tmp_path / "out", second, append=True)
    assert line == "2 events, 1 user, 1 item, 1 file, from 2023-11-15T22:13:21Z to 2023-11-15T22:13:29Z"
    assert run(tmp_path / "out", second, append=True) == []
    assert run(tmp_path / "out", empty, append=True) == ["0 events, 0 users, 0 items, 1 file"]


def test_late_events_are_bad_rows_which_can_be_skipped(tmp_path: Path) -> None:
    first, second = write_days(tmp_path, [[(1, 1, 5, 1), (2, 7, 6, 1)], [(3, 5, 1, 1), (2, 4, 2, 1)]], user="u")
    skip: dict[str, Any] = {"on_error": "skip"}
    run(tmp_path / "out", first, on_error="fail")
    run(tmp_path / "once", first, second, **skip)
    late = f"u1,9,{BEGIN + 6},1,0\n"  # at the time of the last event
    second.write_text(second.read_text() + late)
    run(tmp_path / "out", second, append=True, **skip)
    audit = read_manifest(tmp_path / "out").options["audit"]
    (skipped,) = (name for name in audit if name.endswith("all skipped"))
    assert skipped.startswith(f"day-1.csv: 1 bad row, first line 4 ({late[:-1]!r}): time is not after 2023-11-14T22:13")
    appended, once = bytes_in(tmp_path / "out"), bytes_in(tmp_path / "once")
    assert {name: data for name, data in appended.items() if name != "manifest.json"} == {
        name: data for name, data in once.items() if name != "manifest.json"
    }


def test_ids_that_auto_keeps_are_still_counted_and_another_choice_is_refused(tmp_path: Path) -> None:
    few, many, far = ([(1, i, 1, 1) for i in items] for items in ([20], range(20), [999]))
    for name, days in (("same", [many, few, many]), ("later", [few, many]), ("far", [many, far])):
        folder = tmp_path / name
        folder.mkdir()
        first, *others = write_days(folder, days, user="u")
        run(folder / "out", first, ids="")
        if name == "same":
            for path in others:
                run(folder / "out", path, append=True, ids="")
            run(folder / "once", first, *others, ids="")
            assert bytes_in(folder / "out") == bytes_in(folder / "once")
            assert read_manifest(folder / "out").ids["item_id"].distinct == 21
            continue
        if name == "later":  # ids that were numbered stay so
            run(folder / "out", *others, append=True, ids="")
            run(folder / "once", first, *others, ids="dense")
            assert bytes_in(folder / "out") == bytes_in(folder / "once")
            continue
        with pytest.raises(
            DataError, match=r"^the ids of item_id were kept, .* 21 values up to 999; append with --ids"
        ):
            run(folder / "out", *others, append=True, ids="")
        run(folder / "out", *others, append=True, ids="user=dense,item=keep")
        assert read_manifest(folder / "out").ids["item_id"].rule == KEEP


def test_auto_cannot_choose_after_ids_that_were_not_counted(tmp_path: Path) -> None:
    first, second = write_days(tmp_path, [[(1, 1, 5, 1)], [(3, 5, 1, 1)]], user="")
    run(tmp_path / "out", first, ids="keep")
    with pytest.raises(
        ConfigError, match=r"^the rule of user_id is auto, and the ids of .*out are keep; give --ids as"
    ):
        run(tmp_path / "out", second, append=True, ids="")
    run(tmp_path / "out", second, append=True, ids="keep")
    run(tmp_path / "once", first, second, ids="keep")
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "once")


@pytest.mark.parametrize("column", ["user", "item"])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("values", [pl.Series(["7", "u"]), pl.Series([7, 2**64 - 1], dtype=pl.UInt64)])
def test_ids_of_another_kind_than_before_are_refused_and_never_left_out(
    tmp_path: Path, column: str, suffix: str, values: pl.Series
) -> None:
    (first,) = write_days(tmp_path, [[(1, 2, 5, 1), (2, 3, 6, 1)]], user="")
    second = tmp_path / f"second{suffix}"
    row = {"user": 1, "item": 2, "time": BEGIN + DAY, "action": 1, "price": 1.5}
    write_table(second, pl.DataFrame([row] * 2).with_columns(values.alias(column)))
    run(tmp_path / "out", first)
    before = bytes_in(tmp_path / "out")
    options: list[dict[str, Any]] = [{"append": True}, {"vocabulary": tmp_path / "out", "ids": ""}]
    message = f"second{suffix} has '{values[1]}' in column '{column}', and {column}_id of .*out is int64; write all ids"
    for option in options:
        with pytest.raises(DataError, match=message):
            run(tmp_path / ("out" if "append" in option else "new"), second, **option)
    assert bytes_in(tmp_path / "out") == before
    assert not (tmp_path / "new").exists()


def test_integers_after_texts_are_texts(tmp_path: Path) -> None:
    (first,) = write_days(tmp_path, [[(1, 2, 5, 1), (2, 3, 6, 1)]], user="u")
    _, second = write_days(tmp_path, [[], [(7, 2, 5, 1)]], user="", name="later-{}.csv")
    run(tmp_path / "out", first)
    run(tmp_path / "out", second, append=True)
    run(tmp_path / "once", first, second)
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "once")


def test_only_logs_of_users_without_a_vocabulary_are_appended(tmp_path: Path) -> None:
    config = PreprocessConfig(dataset="custom", out=tmp_path / "out", append=True)
    with pytest.raises(ConfigError, match="append=True applies to vocabulary=None, not to vocabulary="):
        dataclasses.replace(config, vocabulary=tmp_path / "out")
