"""Jobs of the shape of MLPerf's recommender: pools, features of targets and items, held-out users, a fixed window."""

import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingConfig

import hstu.embeddings
from evenrank.core.expressions import fraction
from evenrank.core.settings import rules_of
from evenrank.dataloader import Cross, LoaderConfig, Pools, Targets
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets import open_store, read_manifest
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
from tests.examples.trainer.test_job import Trained, log_lines, run_job_on_rank, together
from tests.ranks import RankPool
from trainer import TrainConfig, World, ranking

_DAY, _FIRST, _HELD_OUT, _SALT = 86_400, 1_000_000_000, 0.3, 5
_FILL = hstu.embeddings.fill_rows
SHAPE: dict[str, Any] = {
    "targets": "action in (1, 4)",
    "min_history": 3,
    "label": "listen_plus",
    "pools": (1, 2, 4),
    "pools_within": 40,
    "max_history_length": 15,
    "item_features": ("artist_id", "album_id"),
    "target_features": ("hour=timestamp_ms // 3600000 % 24", "is_late=timestamp_ms // 3600000 % 24 >= 12:2"),
    "crosses": ("user_artist=user_id,artist_id:50", "three=item_id,hour,is_organic:40"),
    "user_id": True,
    "time_windows": "1d",
    "time_windows_start": "first",
    "evaluate_window": 2,
    "held_out": _HELD_OUT,
    "held_out_salt": _SALT,
    "within": "user",
    "embeddings": "sharded",
    "min_sharded_rows": 10,
    "pipeline": "sparse-dist",
    "learning_rate": 0.01,
    "log_every": 1,
}


