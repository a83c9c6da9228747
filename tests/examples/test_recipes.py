"""Each recipe of examples/recipes, on small files in the layout of the dataset that it is for."""

import gzip
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

from evenrank.datasets import Manifest, read_manifest
from tests.cli.programs import EVENRANK, ROOT, run_program
from tests.preprocess.decoded import decode, read_rows, read_vocabulary

RECIPES = ROOT / "examples" / "recipes"
Files = Mapping[str, str | Sequence[dict[str, Any]] | pl.DataFrame]
Rows = list[dict[str, Any]]
Check = Callable[[Rows, Rows, dict[Any, tuple[Any, ...]], Manifest], None]  # train, eval, features of items


def _write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, pl.DataFrame):
            content.write_parquet(folder / name)
            continue
        text = content if isinstance(content, str) else "".join(f"{json.dumps(row)}\n" for row in content)
        (folder / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())


def _amazon() -> Files:
    def review(user: int, item: int) -> dict[str, Any]:
        return {
            "rating": float(1 + (user + item) % 5),
            "text": 'Not "overpowering",\nbut ok',
            "images": [],
            "asin": f"B00A{item}",
            "parent_asin": f"B00P{item}",
            "user_id": f"AGKHLEW2SOWHNMFQIJGBECAF7IN{user}",
            "timestamp": 1_588_615_855_070 + 1000 * item,
            "helpful_vote": item,
        }

    def product(item: int) -> dict[str, Any]:
        categories = [] if item == 4 else ["Beauty", f"Care {item % 2}"]
        store = None if item == 4 else "Howard" if item % 2 else "Yes To"
        return {"parent_asin": f"B00P{item}", "store": store, "categories": categories, "details": {"Size": "7 x 5"}}

    reviews = [review(user, item) for user in range(5) for item in range(5)]
    once = {**reviews[0], "user_id": "a user with one review"}
    return {"All_Beauty.jsonl.gz": [*reviews, once], "meta_All_Beauty.jsonl.gz": [product(item) for item in range(6)]}


def _check_amazon(train: Rows, targets: Rows, features: dict[Any, tuple[Any, ...]], manifest: Manifest) -> None:
    assert [row["item_id"] for row in train] == [[f"B00P{item}" for item in range(4)]] * 5
    by_user = {row["user_id"][-1]: (row["action"], row["num_targets"]) for row in targets}
    assert by_user == {str(user): ([(user + item) % 5 for item in range(5)], 1) for user in range(5)}
    assert train[0]["helpful_vote"] == [0, 1, 2, 3]
    assert manifest.vocabulary_sizes["action"] == 5
    assert (features["B00P1"], features["B00P4"]) == (("Howard", ["Beauty", "Care 1"]), (None, []))


def _check_yambda(train: Rows, targets: Rows, features: dict[Any, tuple[Any, ...]], manifest: Manifest) -> None:
    (row,) = (row for row in train if row["user_id"] == 400)
    assert (row["item_id"], row["action"], row["played_ratio_pct"]) == ([8_326_270], [0], [102])
    (row,) = targets
    assert (row["item_id"], row["num_targets"], row["track_length_seconds"]) == ([8_326_270, 1], 1, [105, 0])


def _check_taobao(train: Rows, targets: Rows, features: dict[Any, tuple[Any, ...]], manifest: Manifest) -> None:
    found = {row["user_id"]: (row["item_id"], row["action"]) for row in train}
    assert found == {1: ([2_268_318], [0]), 2: ([2_268_318], [2])}
    (row,) = targets
    assert (row["action"], row["category_id"], row["num_targets"]) == ([0, 3], [2_520_377, 2_520_771], 1)
    assert any("'3,1,1,pv,-1275'): timestamp is not a time in seconds" in bad for bad in manifest.options["audit"])


def _check_tenrec(train: Rows, targets: Rows, features: dict[Any, tuple[Any, ...]], manifest: Manifest) -> None:
    (row,) = targets
    assert (row["user_id"], row["item_id"], row["action"]) == (1, [5, 6, 7], [1, 4, 15])
    assert (row["watching_times"], row["video_category"]) == ([3, 0, 5], [1, -1, 1])


def _check_steam(train: Rows, targets: Rows, features: dict[Any, tuple[Any, ...]], manifest: Manifest) -> None:
    (row,) = targets
    assert (row["item_id"], row["action"], row["hours"]) == ([304_390, 975_370], [0, 1], [11.5, pytest.approx(36.3)])
    assert features[304_390] == (["Medieval", "Action"],)


