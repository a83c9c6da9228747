"""Features of users and items: files of all formats, encoded, looked up, written, and led back to the raw values."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.datasets import open_store, read_manifest
from evenrank.datasets.schema import Manifest
from evenrank.preprocess import Filters, PreprocessConfig, TabularConfig, job, preprocess
from evenrank.preprocess.read.features import FeatureLookup, Features, read_features
from evenrank.preprocess.read.keys import text_keys
from tests.datasets.crafted import update_manifest
from tests.preprocess.decoded import decode, read_rows, read_vocabulary

BEGIN = 1_700_000_000
LOG = [("ann", "x"), ("ann", "y"), ("bob", "z"), ("bob", "x"), ("eve", "x")]
COLUMNS: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
Row = Mapping[str, Any]


def write_log(path: Path, log: list[tuple[Any, Any]]) -> Path:
    rows = [{"user": user, "item": item, "time": BEGIN + index} for index, (user, item) in enumerate(log)]
    pl.DataFrame(rows).write_csv(path)
    return path


def write_rows(path: Path, rows: Sequence[Row], types: Mapping[str, Any]) -> Path:
    """Write rows as their suffix says; in CSV, elements of lists are divided by |."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    frame = pl.DataFrame(rows, schema=dict(types))
    if path.suffix == ".parquet":
        frame.write_parquet(path)
    else:
        frame.with_columns(pl.col(pl.List(pl.String)).list.join("|", ignore_nulls=True)).write_csv(path)
    return path


def run(folder: Path, log: list[tuple[Any, Any]] = LOG, *, log_options: Row | None = None, **options: Any) -> Manifest:
    custom = TabularConfig(events=(write_log(folder / "log.csv", log),), **COLUMNS, **(log_options or {}))
    return preprocess(
        PreprocessConfig(**{"dataset": "custom", "out": folder / "out", "custom": custom, "split": "none", **options})
    )


def of_items(path: Path, *columns: str, table: bool = False) -> Row:
    return {"item_features": path, "item_columns": columns, "item_features_as": "table" if table else "events"}


def decoded_table(out: Path, **kinds: str) -> dict[Any, dict[str, Any]]:
    """Return the table of items by raw id, with the raw values of its columns of kind `id` or `list`."""
    items = read_vocabulary(out, "item_id")
    found = {}
    rows = pq.read_table(out / "item_features.parquet").to_pylist()
    assert [row["item_id"] for row in rows] == sorted({row["item_id"] for row in rows})
    for row in rows:
        item = items[row.pop("item_id")]
        for name, kind in kinds.items():
            values = read_vocabulary(out, name)
            row[name] = values[row[name]] if kind == "id" else [values[number] for number in row[name]]
        found[item] = row
    return found


TEXTS = st.text("ab,\"'é[ ", max_size=3)
TAGS = st.one_of(st.none(), st.lists(st.one_of(st.none(), TEXTS), max_size=3))
FLOATS = st.one_of(st.none(), st.floats(1 - 2**24, 2**24 - 1, width=32))
FEATURES = st.tuples(st.one_of(st.none(), TEXTS), TAGS, FLOATS, st.one_of(st.none(), st.integers(-9, 9)))
TYPES = {"item": pl.String, "brand": pl.String, "tags": pl.List(pl.String), "price": pl.Float64, "year": pl.Int64}


