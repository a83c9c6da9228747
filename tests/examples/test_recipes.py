"""Each recipe of examples/recipes, on small files in the layout of the dataset that it is for."""

import gzip
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

from evenrank.datasets import Manifest, read_manifest
from tests.cli.programs import EVENRANK, ROOT, run_program
from tests.preprocess.decoded import decode, read_rows, read_vocabulary

RECIPES = ROOT / "examples" / "recipes"


def _json_lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def _write_amazon(folder: Path) -> None:
    reviews = [
        {
            "rating": float(1 + (user + item) % 5),
            "title": "Such a lovely scent",
            "text": 'Not "overpowering",\nbut ok',
            "images": [],
            "asin": f"B00A{item}",
            "parent_asin": f"B00P{item}",
            "user_id": f"AGKHLEW2SOWHNMFQIJGBECAF7IN{user}",
            "timestamp": 1_588_615_855_070 + 1000 * item,
            "helpful_vote": item,
            "verified_purchase": True,
        }
        for user in range(5)
        for item in range(5)
    ]
    reviews.append({**reviews[0], "user_id": "a user with one review"})
    products = [
        {
            "main_category": "All Beauty",
            "title": f"Product {item}",
            "average_rating": 4.8,
            "rating_number": 10,
            "features": [],
            "description": ["a", "b"],
            "price": None,
            "images": [{"thumb": "https://example.org/1.jpg", "variant": "MAIN"}],
            "videos": [],
            "store": None if item == 4 else "Howard" if item % 2 else "Yes To",
            "categories": [] if item == 4 else ["Beauty", f"Care {item % 2}"],
            "details": {"Package Dimensions": "7 x 5 inches"},
            "parent_asin": f"B00P{item}",
            "bought_together": None,
        }
        for item in range(6)
    ]
    (folder / "All_Beauty.jsonl.gz").write_bytes(gzip.compress(_json_lines(reviews)))
    (folder / "meta_All_Beauty.jsonl.gz").write_bytes(gzip.compress(_json_lines(products)))


def _check_amazon(out: Path, manifest: Manifest) -> None:
    train, targets = (decode(out, read_rows(out / split)) for split in ("train", "eval"))
    assert [row["item_id"] for row in train] == [[f"B00P{item}" for item in range(4)]] * 5
    assert {row["num_targets"] for row in targets} == {1}
    by_user = {row["user_id"][-1]: row["action"] for row in targets}
    assert by_user == {str(user): [(user + item) % 5 for item in range(5)] for user in range(5)}
    assert train[0]["helpful_vote"] == [0, 1, 2, 3]
    assert manifest.vocabulary_sizes["action"] == 5
    features = _features(out)
    assert features["B00P1"] == ("Howard", ["Beauty", "Care 1"])
    assert features["B00P4"] == (None, [])


def _write_yambda(folder: Path) -> None:
    (folder / "flat" / "50m").mkdir(parents=True)
    types = {
        "uid": pl.UInt32,
        "timestamp": pl.UInt32,
        "item_id": pl.UInt32,
        "is_organic": pl.UInt8,
        "played_ratio_pct": pl.UInt16,
        "track_length_seconds": pl.UInt32,
    }
    rows = [(100, 0, 8_326_270, 1, 97, 105), (100, 25_999_000, 1, 0, 0, None), (400, 5, 8_326_270, 0, 102, 105)]
    frame = pl.DataFrame(rows, schema=types, orient="row")
    frame.write_parquet(folder / "flat" / "50m" / "listens.parquet")


def _check_yambda(out: Path, manifest: Manifest) -> None:
    train = {row["user_id"]: row for row in decode(out, read_rows(out / "train"))}
    assert (train[400]["item_id"], train[400]["action"], train[400]["played_ratio_pct"]) == ([8_326_270], [0], [102])
    (row,) = decode(out, read_rows(out / "eval"))
    assert (row["item_id"], row["num_targets"], row["track_length_seconds"]) == ([8_326_270, 1], 1, [105, 0])


def _write_taobao(folder: Path) -> None:
    lines = ("1,2268318,2520377,pv,1511544070", "1,2333346,2520771,buy,1512259300", "2,2268318,2520377,cart,1511561733")
    bad = "3,1,1,pv,-1275"
    (folder / "UserBehavior.csv").write_text("".join(f"{line}\n" for line in (*lines, bad)))


def _check_taobao(out: Path, manifest: Manifest) -> None:
    train = {row["user_id"]: row for row in decode(out, read_rows(out / "train"))}
    assert {user: (row["item_id"], row["action"]) for user, row in train.items()} == {
        1: ([2_268_318], [0]),
        2: ([2_268_318], [2]),
    }
    (row,) = decode(out, read_rows(out / "eval"))
    assert (row["action"], row["category_id"], row["num_targets"]) == ([0, 3], [2_520_377, 2_520_771], 1)
    (bad,) = manifest.options["audit"]
    assert "'3,1,1,pv,-1275'): timestamp is not a time in seconds" in bad


