"""Mistakes with semantic ids: of files, datasets and options; those of the command are in tests/codebooks."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evenrank.codebooks import Bundle, read_bundle
from evenrank.codebooks.bundle import RULE, write_bundle
from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.codes import read_codes
from evenrank.datasets import read_manifest
from evenrank.datasets.schema import ITEM_ID
from tests.codebooks.crafted import make, vectors_of, write_dataset
from tests.errors.scene import Row, Scene

OPTIONS: dict[str, Any] = {"levels": 2, "codes": 4}


def made(scene: Scene, **options: Any) -> Path:
    data = write_dataset(scene.folder / "data", vectors_of(20))
    make(data, scene.folder / "ids", **OPTIONS | options)
    return data


def appended(scene: Scene, vectors: Any, vocabulary: str = "a", change: Callable[[Path], object] | None = None) -> None:
    made(scene)
    if change is not None:
        change(scene.folder / "ids")
    data = write_dataset(scene.folder / "new", vectors, vocabulary)
    make(data, scene.folder / "new-ids", append=scene.folder / "ids")


def overwrite(folder: Path, name: str) -> None:
    np.save(folder / name, np.full((2, 4, 6), np.nan))


def changed(scene: Scene, **entries: Any) -> Bundle:
    """Read a bundle with other entries; ...: without that one."""
    made(scene)
    path = scene.folder / "ids" / "bundle.json"
    content = {**json.loads(path.read_text()), **entries}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))
    return read_bundle(scene.folder / "ids")


def other_codes(scene: Scene) -> Any:
    made(scene)
    path = scene.folder / "ids" / "codes.npy"
    np.save(path, np.load(path) + 1)
    return read_codes(scene.folder / "ids")


def loaded(scene: Scene) -> Any:
    """Load batches of a dataset with the semantic ids of other items."""
    made(scene)
    ids = read_manifest(scene.data).ids[ITEM_ID]
    other = replace(ids, rule="hash:1000")
    bundle = Bundle(
        method="balanced",
        collisions="level",
        seed=0,
        codebook_sizes=(4,),
        items=other,
    )
    books = [np.zeros((1, 4, 2), dtype=np.float32), np.zeros((1, 4), dtype=np.float32)]
    write_bundle(scene.folder / "hashed", bundle, np.zeros((1, 999), dtype=np.int32), books, {})
    return build_loader(scene.data, LoaderConfig(codes=scene.folder / "hashed", batch_size=4), rank=0, world_size=1)


def data(call: Callable[[Scene], Any], line: str) -> Row:
    return Row(call, DataError, line)


READ = "<folder>/ids/bundle.json cannot be read ("
AGAIN = "make it again with `evenrank semantic-ids`"

ROWS = [
    Row(
        lambda scene: make(write_dataset(scene.folder / "data", vectors_of(3)), scene.folder / "ids", **OPTIONS),
        ConfigError,
        "<folder>/data has 3 items with a vector, fewer than a level has codes, 4; choose fewer --codes",
    ),
    Row(
        lambda scene: made(scene, collisions="nearest"),
        ConfigError,
        "20 items need more than 16 tuples of codes; choose more --codes",
    ),
    Row(
        lambda scene: make(made(scene), scene.folder / "ids", **OPTIONS),
        ConfigError,
        "<folder>/ids exists, and is never replaced; remove it, or choose another --out",
    ),
    data(
        lambda scene: make(write_dataset(scene.folder / "data", vectors_of(9) * 1e25), scene.folder / "ids", **OPTIONS),
        "<folder>/data has values of vectors up to 2.5e+25, over 1e15; scale them down",
    ),
    data(
        lambda scene: make(scene.data, scene.folder / "ids"),
        "<data> has no vectors of item_id; preprocess it with --item-vectors FILE, and open that dataset",
    ),
    data(
        lambda scene: appended(scene, vectors_of(30), "other"),
        "the items of <folder>/new do not extend those of <folder>/ids; preprocess it with --vocabulary of...",
    ),
    data(
        lambda scene: appended(scene, vectors_of(30, 5)),
        "<folder>/new has vectors of 5 numbers, the codebooks of <folder>/ids 6; pass vectors of the same model",
    ),
    *(
        data(
            partial(appended, vectors=vectors_of(30), change=partial(overwrite, name=name)),
            f"<folder>/ids/{name} does not have the SHA-256 in bundle.json; {AGAIN}",
        )
        for name in ("codebooks.npy", "prices.npy", "codes.npy")
    ),
    data(lambda scene: read_bundle(scene.folder / "none"), "<folder>/none/bundle.json cannot be read: No such file..."),
    data(lambda scene: changed(scene, format_version=2), f"{READ}it has format version 2, not 1); {AGAIN}"),
    data(lambda scene: changed(scene, method="kmeans"), f"{READ}bundle.json: method must be one of ...); {AGAIN}"),
    data(lambda scene: changed(scene, items=...), f"{READ}bundle.json: missing a required ...'items'...; {AGAIN}"),
    data(
        lambda scene: changed(scene, codes={"rule": RULE, "kind": "int64"}),
        f"{READ}codes has no versions); {AGAIN}",
    ),
    data(other_codes, f"<folder>/ids/codes.npy does not have the SHA-256 in bundle.json; {AGAIN}"),
    data(
        loaded,
        "the semantic ids are of other items than those of the dataset 'synthetic'; make them of it, or preprocess it "
        "with --vocabulary of theirs",
    ),
]