@pytest.fixture(scope="module")
def yambda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a log of five days, with listens (1), likes (2), skips (4) and other events (0); the last is left out."""
    folder, draw = tmp_path_factory.mktemp("yambda"), random.Random(3)
    events = []
    for user in range(14):
        for time in sorted(draw.randrange(0, 5 * _DAY, 5) for _ in range(draw.randrange(20, 70))):
            action = draw.choices((1, 2, 4, 0), (12, 1, 6, 1))[0]
            item = int(30 ** draw.random())
            events.append((user, _FIRST + time, item, action, int(action == 1), draw.randrange(2)))
    names = ["uid", "timestamp", "item_id", "action", "listen_plus", "is_organic"]
    pl.DataFrame(events, schema=names, orient="row").write_parquet(folder / "events.parquet")
    items = {"item_id": range(30), "artist_id": [item % 11 for item in range(30)]}
    items |= {"album_id": [item * 7 % 23 for item in range(30)]}
    pl.DataFrame(items).write_parquet(folder / "items.parquet")
    log = TabularConfig(
        events=(folder / "events.parquet",),
        user_column="uid",
        timestamp_column="timestamp",
        timestamp_unit="s",
        action_columns=("action",),
        event_columns=("listen_plus:int", "is_organic:int"),
        item_features=folder / "items.parquet",
        item_columns=("artist_id", "album_id"),
        item_features_as="table",
    )
    preprocess(PreprocessConfig(dataset="custom", out=folder / "data", custom=log, split="time:last:1d"))
    return folder / "data"


def _run_by_key(rank: int, world_size: int, options: dict[str, Any], crash_at: int = 0) -> Trained:
    """Run a job whose tables have, wherever their rows are, the same initial values of each key."""

    def fill(rows: Tensor, table: EmbeddingConfig, *, first_row: int, seed: int) -> None:
        size = table.num_embeddings
        keys = np.arange(first_row, first_row + len(rows))
        if options.get("routing") and table.feature_names != ["action"]:
            keys = KeyMap(num_embeddings=size, world_size=world_size, mode=options["routing"]).inverse(keys)
        whole = rows.detach().new_empty(size, table.embedding_dim)
        _FILL(whole, table, first_row=0, seed=seed)
        rows.detach().copy_(whole[torch.from_numpy(keys)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hstu.embeddings, "fill_rows", fill)
        return run_job_on_rank(rank, world_size, options, crash_at)


def _targets(data: Path, *, is_trained: bool) -> Iterator[tuple[int, int]]:
    """Yield the window and the user of each target, read plainly."""
    store = open_store(data)
    found = []
    for row in range(len(store)):
        user = int(store.columns["user_id"][row])
        for place in range(store.begins[row] + 3, store.ends[row]):
            if store.columns["action"][place] in (1, 4):
                found.append((int(store.columns["timestamp_ms"][place]), user))
    start = min(time for time, _ in found)
    for time, user in found:
        if (float(fraction(np.array([user]), _SALT)[0]) < 1 - _HELD_OUT) == is_trained:
            yield (time - start) // (_DAY * 1000), user


def test_losses_are_those_of_one_rank_in_any_balance_routing_and_after_a_crash_within_a_window(
    ranks: RankPool, yambda: Path, tmp_path: Path
) -> None:
    def train(out: str, num_ranks: int, crash_at: int = 0, **options: Any) -> list[Trained]:
        job = {**SHAPE, "out": str(tmp_path / out), "data": str(yambda), "batch_size": 12 // num_ranks, **options}
        parts: list[Trained] = ranks.run(num_ranks, _run_by_key, job, crash_at)
        return parts

    whole = train("whole", 1, balance="none")
    samples, losses = together(whole)
    trained = Counter(window for window, _ in _targets(yambda, is_trained=True))
    counts = Counter(epoch for of_step in samples.values() for epoch, _ in of_step)
    assert counts == {window: trained[window] for window in (0, 1)}
    evaluated = Counter(user for window, user in _targets(yambda, is_trained=False) if window == 2)
    assert len(evaluated) > 1
    for number in (0, 1):
        users = Counter(user for _, _, of_step in whole[0].evaluated[number] for user in of_step.tolist())
        assert users == evaluated
    lines = log_lines(tmp_path / "whole", "eval")
    assert [(line["trained"], line["window"], line["targets"]) for line in lines] == [
        (window, 2, evaluated.total()) for window in (0, 1)
    ]
    assert all(0 < line["auc"] < 1 and not math.isnan(line["normalized_entropy"]) for line in lines)

    in_window = len({step for step, of_step in samples.items() if of_step[0][0] == 0}) + 3
    routed: dict[str, Any] = {"routing": "hash_roundrobin", "checkpoint_every": in_window - 1}
    runs = [
        train("exchanged", 2, balance="all-to-all", routing="hash_roundrobin"),
        train("parts", 2, in_window, balance="none", **routed),
        train("parts", 2, balance="no-exchange", **routed),
    ]
    for number, parts in enumerate(runs):
        of_steps, of_losses = together(parts)
        first, last = (in_window if number == 2 else 1), (in_window if number == 1 else max(samples))
        assert [*of_steps] == list(range(first, last + 1))
        assert of_steps == {step: samples[step] for step in of_steps}
        assert of_losses == pytest.approx({step: losses[step] for step in of_losses}, rel=1e-4)
    for out in ("exchanged", "parts"):
        for line, expected in zip(log_lines(tmp_path / out, "eval"), lines, strict=True):
            assert line == pytest.approx(expected, abs=1e-3)
    assert whole[0].looked_at >= SHAPE.keys() <= rules_of(TrainConfig).keys()


def test_settings_become_tables_tokens_and_what_batches_have(yambda: Path) -> None:
    config = TrainConfig(**{name: SHAPE[name] for name in SHAPE.keys() - {"embeddings", "min_sharded_rows"}})
    task = ranking(config, read_manifest(yambda), World(rank=0, size=1, device=torch.device("cpu")))
    sizes = {"user_id": 14, "is_late": 2, "user_artist": 50, "three": 40, "item_id": 30, "action": 5}
    sizes |= {"artist_id": 12, "album_id": 24}
    weights = {name: len(table) for name, table in task.model.state_dict().items() if name.startswith("embeddings.")}
    assert weights == {f"embeddings.embeddings.table:{name}.weight": size for name, size in sizes.items()}
    shape: Any = task.dense.config
    assert shape.contextual == ("user_id", "is_late", "user_artist", "three")
    assert shape.max_length == 4 + 2 * 15 + 1
    order = Targets(where=SHAPE["targets"])
    assert task.read(batch_size=2, order=order) == LoaderConfig(
        batch_size=2,
        order=order,
        user_id=True,
        max_num_candidates=1,
        num_tasks=1,
        label="listen_plus",
        pools=Pools(values=(1, 2, 4), within=40),
        item_features=("artist_id", "album_id"),
        target_features={"hour": "timestamp_ms // 3600000 % 24", "is_late": "timestamp_ms // 3600000 % 24 >= 12"},
        crosses={
            "user_artist": Cross(of=("user_id", "artist_id"), size=50),
            "three": Cross(of=("item_id", "hour", "is_organic"), size=40),
        },
    )


def test_without_windows_filtered_targets_are_trained_once_and_evaluated(
    ranks: RankPool, yambda: Path, tmp_path: Path
) -> None:
    options = {"data": str(yambda), "out": str(tmp_path), "targets": "action == 1", "batch_size": 64, "segment": 0.25}
    (trained,) = ranks.run(1, run_job_on_rank, options)
    samples, _ = together([trained])
    assert sum(map(len, samples.values())) == (open_store(yambda).columns["action"] == 1).sum()
    (line,) = log_lines(tmp_path, "eval")
    store = open_store(yambda, "eval")
    assert store.num_targets is not None
    last = [store.columns["action"][end - n : end] for end, n in zip(store.ends, store.num_targets, strict=True)]
    of_steps = [targets for _, targets, _ in trained.evaluated[0]]
    assert sum(map(len, of_steps)) == (np.concatenate(last) == 1).sum()
    assert line["accuracy"] == 1  # all of them are positive
