"""Does it matter how items got their codes? Trains the decoder of examples/semantic_ids on four kinds of codes.

    .venv/bin/python scripts/bench/item_codes.py --raw-dir raw [--seeds 3] [--epochs 15]

Data: ml-20m, the last event of each user held out. Vectors of items: an SVD of who had which items in the split
`train`, 48 wide, so from co-occurrences in training events alone. All kinds have 3 levels of 32 codes, the same items,
and no two items with the same codes; each seed is that of codes, model and order of samples.

    random               tuples drawn without replacement
    popularity           the digits of an item's rank by events in `train`
    residual-kmeans, balanced    evenrank semantic-ids --collisions nearest

    recall and ndcg at 10, of a beam search of 50 over all items, one value per seed; loss per code of the last epoch
"""

import argparse
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from evenrank.codebooks import SemanticIdsConfig, make_semantic_ids
from evenrank.dataloader import CodeTable, Loader, LoaderConfig, SemanticIdBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig
from evenrank.dataloader.codes import read_codes
from evenrank.datasets import SequenceStore, open_store
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
from evenrank.training import LossAverage, RankingMetrics, scale_loss
from report import Row, emit, machine, show
from semantic_ids import Catalogue, DecoderConfig, SemanticIdModel, beam_search

LEVELS, CODES, WIDTH, BEAMS = 3, 32, 48, 50


def make_vectors(store: SequenceStore) -> NDArray[np.float32]:
    """Return a vector per item [items, WIDTH], 0 without events, by the singular vectors of users x items.

    These are the eigenvectors of how often two items have the same user, divided by the root of both their events.
    """
    items, num_items = store.columns["item_id"], store.manifest.vocabulary_sizes["item_id"]
    has = np.zeros((len(store), num_items), dtype=np.float32)
    has[np.repeat(np.arange(len(store)), store.lengths), items] = 1
    scaled = has / np.sqrt(has.sum(axis=1, keepdims=True).clip(1) * has.sum(axis=0, keepdims=True).clip(1))
    _, values, vectors = np.linalg.svd(scaled, full_matrices=False)
    found: NDArray[np.float32] = (values[1 : WIDTH + 1, None] * vectors[1 : WIDTH + 1]).T  # the first is popularity
    lengths = np.linalg.norm(found, axis=1, keepdims=True)
    return np.where(lengths > 1e-6, found / lengths.clip(1e-6), 0).astype(np.float32)


def make_dataset(raw_dir: Path, folder: Path) -> Path:
    """Preprocess the log, make vectors of its split `train`, and preprocess it with them."""
    columns: dict[str, Any] = {"user_column": "userId", "item_column": "movieId", "timestamp_column": "timestamp"}
    config: dict[str, Any] = {"dataset": "custom", "split": "leave-last:1", "ids": "item=dense"}
    log = TabularConfig(events=(raw_dir / "ml-20m" / "ratings.csv",), **columns)
    preprocess(PreprocessConfig(out=folder / "plain", custom=log, **config))
    np.save(folder / "vectors.npy", make_vectors(open_store(folder / "plain", "train"))[1:])
    vocabulary = pq.read_table(folder / "plain" / "vocabulary_item_id.parquet").sort_by("id")
    np.save(folder / "vectors.ids.npy", vocabulary["value"].to_numpy())
    log = replace(log, item_vectors=folder / "vectors.npy")
    preprocess(PreprocessConfig(out=folder / "data", custom=log, **config))
    return folder / "data"


def code_tables(data: Path, folder: Path, seed: int) -> Iterable[tuple[str, CodeTable]]:
    """Yield the kinds of codes, and their tables."""
    sizes = (CODES,) * LEVELS
    for method in ("residual-kmeans", "balanced"):
        out = folder / f"{method}-{seed}"
        options: dict[str, Any] = {"method": method, "collisions": "nearest", "seed": seed, "out": out}
        make_semantic_ids(SemanticIdsConfig(dataset=data, levels=LEVELS, codes=CODES, **options))
        yield method, (table := read_codes(out))
    coded = np.flatnonzero(table.codes[:, 0] >= 0)
    events = np.bincount(open_store(data, "train").columns["item_id"], minlength=len(table.codes))[coded]
    ranks = np.empty(len(coded), dtype=np.int64)
    ranks[np.argsort(-events, kind="stable")] = np.arange(len(coded))
    drawn = np.random.default_rng(seed).choice(CODES**LEVELS, len(coded), replace=False)
    for name, numbers in (("popularity", ranks), ("random", drawn)):
        codes = np.full_like(table.codes, -1)
        codes[coded] = np.stack(np.unravel_index(numbers, sizes), axis=1)
        yield name, CodeTable(codes=codes, codebook_sizes=sizes)


def train(data: Path, table: CodeTable, seed: int, epochs: int) -> Row:
    """Train a model, and return its measures of the held out events."""

    def loader(split: str, **options: Any) -> Loader[SemanticIdBatch]:
        shared: dict[str, Any] = {"batch_size": 32, "max_history_length": 50, "candidate_feature": True, "seed": seed}
        config = LoaderConfig(split=split, codes=table, **shared, **options)
        return build_loader(data, config, rank=0, world_size=1, balance=BalanceConfig(cost=model.config.cost()))

    torch.manual_seed(seed)
    model = SemanticIdModel(DecoderConfig(codebook_sizes=table.codebook_sizes, hidden=64, heads=2, layers=2))
    optimizer, batches = torch.optim.AdamW(model.parameters(), lr=3e-3), loader("train", history_labels=True)
    for _ in range(epochs):
        average = LossAverage()
        for batch in batches:
            loss_sums, _ = model(batch)
            scale_loss(loss_sums, batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update(loss_sums.sum(), batch)
    model.eval()
    catalogue, metrics = Catalogue(table), RankingMetrics((10,))
    for batch in loader("eval"):
        metrics.update(beam_search(model, batch, catalogue, beams=BEAMS).places_of_targets(batch))
    found = metrics.compute()
    return {"recall": found["recall@10"], "ndcg": found["ndcg@10"], "loss": average.compute()[0]}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw-dir", type=Path, required=True, help="folder with ml-20m/ratings.csv")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    emit(machine())
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = make_dataset(options.raw_dir, Path(folder))
        for seed in range(options.seeds):
            for name, table in code_tables(data, Path(folder), seed):
                begin = time.perf_counter()
                found = train(data, table, seed, options.epochs) | {"train_s": time.perf_counter() - begin}
                emit({"codes": name, "seed": seed, **found})
                row = rows.setdefault(name, {"codes": name, **{key: [] for key in found}})
                for key, value in found.items():
                    row[key].append(value)
    show([*rows.values()])


if __name__ == "__main__":
    main()