@settings(max_examples=20)
@given(
    items=st.dictionaries(st.sampled_from("xyzq"), FEATURES, min_size=1),
    suffix=st.sampled_from([".jsonl", ".parquet", ".csv"]),
)
def test_the_table_of_items_joined_with_its_vocabularies_is_the_raw_file(
    tmp_path_factory: pytest.TempPathFactory, items: dict[str, Any], suffix: str
) -> None:
    folder = tmp_path_factory.mktemp("items")
    rows = [dict(zip(TYPES, (item, *features), strict=True)) for item, features in items.items()]
    if suffix == ".csv":  # whose fields begin with [ only if they are JSON, and have no other separators than |
        to_plain = str.maketrans("[, ", "(..")
        for row in rows:
            row["tags"] = row["tags"] and [tag and tag.translate(to_plain) for tag in row["tags"]]
    file = write_rows(folder / f"items{suffix}", rows, TYPES)
    options = of_items(file, "brand", "tags:list", "price:float", "year:id", table=True)
    manifest = run(folder, log_options=options)
    expected = {
        row["item"]: {
            "brand": row["brand"] or None,
            "tags": [tag for tag in row["tags"] or () if tag],
            "price": row["price"] or 0,
            "year": row["year"],
        }
        for row in rows
        if row["item"] != "q"  # which has no event
    }
    assert decoded_table(folder / "out", brand="id", tags="list", year="id") == expected
    assert manifest.item_features is not None
    assert manifest.item_features.rows == len(expected)
    assert read_manifest(folder / "out") == manifest
    for name in ("brand", "tags", "year"):
        vocabulary = pl.read_parquet(folder / "out" / f"vocabulary_{name}.parquet")
        raw = [row[name] for row in expected.values()]
        given = [value for values in raw for value in (values if name == "tags" else [values])]
        assert vocabulary["count"].to_list() == [given.count(value) for value in vocabulary["value"]]
        assert vocabulary["value"].to_list() == sorted(vocabulary["value"])
        assert manifest.vocabulary_sizes[name] == len(vocabulary) + 1
    names = ("items with features but no event (left out)", "items without features")
    counts = [manifest.options["audit"].get(name, 0) for name in names]
    assert counts == [int("q" in items), 3 - len(expected)]


ITEMS = '{"item":"x","brand":"B","price":1.5}\n{"item":"y","brand":null}\n{"item":"q","brand":"A","price":2}\n'


