"""Each recipe of examples/recipes, on small files in the layout of the dataset that it is for."""

import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from evenrank.cli.preprocess import preprocess_command
from evenrank.datasets import read_manifest
from tests.preprocess.decoded import decode, read_rows, read_vocabulary

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"


def _review(user: int, item: int) -> dict[str, Any]:
    return {
        "rating": float(1 + (user + item) % 5),
        "text": 'Not "overpowering",\nbut ok',
        "images": [],
        "asin": f"B00A{item}",
        "parent_asin": f"B00P{item}",
        "user_id": f"AGKH{user}",
        "timestamp": 1_588_615_855_070 + 1000 * item,
        "helpful_vote": item,
    }


def _product(item: int) -> dict[str, Any]:
    categories = [] if item == 4 else ["Beauty", f"Care {item % 2}"]
    store = None if item == 4 else "Howard" if item % 2 else "Yes To"
    return {"parent_asin": f"B00P{item}", "store": store, "categories": categories, "details": {"Size": "7 x 5"}}


AMAZON = {
    "All_Beauty.jsonl.gz": [*(_review(user, item) for user in range(5) for item in range(5)), _review(9, 0)],
    "meta_All_Beauty.jsonl.gz": [_product(item) for item in range(6)],
}
OF_USERS = {"item_id": [f"B00P{item}" for item in range(4)], "helpful_vote": [0, 1, 2, 3]}
TENREC = """user_id,item_id,click,follow,like,share,video_category,watching_times,gender,age
1,5,1,0,0,0,1,3,2,4\n1,6,0,0,1,0,\\N,0,2,4\n1,7,1,1,1,1,1,5,2,4\n2,5,1,0,0,0,1,0,1,3
"""
TAOBAO = """1,2268318,2520377,pv,1511544070\n1,2333346,2520771,buy,1512259300\n2,2268318,2520377,cart,1511561733
3,1,1,pv,-1275
"""
STEAM = """app_id,helpful,funny,date,is_recommended,hours,user_id,review_id
975370,0,0,2022-12-12,true,36.3,51580,0\n304390,4,0,2017-02-17,false,11.5,51580,1
"""
GAMES = [{"app_id": 304390, "description": 'A "game"', "tags": ["Medieval", "Action"]}, {"app_id": 975370, "tags": []}]
REVIEWS = [
    {"user_id": "mh_", "business_id": f"b{n}", "stars": float(n), "useful": n, "date": f"2018-07-07 22:09:1{n}"}
    for n in (5, 3, 1)
]
BUSINESSES = [{"business_id": f"b{n}", "city": city, "state": "CA"} for n, city in ((1, "Goleta"), (3, "Ventura"))]
# Rows of train and of eval, features of items, and a part of the audit.
CASES: dict[str, dict[str, Any]] = {
    "amazon-reviews-2023": {
        "files": AMAZON,
        "train": {f"AGKH{user}": OF_USERS for user in range(5)},
        "eval": {f"AGKH{user}": {"action": [(user + n) % 5 for n in range(5)], "num_targets": 1} for user in range(5)},
        "features": {"B00P1": ("Howard", ["Beauty", "Care 1"]), "B00P4": (None, [])},
    },
    "taobao-user-behavior": {
        "files": {"UserBehavior.csv": TAOBAO},
        "train": {1: {"item_id": [2_268_318], "action": [0]}, 2: {"item_id": [2_268_318], "action": [2]}},
        "eval": {1: {"action": [0, 3], "category_id": [2_520_377, 2_520_771], "num_targets": 1}},
        "audit": "'3,1,1,pv,-1275'): timestamp is not a time in seconds",
    },
    "tenrec": {
        "files": {"QB-video.csv": TENREC},
        "eval": {
            1: {"item_id": [5, 6, 7], "action": [1, 4, 15], "watching_times": [3, 0, 5], "video_category": [1, -1, 1]}
        },
    },
    "steam": {
        "files": {"recommendations.csv": STEAM, "games_metadata.json": GAMES},
        "eval": {51580: {"item_id": [304_390, 975_370], "action": [0, 1], "hours": pytest.approx([11.5, 36.3])}},
        "features": {304_390: (["Medieval", "Action"],)},
    },
    "yelp": {
        "files": {"yelp_academic_dataset_review.json": REVIEWS, "yelp_academic_dataset_business.json": BUSINESSES},
        "eval": {"mh_": {"action": [0, 2, 4], "useful": [1, 3, 5], "city": ["Goleta", "Ventura", None]}},
    },
}


def _write(path: Path, content: str | Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else "".join(f"{json.dumps(row)}\n" for row in content)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def _features(out: Path) -> dict[Any, tuple[Any, ...]]:
    """Return the features of items by their raw id, decoded."""
    rows = pq.read_table(out / "item_features.parquet").to_pylist()
    names = {name: read_vocabulary(out, name) for name in rows[0]}
    values = (
        [[names[name][n] for n in ids] if isinstance(ids, list) else names[name][ids] for name, ids in row.items()]
        for row in rows
    )
    return {item: tuple(features) for item, *features in values}


def test_every_recipe_is_read_here_or_trained_by_the_tests_of_the_trainer() -> None:
    assert {path.stem for path in RECIPES.glob("*.toml")} == {*CASES, "mlperf-yambda"}


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_recipe_reads_the_layout_that_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = CASES[name]
    for file, content in case["files"].items():
        _write(tmp_path / file, content)
    shutil.copy(RECIPES / f"{name}.toml", tmp_path)
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(preprocess_command)
    run = CliRunner().invoke(app, ["--config", f"{name}.toml"])
    assert run.exit_code == 0, run.output
    out = Path(run.output.splitlines()[-1].removeprefix("next: evenrank inspect "))
    for split in ("train", "eval"):
        found = {row["user_id"]: row for row in decode(out, read_rows(out / split), features=name == "yelp")}
        for user, row in case.get(split, {}).items():
            assert {column: found[user][column] for column in row} == row
    assert found.keys() == case["eval"].keys()
    assert "features" not in case or case["features"].items() <= _features(out).items()
    assert case.get("audit", "") in "\n".join(read_manifest(out).options["audit"])