def _check_yelp(train: Rows, targets: Rows, features: dict[Any, tuple[Any, ...]], manifest: Manifest) -> None:
    (row,) = targets
    assert (row["action"], row["useful"], row["num_targets"]) == ([0, 2, 4], [1, 3, 5], 1)
    assert (row["city"][2], sorted(row["city"]), row["state"]) == (0, [0, 1, 2], [1, 1, 0])  # 0: without an entry


YAMBDA = {
    "uid": pl.Series([100, 100, 400], dtype=pl.UInt32),
    "timestamp": pl.Series([0, 25_999_000, 5], dtype=pl.UInt32),
    "item_id": pl.Series([8_326_270, 1, 8_326_270], dtype=pl.UInt32),
    "is_organic": pl.Series([1, 0, 0], dtype=pl.UInt8),
    "played_ratio_pct": pl.Series([97, 0, 102], dtype=pl.UInt16),
    "track_length_seconds": pl.Series([105, None, 105], dtype=pl.UInt32),
}
TENREC = """user_id,item_id,click,follow,like,share,video_category,watching_times,gender,age
1,5,1,0,0,0,1,3,2,4\n1,6,0,0,1,0,\\N,0,2,4\n1,7,1,1,1,1,1,5,2,4\n2,5,1,0,0,0,1,0,1,3
"""
TAOBAO = """1,2268318,2520377,pv,1511544070\n1,2333346,2520771,buy,1512259300\n2,2268318,2520377,cart,1511561733
3,1,1,pv,-1275
"""
STEAM = """app_id,helpful,funny,date,is_recommended,hours,user_id,review_id
975370,0,0,2022-12-12,true,36.3,51580,0\n304390,4,0,2017-02-17,false,11.5,51580,1
"""
GAMES = [
    {"app_id": 304390, "description": "", "tags": ["Medieval", "Action"]},
    {"app_id": 975370, "description": 'A "game"', "tags": []},
]
REVIEWS = [
    {"user_id": "mh_", "business_id": f"b{n}", "stars": float(n), "useful": n, "date": f"2018-07-07 22:09:1{n}"}
    for n in (5, 3, 1)
]
BUSINESSES = [{"business_id": f"b{n}", "city": city, "state": "CA"} for n, city in ((1, "Goleta"), (3, "Ventura"))]
CASES: dict[str, tuple[Files, Check]] = {
    "amazon-reviews-2023": (_amazon(), _check_amazon),
    "yambda": ({"flat/50m/listens.parquet": pl.DataFrame(YAMBDA)}, _check_yambda),
    "taobao-user-behavior": ({"UserBehavior.csv": TAOBAO}, _check_taobao),
    "tenrec": ({"QB-video.csv": TENREC}, _check_tenrec),
    "steam": ({"recommendations.csv": STEAM, "games_metadata.json": GAMES}, _check_steam),
    "yelp": (
        {"yelp_academic_dataset_review.json": REVIEWS, "yelp_academic_dataset_business.json": BUSINESSES},
        _check_yelp,
    ),
}


def _features(out: Path) -> dict[Any, tuple[Any, ...]]:
    """Return the features of items by their raw id, decoded."""
    if not (out / "item_features.parquet").exists():
        return {}
    rows = pq.read_table(out / "item_features.parquet").to_pylist()
    names = {name: read_vocabulary(out, name) for name in rows[0]}

    def decoded(name: str, ids: Any) -> Any:
        return [names[name][number] for number in ids] if isinstance(ids, list) else names[name][ids]

    values = [[decoded(name, ids) for name, ids in row.items()] for row in rows]
    return {item: tuple(features) for item, *features in values}


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.toml")))
def test_a_recipe_reads_the_layout_that_it_is_for(tmp_path: Path, name: str) -> None:
    files, check = CASES[name]
    _write(tmp_path, files)
    shutil.copy(RECIPES / f"{name}.toml", tmp_path)
    run = run_program(EVENRANK, "preprocess", "--config", f"{name}.toml", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    out = Path(tmp_path, run.stdout.splitlines()[-1].removeprefix("next: evenrank inspect "))
    train, targets = (decode(out, read_rows(out / split)) for split in ("train", "eval"))
    check(train, targets, _features(out), read_manifest(out))
