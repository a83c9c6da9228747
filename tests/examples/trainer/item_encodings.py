"""Datasets whose items have other ids, and jobs on them whose tables have the same initial values for each item."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec import EmbeddingConfig

import hstu.embeddings
from evenrank.datasets import read_manifest
from evenrank.datasets.schema import ITEM_ID, DataFile, content_hash
from hstu.embeddings import fill_rows
from tests.examples.trainer.jobs import Trained, run
from trainer.routing import make_key_maps

Ids = NDArray[np.int64]

ENCODINGS: dict[str, Callable[[Ids], Ids]] = {
    "dense": lambda ids: ids,
    "blocks": lambda ids: ids // 50 * 400 + ids % 50,  # 50 ids of every 400 are in use
}


def encode_items(data: Path, out: Path, encoding: str) -> Path:
    """Copy a dataset, with other ids of its items, and return the copy."""
    shutil.copytree(data, out, ignore=shutil.ignore_patterns(".cache"))
    manifest = read_manifest(data)
    splits = {
        name: replace(split, files=tuple(_encode_file(out, file, ENCODINGS[encoding]) for file in split.files))
        for name, split in manifest.splits.items()
    }
    sizes = {**manifest.vocabulary_sizes, ITEM_ID: 8 * manifest.vocabulary_sizes[ITEM_ID]}
    found = content_hash(
        splits=splits, contextual=manifest.contextual, extra_events=manifest.extra_events, vocabulary_sizes=sizes
    )
    replace(manifest, splits=splits, vocabulary_sizes=sizes, content_hash=found).write(out)
    return out


def _encode_file(out: Path, file: DataFile, encode: Callable[[Ids], Ids]) -> DataFile:
    import polars as pl  # hosts that only train lack it

    path = out / file.path
    frame = pl.read_parquet(path)
    items = frame.select(pl.col(ITEM_ID).explode()).to_series().drop_nulls().to_numpy()
    encoded = np.split(encode(items), np.cumsum(frame[ITEM_ID].list.len().to_numpy())[:-1])
    frame.with_columns(pl.Series(ITEM_ID, encoded, dtype=pl.List(pl.Int64))).write_parquet(path)
    return replace(file, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def run_encoded(rank: int, world_size: int, options: dict[str, Any], dense: Path, encoding: str) -> Trained:
    """Run a job on this rank; whatever its routing and the ids, an item has the initial values that it has in `dense`.

    The job is on a dataset that `encode_items` made from `dense` with an encoding.
    """
    sizes = read_manifest(dense).vocabulary_sizes

    def fill(rows: Tensor, table: EmbeddingConfig, *, first_row: int, seed: int) -> None:
        num_keys = sizes[table.name]
        values = torch.empty(num_keys, table.embedding_dim)
        # `init_fn` is made from the number of rows.
        fill_rows(values, replace(table, num_embeddings=num_keys, init_fn=None), first_row=0, seed=seed)
        keys = torch.arange(num_keys)
        if table.name == ITEM_ID:
            keys = torch.from_numpy(ENCODINGS[encoding](keys.numpy()))
        key_maps = make_key_maps({table.name: table.num_embeddings}, options["routing"], world_size)
        whole = torch.zeros(table.num_embeddings, table.embedding_dim)
        whole[key_maps[table.name](keys) if key_maps else keys] = values
        with torch.no_grad():
            rows.copy_(whole[first_row : first_row + len(rows)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hstu.embeddings, "fill_rows", fill)
        return run(rank, world_size, options)