def test_features_of_items_become_columns_of_their_events_which_loaders_read(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text(ITEMS)
    manifest = run(tmp_path, log_options=of_items(tmp_path / "items.jsonl", "brand", "price:float"))
    assert manifest.extra_events == {"brand": "int64", "price": "float32"}
    assert (manifest.vocabulary_sizes["brand"], manifest.item_features) == (3, None)
    audit = {"items with features but no event (left out)": 1, "items without features": 1}
    assert manifest.options["audit"] == audit
    brands = read_vocabulary(tmp_path / "out", "brand")
    assert brands == {0: None, 1: "A", 2: "B"}
    expected = {"x": ("B", 1.5), "y": (None, 0), "z": (None, 0)}
    rows = decode(tmp_path / "out", read_rows(tmp_path / "out" / "train"))
    assert sorted((row["user_id"], row["item_id"]) for row in rows) == [
        ("ann", ["x", "y"]),
        ("bob", ["z", "x"]),
        ("eve", ["x"]),
    ]
    for row in rows:
        found = zip(map(brands.get, row["brand"]), row["price"], strict=True)
        assert list(found) == [expected[item] for item in row["item_id"]]
    config = LoaderConfig(batch_size=3, order="rows", extra_events=("brand", "price"))
    (batch,) = build_loader(tmp_path / "out", config, rank=0, world_size=1)
    read = read_rows(tmp_path / "out" / "train")
    assert batch.features["brand"].values().tolist() == [brand for row in read for brand in row["brand"]]
    assert batch.float_features is not None
    assert batch.float_features["price"].values().tolist() == [price for row in read for price in row["price"]]


def test_an_id_of_a_feature_of_items_outside_its_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text(ITEMS)
    manifest = run(tmp_path, log_options=of_items(tmp_path / "items.jsonl", "brand"))
    update_manifest(tmp_path / "out", vocabulary_sizes={**manifest.vocabulary_sizes, "brand": 2})
    with pytest.raises(DataError, match=r"column 'brand' has values from 0 to 2, which must be in 0\.\.1; preprocess"):
        open_store(tmp_path / "out")


USERS = (
    'user,age,city,tags\neve,31.5,"Bonn, am Rhein",red|blue|red\nann,\\N,10,\\N\nbob,NaN,9,"[""blue"", 7]"\nkim,2,,x\n'
)


def test_context_of_every_type_is_encoded_and_read_by_loaders(tmp_path: Path) -> None:
    (tmp_path / "users.csv").write_text(USERS)
    columns = ("tags:list", "age:float", "city")
    manifest = run(tmp_path, log_options={"context": tmp_path / "users.csv", "context_columns": columns})
    assert manifest.contextual == {"tags": "list<int64>", "age": "float32", "city": "int64"}
    labels = {"tags": (None, "7", "blue", "red", "x"), "city": (None, "10", "9", "Bonn, am Rhein")}
    assert manifest.context_labels == labels
    assert (manifest.vocabulary_sizes["tags"], manifest.vocabulary_sizes["city"]) == (5, 4)
    assert manifest.options["audit"] == {"users with features but no event (left out)": 1}
    rows = decode(tmp_path / "out", read_rows(tmp_path / "out" / "train"))
    assert {row["user_id"]: (row["tags"], row["age"], row["city"]) for row in rows} == {
        "ann": ([], 0, 1),
        "bob": ([2, 1], 0, 2),
        "eve": ([3, 2, 3], 31.5, 3),
    }
    config = LoaderConfig(batch_size=3, order="rows", context=("tags", "age"))
    (batch,) = build_loader(tmp_path / "out", config, rank=0, world_size=1)
    assert batch.features.keys() == ["tags", "item_id", "action"]
    assert batch.features["tags"].lengths().tolist() == [len(row["tags"]) for row in rows]
    assert batch.features["tags"].values().tolist() == [tag for row in rows for tag in row["tags"]]
    assert batch.float_features is not None
    assert batch.float_features["age"].values().tolist() == [row["age"] for row in rows]


def _read(file: Path, *columns: str, kind: Any = "int64", **options: Any) -> Features:
    context: dict[str, Any] = {"context": file, "context_columns": columns}
    config = TabularConfig(events=(file,), **COLUMNS, **context, **options)
    return read_features(config, "user_id", kind)


@pytest.mark.parametrize("delimiter", [None, "^"])  # found by the first line, and not among those that are
def test_a_file_of_features_without_a_header_is_divided_like_the_events(tmp_path: Path, delimiter: str | None) -> None:
    users = tmp_path / "users.dat"
    text = "1::F::1::10::48067\n2::M::56::16::70072\n3::::25::15::55117-12\n"
    users.write_text(text.replace("::", delimiter or "::"))
    header = ("user", "sex", "age", "job", "zip")
    features = _read(users, "sex", "age", "zip", context_header=header, delimiter=delimiter)
    assert features.keys.tolist() == [1, 2, 3]
    assert features.rows.rows() == [(1, 1, 1), (2, 3, 3), (0, 2, 2)]
    # Ages are sorted as numbers, and zip codes as texts.
    assert {name: values.to_list() for name, values in features.values.items()} == {
        "sex": ["F", "M"],
        "age": [1, 25, 56],
        "zip": ["48067", "55117-12", "70072"],
    }


def test_users_of_strings_are_found_by_the_key_of_their_text_and_ranges_are_texts(tmp_path: Path) -> None:
    users = tmp_path / "users.csv"
    users.write_text('fans,user\n"(0,10]",b\n0,a\n"[1,10)",c\n')
    features = _read(users, "fans", kind="text")
    assert features.keys.tolist() == text_keys(pl.Series(["b", "a", "c"])).tolist()
    assert features.rows["fans"].to_list() == [1, 2, 3]
    assert features.values["fans"].to_list() == ["(0,10]", "0", "[1,10)"]


@pytest.mark.parametrize(
    ("values", "column", "ids", "distinct"),
    [
        ([3.0, None, float("nan"), 1.0], "x", [2, 0, 0, 1], [1.0, 3.0]),
        ([True, None, False, True], "x", [2, 0, 1, 2], [False, True]),
        ([["b", None, ""], None, ["a", "b"], []], "x:list", [[2], [], [1, 2], []], ["a", "b"]),
        ([[2.5, float("nan")], [], [1.0], None], "x:list", [[2], [], [1], []], [1.0, 2.5]),
        ([["10", "9"], ["8"], [], []], "x:list", [[3, 2], [1], [], []], [8, 9, 10]),
        ([5, None, 4, 5], "x:list", [[2], [], [1], [2]], [4, 5]),
        (["[1, 2]", '["é|", null]', "b||a", "[]"], "x:list", [[1, 2], [5], [4, 3], []], ["1", "2", "a", "b", "é|"]),
        ([7, None, True, 0], "x:float", [7, 0, 1, 0], None),
    ],
)
def test_columns_of_parquet_of_every_type(
    tmp_path: Path, values: list[Any], column: str, ids: list[Any], distinct: list[Any] | None
) -> None:
    # No event has the user "007", because users are integers.
    frame = pl.DataFrame({"user": ["4", "7", "8", "9", "007", "x"], "x": [*values, None, None]}, strict=False)
    frame.write_parquet(tmp_path / "users.parquet")
    features = _read(tmp_path / "users.parquet", column)
    assert features.keys.tolist() == [4, 7, 8, 9]
    assert features.rows["x"].to_list() == ids
    assert {name: of_feature.to_list() for name, of_feature in features.values.items()} == (
        {} if distinct is None else {"x": distinct}
    )


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("user,x\n1,2\n3,4\n1,5\n", "x", "users.csv: user 1 appears twice with different values; keep one row per"),
        ("user,x\n1,2\n,4\n", "x", "users.csv, line 3 (',4'): user is missing; fix or remove the line"),
        ("user,x\n1\n", "x", "users.csv, line 2 ('1'): expected 2 fields, got 1; fix or remove the line"),
        ("user,y\n1,1\n", "x", "users.csv has no column 'x' (--context-columns); known: user, y"),
        ("uid,x\n1,1\n", "x", "users.csv has no column 'user' (--user-column); known: uid, x"),
        ("user,x\n", "x", "users.csv contains no rows"),
        ("user,x\n1,2\n2,old\n", "x:float", "users.csv, line 3 ('2,old'): x is not a finite float32; fix or rem"),
        ("user,x\n1,1e39\n", "x:float", "users.csv, line 2 ('1,1e39'): x is not a finite float32"),
        ("user,x\n1,inf\n", "x:float", "users.csv, line 2 ('1,inf'): x is not a finite float32"),
        ("user,x\n1,-16777216\n", "x:float", "x is 2^24 or more, where float32 rounds integers; scale it down"),
        ("user,x\n1,\"['a']\"\n", "x:list", "users.csv: \"['a']\" in column 'x' is no JSON array of texts and numb"),
        ("user,x\n1,[[3]]\n", "x:list", "users.csv: '[[3]]' in column 'x' is no JSON array of texts and numbers"),
        (f"user,x\n1,{'[' * 100_000}\n", "x:list", "in column 'x' is no JSON array of texts and numbers"),
        ('user,x\n1,"[""\\ud800""]"\n', "x:list", "in column 'x' is no JSON array of texts and numbers"),
    ],
)
def test_a_fault_of_a_file_of_features_is_one_line(tmp_path: Path, text: str, column: str, message: str) -> None:
    (tmp_path / "users.csv").write_text(text)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        _read(tmp_path / "users.csv", column)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "column", "message"),
    [
        ([["a"]], "x", "of type List(String) cannot be ids; convert it to text or numbers, or declare it a list"),
        ([[["a"]]], "x:list", "of type List(String) cannot be ids"),
        ([["a"]], "x:float", "of type List(String) cannot hold numbers"),
        ([b"a"], "x", "of type Binary cannot be ids"),
    ],
)
def test_a_column_of_an_unsuitable_type_is_refused(
    tmp_path: Path, values: list[Any], column: str, message: str
) -> None:
    pl.DataFrame({"user": [1], "x": values}).write_parquet(tmp_path / "users.parquet")
    with pytest.raises(DataError, match=re.escape(f"users.parquet: column 'x' {message}")):
        _read(tmp_path / "users.parquet", column)


