from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.datasets.schema import EVENTS, LENGTH, USER_IDS, Column
from evenrank.preprocess.build.sequences import build_sequences
from evenrank.preprocess.log_config import TabularConfig
from evenrank.preprocess.read.features import FeatureLookup, read_features
from evenrank.preprocess.writer import arrow_schema, write_rows

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
TAGS = st.one_of(st.none(), st.lists(st.one_of(st.none(), st.sampled_from("cab")), max_size=3))
USERS = st.lists(
    st.tuples(
        st.booleans(),  # whether the user has features
        TAGS,
        st.one_of(st.none(), FLOATS),
        st.one_of(st.none(), st.sampled_from(["y", "x"])),
        st.lists(FLOATS, min_size=1, max_size=4),  # prices of the events
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=60)
@given(users=USERS, parts=st.integers(1, 3))
def test_features_and_events_of_every_kind_are_written(
    tmp_path_factory: pytest.TempPathFactory,
    users: list[tuple[bool, list[str | None], float, str, list[float]]],
    parts: int,
) -> None:
    known = {user: features for user, (has_features, *features, _) in enumerate(users) if has_features}
    columns = dict(zip(("tags", "share", "sex"), zip(*known.values(), strict=True), strict=True)) if known else {}
    schema = {"user": pl.Int64(), "tags": pl.List(pl.String()), "share": pl.Float32(), "sex": pl.String()}
    raw = pl.DataFrame({"user": [*known], **columns} if known else [], schema=schema)
    folder = tmp_path_factory.mktemp("data")
    absent = pl.DataFrame({name: [-1 if name == "user" else None] for name in schema}, schema=schema)
    raw.extend(absent).write_parquet(folder / "users.parquet")
    config = TabularConfig(
        events=(Path("log.csv"),),
        user_column="user",
        item_column="item",
        timestamp_unit="row",
        context=folder / "users.parquet",
        context_columns=("tags:list", "share:float", "sex"),
    )
    features_of_users = read_features(config, "user_id", "int64")
    context = FeatureLookup(features_of_users, of="users")
    assert {column.name: column.type for column in features_of_users.columns} == {
        "tags": "list<int64>",
        "share": "float32",
        "sex": "int64",
    }

    num_events = [len(prices) for *_, prices in users]
    events: dict[str, NDArray[Any]] = {
        "user_id": np.repeat(np.arange(len(users)), num_events),
        "item_id": np.arange(sum(num_events)),
        "action": np.zeros(sum(num_events), dtype=np.int32),
        "timestamp_ms": np.arange(sum(num_events)),
        "price": np.concatenate([np.array(prices, dtype=np.float32) for *_, prices in users]),
    }
    sequences, _ = build_sequences(events, lambda keys: keys)
    price = Column("price", "event", "float32")
    schema = arrow_schema([USER_IDS, *features_of_users.columns, *EVENTS, price, Column(LENGTH, "scalar", "int32")])
    for number, rows in enumerate(np.array_split(np.arange(len(sequences)), parts)):
        part = sequences.take(rows)
        features, seen = context.lookup(part.user_ids)
        context.record(seen)
        file = write_rows(folder, f"train/part-{number}.parquet", schema, part, features)
        assert (file.rows, file.sha256) == (len(part), sha256((folder / file.path).read_bytes()).hexdigest())

    found = {name: sorted({v for v in values if v is not None}) for name, values in _values(known).items()}
    table = pq.read_table(folder / "train").to_pylist()
    assert sorted(row["user_id"] for row in table) == list(range(len(users)))
    for row in table:
        has_features, tags, share, sex, prices = users[row["user_id"]]
        assert row["price"] == prices
        assert row["tags"] == [found["tags"].index(tag) + 1 for tag in tags or () if has_features and tag is not None]
        assert row["share"] == (share or 0 if has_features else 0)
        assert row["sex"] == (found["sex"].index(sex) + 1 if has_features and sex is not None else 0)
    audit = {"users with features but no event (left out)": 1, "users without features": len(users) - len(known)}
    assert context.audit() == audit


def _values(known: Mapping[int, list[Any]]) -> dict[str, list[Any]]:
    return {
        "tags": [tag for tags, _, _ in known.values() for tag in tags or ()],
        "sex": [sex for _, _, sex in known.values()],
    }