def _write_tenrec(folder: Path) -> None:
    header = "user_id,item_id,click,follow,like,share,video_category,watching_times,gender,age"
    lines = ("1,5,1,0,0,0,1,3,2,4", "1,6,0,0,1,0,\\N,0,2,4", "1,7,1,1,1,1,1,5,2,4", "2,5,1,0,0,0,1,0,1,3")
    (folder / "QB-video.csv").write_text("".join(f"{line}\n" for line in (header, *lines)))


def _check_tenrec(out: Path, manifest: Manifest) -> None:
    (row,) = decode(out, read_rows(out / "eval"))
    assert (row["user_id"], row["item_id"], row["action"]) == (1, [5, 6, 7], [1, 4, 15])
    assert (row["watching_times"], row["video_category"]) == ([3, 0, 5], [1, -1, 1])


def _write_steam(folder: Path) -> None:
    header = "app_id,helpful,funny,date,is_recommended,hours,user_id,review_id"
    lines = ("975370,0,0,2022-12-12,true,36.3,51580,0", "304390,4,0,2017-02-17,false,11.5,51580,1")
    (folder / "recommendations.csv").write_text("".join(f"{line}\n" for line in (header, *lines)))
    games = [{"app_id": 304390, "description": "", "tags": ["Medieval", "Action"]}]
    games += [{"app_id": 975370, "description": 'A "game"', "tags": []}, {"app_id": 13500, "tags": ["Action"]}]
    (folder / "games_metadata.json").write_bytes(_json_lines(games))


def _check_steam(out: Path, manifest: Manifest) -> None:
    (row,) = decode(out, read_rows(out / "eval"))
    assert (row["item_id"], row["action"], row["hours"]) == ([304_390, 975_370], [0, 1], [11.5, pytest.approx(36.3)])
    assert _features(out)[304_390] == (["Medieval", "Action"],)


def _write_yelp(folder: Path) -> None:
    reviews = [
        {
            "review_id": f"KU_O5udG6zpxOg-VcAEodg{stars}",
            "user_id": "mh_-eMZ6K5RLWhZyISBhwA",
            "business_id": f"XQfwVwDr-v0ZS3_CbbE5Xw{stars}",
            "stars": float(stars),
            "useful": stars,
            "funny": 0,
            "cool": 0,
            "text": "Family diner. Had the buffet.",
            "date": f"2018-07-07 22:09:1{stars}",
        }
        for stars in (5, 3, 1)
    ]
    businesses = [
        {"business_id": f"XQfwVwDr-v0ZS3_CbbE5Xw{stars}", "name": "x", "city": city, "state": "CA", "stars": 5.0}
        for stars, city in ((1, "Goleta"), (3, "Santa Barbara"))
    ]
    (folder / "yelp_academic_dataset_review.json").write_bytes(_json_lines(reviews))
    (folder / "yelp_academic_dataset_business.json").write_bytes(_json_lines(businesses))


def _check_yelp(out: Path, manifest: Manifest) -> None:
    (row,) = decode(out, read_rows(out / "eval"))
    assert (row["action"], row["useful"], row["num_targets"]) == ([0, 2, 4], [1, 3, 5], 1)
    city, state = row["city"], row["state"]
    assert (city[2], state) == (0, [1, 1, 0])  # of a business without an entry
    assert sorted(city) == [0, 1, 2]


def _features(out: Path) -> dict[Any, tuple[Any, ...]]:
    """Return the features of items by their raw id, decoded."""
    rows = pq.read_table(out / "item_features.parquet").to_pylist()
    names = {name: read_vocabulary(out, name) for name in rows[0]}

    def decoded(name: str, ids: Any) -> Any:
        return [names[name][number] for number in ids] if isinstance(ids, list) else names[name][ids]

    values = [[decoded(name, ids) for name, ids in row.items()] for row in rows]
    return {item: tuple(features) for item, *features in values}


CASES: dict[str, tuple[Callable[[Path], None], Callable[[Path, Manifest], None]]] = {
    "amazon-reviews-2023": (_write_amazon, _check_amazon),
    "yambda": (_write_yambda, _check_yambda),
    "taobao-user-behavior": (_write_taobao, _check_taobao),
    "tenrec": (_write_tenrec, _check_tenrec),
    "steam": (_write_steam, _check_steam),
    "yelp": (_write_yelp, _check_yelp),
}


def test_every_recipe_is_tested() -> None:
    assert {path.stem for path in RECIPES.glob("*.toml")} == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_reads_the_layout_that_it_is_for(tmp_path: Path, name: str) -> None:
    write, check = CASES[name]
    write(tmp_path)
    shutil.copy(RECIPES / f"{name}.toml", tmp_path)
    run = run_program(EVENRANK, "preprocess", "--config", f"{name}.toml", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    out = Path(tmp_path, run.stdout.splitlines()[-1].removeprefix("next: evenrank inspect "))
    check(out, read_manifest(out))
    assert not list(tmp_path.glob(".*"))