def test_a_feature_that_json_lines_never_have_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text('{"item":"x","brand":null}\n')
    run(tmp_path, log_options=of_items(tmp_path / "items.jsonl", "brand"))
    with pytest.raises(
        DataError, match=r"items\.jsonl has no column 'brnd' \(--item-columns\) in any row; check its name$"
    ):
        run(tmp_path, log_options=of_items(tmp_path / "items.jsonl", "brnd"))


@settings(max_examples=15)
@given(
    days=st.lists(
        st.dictionaries(
            st.sampled_from("xyz"),
            st.tuples(TEXTS, st.lists(TEXTS, max_size=3), st.one_of(st.integers(-9, 9), st.text("1a", max_size=2))),
            min_size=1,
        ),
        min_size=3,
        max_size=3,
    ),
    table=st.booleans(),
)
def test_values_of_features_keep_the_ids_of_an_earlier_day(
    tmp_path_factory: pytest.TempPathFactory, days: list[dict[str, Any]], table: bool
) -> None:
    folder = tmp_path_factory.mktemp("days")
    earlier: dict[str, dict[int, Any]] = {"brand": {}, "year": {}, "city": {}, "tags": {}}
    for number, items in enumerate(days):
        rows = [{"item": item, "brand": brand, "year": str(year)} for item, (brand, _, year) in items.items()]
        users = [
            {"user": {"x": "ann", "y": "bob", "z": "eve"}[u], "city": c, "tags": t} for u, (c, t, _) in items.items()
        ]
        options = of_items(write_rows(folder / "items.csv", rows, {}), "brand", "year", table=table)
        context = {"context": write_rows(folder / "users.jsonl", users, {}), "context_columns": ("city", "tags:list")}
        out = folder / f"day{number}"
        vocabulary = folder / f"day{number - 1}" if number else None
        manifest = run(folder, log_options={**options, **context}, out=out, vocabulary=vocabulary)
        labels = {name: read_vocabulary(out, name) for name in ("brand", "year")}
        labels |= {name: dict(enumerate(of_name)) for name, of_name in manifest.context_labels.items()}
        texts = {name: {i: v if v is None else str(v) for i, v in of.items()} for name, of in labels.items()}
        for name, known in earlier.items():
            assert list(texts[name].items())[: len(known)] == list(known.items())
            assert manifest.vocabulary_sizes[name] == len(texts[name])
            assert number or list(labels[name].values())[1:] == sorted(list(labels[name].values())[1:])
        earlier = texts
        of_users = {row["user"]: row for row in users}
        events = {item: {"brand": row["brand"], "year": row["year"]} for item, row in zip(items, rows, strict=True)}
        for row in decode(out, read_rows(out / "train")):
            user = of_users.get(row["user_id"], {"city": "", "tags": []})
            assert texts["city"][row["city"]] == (user["city"] or None)
            assert [texts["tags"][tag] for tag in row["tags"]] == [tag for tag in user["tags"] if tag]
            for index, item in enumerate(row["item_id"] if not table else ()):
                for name in ("brand", "year"):
                    assert texts[name][row[name][index]] == (events.get(item, {}).get(name) or None)
        if table:
            found = decoded_table(out, brand="id", year="id")
            years = {item: None if row["year"] is None else str(row["year"]) for item, row in found.items()}
            assert years == {item: row["year"] or None for item, row in events.items()}


def test_an_item_of_two_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item,brand\nx,1\ny,2\nx,3\n")
    with pytest.raises(
        DataError, match=r"items\.csv: item x appears twice with different values; keep one row per item"
    ):
        run(tmp_path, log_options=of_items(tmp_path / "items.csv", "brand"))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_rows_that_repeat_another_are_no_fault(tmp_path: Path, suffix: str) -> None:
    row = {"item": "x", "brand": "B", "tags": ["a", "b"], "price": 1.5, "year": 2000}
    file = write_rows(tmp_path / f"items{suffix}", [row, row | {"item": "y"}, row], TYPES)
    run(tmp_path, log_options=of_items(file, "brand", "tags:list", "price:float", table=True))
    assert decoded_table(tmp_path / "out", brand="id", tags="list") == {
        item: {"brand": "B", "tags": ["a", "b"], "price": 1.5} for item in "xy"
    }


@pytest.mark.parametrize("missing", ["nan", "NULL", "None", "NA", r"\N", ""])
def test_texts_that_stand_for_null_are_missing_among_integers_and_values_among_texts(
    tmp_path: Path, missing: str
) -> None:
    (tmp_path / "users.csv").write_text(f"user,year,tier\n1,10,gold\n2,9.0,tin\n3,{missing},{missing}\n")
    features = _read(tmp_path / "users.csv", "year", "tier")
    assert features.values["year"].to_list() == [9, 10]
    assert features.rows["year"].to_list() == [2, 1, 0]
    is_value = missing not in ("", r"\N")
    assert features.values["tier"].to_list() == sorted(["gold", "tin", *[missing] * is_value])
    assert (features.rows["tier"][2] > 0) == is_value


@pytest.mark.parametrize("values", [[7, 9], [7.0, 9.0], ["7", "9.0"], [[7], [9.0]], [[7, 7.0], [9]]])
def test_numbers_of_every_type_are_the_same_values(tmp_path: Path, values: list[Any]) -> None:
    pl.DataFrame({"user": [1, 2], "x": values}, strict=False).write_parquet(tmp_path / "users.parquet")
    features = _read(tmp_path / "users.parquet", "x:list" if isinstance(values[0], list) else "x")
    assert features.values["x"].dtype == pl.Int64
    assert features.values["x"].to_list() == [7, 9]


@pytest.mark.parametrize("texts", [["3,65", "7"], ["a; b", ""], ["red blue", "blue"]])
def test_a_list_that_is_divided_by_something_else_is_refused(tmp_path: Path, texts: list[str]) -> None:
    pl.DataFrame({"user": [1, 2], "x": texts}).write_csv(tmp_path / "users.csv")
    message = f"users.csv: {texts[0]!r} is one value, as all of column 'x'; divide lists by |, or write JSON arrays"
    with pytest.raises(DataError, match=re.escape(message)):
        _read(tmp_path / "users.csv", "x:list")
    for other in ("a|b", '["a", "b"]'):  # which shows that the column is divided well
        pl.DataFrame({"user": [1, 2, 3], "x": [*texts, other]}).write_csv(tmp_path / "users.csv")
        assert _read(tmp_path / "users.csv", "x:list").rows["x"].list.len().to_list()[::2] == [1, 2]
    pl.DataFrame({"user": [1, 2], "x": [f'["{text}"]' for text in texts]}).write_csv(tmp_path / "users.csv")
    assert texts[0] in _read(tmp_path / "users.csv", "x:list").values["x"]


@pytest.mark.parametrize("column", ["x", "x:list", "x:float"])
@pytest.mark.parametrize("values", [[None, None], [[], []]])
def test_a_column_without_any_value_has_missing_ones(tmp_path: Path, column: str, values: list[Any]) -> None:
    pl.DataFrame({"user": [1, 2], "x": values}).write_parquet(tmp_path / "users.parquet")
    if values[0] is not None and column != "x:list":
        with pytest.raises(DataError, match="List"):
            _read(tmp_path / "users.parquet", column)
        return
    features = _read(tmp_path / "users.parquet", column)
    missing: list[Any] = [[], []] if column == "x:list" else [0, 0]
    assert features.rows["x"].to_list() == missing


FILE = Path("f.csv")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (of_items(FILE, "b", "genres:list"), "item_columns has 'genres:list', no column of events; set item_features_"),
        (
            {"item_columns": ("a",)},
            "item_columns=('a',) has no effect without item_features; give both, or leave it out",
        ),
        ({"context": FILE}, "has no effect without context_columns; give both, or leave it out"),
        ({"item_features_as": "rows"}, "item_features_as must be one of events, table, got 'rows'"),
        ({"context": FILE, "context_columns": ("a", "a:float")}, "column 'a' is given twice"),
        ({"context": FILE, "context_columns": ("length:float",)}, "no feature can be called 'length'"),
        ({"context": FILE, "context_columns": ("user:list",)}, "column 'user' is given twice"),
        ({"context": FILE, "context_columns": ("age:int",)}, "column 'age:int' must be NAME or NAME:TYPE, with a type"),
        ({"context": FILE, "context_columns": ("age:float=3",)}, "column 'age:float=3' must be NAME or NAME:TYPE"),
        ({**of_items(FILE, "p:float"), "event_columns": ("p=0",)}, "the names 'p' and 'p' differ at most by case"),
        ({**of_items(FILE, "p"), "context": FILE, "context_columns": ("P",)}, "differ at most by case"),
    ],
)
def test_invalid_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        TabularConfig(events=(FILE,), **COLUMNS, **options)


@pytest.mark.parametrize("table", [False, True])
def test_features_do_not_depend_on_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: bool) -> None:
    rng = np.random.default_rng(0)
    log = list(zip(rng.integers(0, 300, 4000).tolist(), (rng.zipf(1.3, 4000) % 500).tolist(), strict=True))
    rows = [{"item": item, "brand": f"b{item % 7}", "price": item / 4} for item in range(100, 700)]
    file = write_rows(tmp_path / "items.parquet", rows, {"item": pl.Int64, "brand": pl.String, "price": pl.Float64})
    users = write_rows(tmp_path / "users.parquet", [{"user": user, "age": user % 5} for user in range(0, 400, 2)], {})
    options = {**of_items(file, "brand", "price:float", table=table), "context": users, "context_columns": ("age",)}
    outputs = []
    monkeypatch.setattr(job, "EVENTS_PER_FILE", 1000)
    for events_per_bucket in (10**9, 300):
        monkeypatch.setattr(job, "EVENTS_PER_BUCKET", events_per_bucket)
        filters = Filters(min_item_events=2)
        manifest = run(tmp_path, log, log_options=options, split="leave-last:1", filters=filters, ids="dense")
        assert len(manifest.options["audit"]) == 5  # those of users and items, and of the k-core
        paths = sorted((tmp_path / "out").rglob("*.*"))
        outputs.append({path.relative_to(tmp_path): path.read_bytes() for path in paths})
    assert outputs[0] == outputs[1]
    items = read_vocabulary(tmp_path / "out", "item_id")
    prices = {number: item / 4 for number, item in items.items() if number and item >= 100}
    assert len(prices) > 100
    if table:
        assert (
            dict(pl.read_parquet(tmp_path / "out" / "item_features.parquet").select("item_id", "price").rows())
            == prices
        )
    else:
        for row in read_rows(tmp_path / "out" / "eval"):
            assert row["price"] == [prices.get(item, 0) for item in row["item_id"]]


def test_tables_follow_the_rule_of_the_ids_and_events_need_no_rule(tmp_path: Path) -> None:
    log = [(user, item) for user in range(9) for item in (2, 3, 5, 8)]
    file = write_rows(tmp_path / "items.csv", [{"item": item, "p": item / 2} for item in (1, 3, 5, -2)], {})
    as_table = {"log_options": of_items(file, "p:float", table=True)}
    run(tmp_path, log, ids="keep", **as_table)
    table = pl.read_parquet(tmp_path / "out" / "item_features.parquet")
    assert table.rows() == [(3, 1.5), (5, 2.5)]
    run(tmp_path, log, ids="item=hash:1000,user=keep", **as_table)
    hashed = pl.read_parquet(tmp_path / "out" / "item_features.parquet")
    assert sorted(hashed["p"]) == [1.5, 2.5]
    assert hashed["item_id"].is_sorted()
    rows = read_rows(tmp_path / "out" / "train")
    assert dict(hashed.rows()).items() <= dict(zip(rows[0]["item_id"], [0, 1.5, 2.5, 0], strict=True)).items()
    message = (
        r"^4 items share their ids by hash:1, so no table has their features; choose dense ids or item_features_as"
    )
    with pytest.raises(DataError, match=message):
        run(tmp_path, log, ids="item=hash:1,user=keep", **as_table)
    run(tmp_path, log, ids="item=hash:1,user=keep", log_options=of_items(file, "p:float"))
    assert {tuple(row["p"]) for row in read_rows(tmp_path / "out" / "train")} == {(0, 1.5, 2.5, 0)}


@pytest.mark.parametrize("unknown", ["append", "item=oov"])
def test_a_table_has_the_items_of_an_earlier_vocabulary_too(tmp_path: Path, unknown: str) -> None:
    run(tmp_path, [("ann", "x"), ("ann", "old")], out=tmp_path / "monday")
    rows = [{"item": item, "brand": item.upper()} for item in ("old", "new", "none", "other")]
    file = write_rows(tmp_path / "items.jsonl", rows, {})
    earlier = {"vocabulary": tmp_path / "monday", "unknown": unknown}
    log = [("ann", "new"), ("ann", "x"), ("bob", "other")]
    manifest = run(tmp_path, log, log_options=of_items(file, "brand", table=True), **earlier)
    known = ["old", "new", "other"] if unknown == "append" else ["old"]
    expected = {item: {"brand": item.upper()} for item in known}
    assert decoded_table(tmp_path / "out", brand="id") == expected
    audit = {"items with features but no event (left out)": 1, "items without features": 1}
    assert manifest.options["audit"] == audit


def test_a_change_of_the_table_is_another_content_and_replaces_the_dataset(tmp_path: Path) -> None:
    hashes = []
    for price in (1.5, 2, 1.5):
        file = write_rows(tmp_path / "items.jsonl", [{"item": "x", "price": price}], {})
        manifest = run(tmp_path, log_options=of_items(file, "price:float", table=True))
        assert [source.path for source in manifest.sources] == ["log.csv", "items.jsonl"]
        hashes.append(manifest.content_hash)
    assert hashes[0] == hashes[2] != hashes[1]
    raw = json.loads((tmp_path / "out" / "manifest.json").read_text())
    for wrong, message in (({"path": "../x"}, "malformed field"), ({"sha256": "0" * 64}, "has content hash")):
        changed = {**raw, "item_features": {**raw["item_features"], **wrong}}
        (tmp_path / "out" / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(DataError, match=message):
            read_manifest(tmp_path / "out")
    assert run(tmp_path).item_features is None
    assert not (tmp_path / "out" / "item_features.parquet").exists()


def test_keys_without_features_are_counted_once_and_get_zeros() -> None:
    rows = pl.DataFrame({"sex": [2, 1, 2], "tags": [[1], [], [2, 1]]})
    features = Features(keys=np.array([4, 2, 9]), rows=rows, values={})
    lookup = FeatureLookup(features, of="users")
    assert {column.name: column.type for column in features.columns} == {"sex": "int64", "tags": "list<int64>"}
    found, seen = lookup.lookup(np.array([9, 3, 10, 0, 2]))
    assert found.rows() == [(2, [2, 1]), (0, []), (0, []), (0, []), (1, [])]
    again, seen_again = lookup.lookup(np.array([3, 2, 2]))
    assert again["sex"].to_list() == [0, 1, 1]
    for of_one in (seen, seen_again):
        lookup.record(of_one)
    assert lookup.audit() == {"users with features but no event (left out)": 1, "users without features": 3}


def test_nobody_counts_as_without_features_where_nobody_has_any() -> None:
    features = Features(keys=np.empty(0, dtype=np.int64), rows=pl.DataFrame(schema={"age": pl.Float32}), values={})
    lookup = FeatureLookup(features, of="users")
    found, seen = lookup.lookup(np.array([9, 3, 9]))
    lookup.record(seen)
    assert found.equals(pl.DataFrame({"age": [0.0] * 3}, schema={"age": pl.Float32}))
    assert set(lookup.audit().values()) == {0}
