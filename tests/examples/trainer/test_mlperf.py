"""Jobs of the shape of MLPerf's recommender: pools, features of targets and items, held-out users, a fixed window."""

import dataclasses
import math
import random
import re
import tomllib
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
from evenrank.dataloader import Cross, LoaderConfig, Pools, Targets
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets import open_store, read_manifest
from evenrank.preprocess import PreprocessConfig, preprocess
from tests.examples.trainer.test_job import SETTINGS, Trained, log_lines, run_job_on_rank, together
from tests.ranks import RankPool
from trainer import TrainConfig, World, ranking

_DAY, _HELD_OUT, _SALT = 86_400, 0.3, 5
_FILL = hstu.embeddings.fill_rows
RECIPE = tomllib.loads((Path(__file__).parents[3] / "examples" / "recipes" / "mlperf-yambda.toml").read_text())
SMALL: dict[str, Any] = {
    **SETTINGS,
    "min_history": 3,
    "pools_within": 40,
    "max_history_length": 15,
    "target_features": [*RECIPE["target_features"], "is_late=timestamp_ms // 3600000 % 24 >= 12:2"],
    "crosses": [re.sub(r":\d+$", ":50", cross) for cross in RECIPE["crosses"]],
    "evaluate_window": 2,
    "held_out": _HELD_OUT,
    "held_out_salt": _SALT,
    "min_sharded_rows": 10,
    "learning_rate": 0.01,
    "dropout": 0.0,
    "log_every": 1,
}
SHAPE = RECIPE | SMALL


@pytest.fixture(scope="module")
def yambda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a log of five days, of which the last is not in the split `train`."""
    folder, draw = tmp_path_factory.mktemp("raw"), random.Random(3)
    events = []
    for user in draw.sample(range(30), 14):
        for time in sorted(draw.randrange(0, 5 * _DAY, 5) for _ in range(draw.randrange(20, 70))):
            kind = draw.choices(("listen", "like", "dislike"), (18, 1, 1))[0]
            ratio, item = draw.choice((0, 60, 90)) if kind == "listen" else None, int(30 ** draw.random())
            events.append((user, time, item, draw.randrange(2), ratio, ratio, kind))
    names = ["uid", "timestamp", "item_id", "is_organic", "played_ratio_pct", "track_length_seconds", "event_type"]
    for place in ("raw/50m", "shared_metadata"):
        (folder / "yambda" / place).mkdir(parents=True)
    frame = pl.DataFrame(events, schema=names, orient="row")
    frame.write_parquet(folder / "yambda/raw/50m/multi_event.parquet")
    for name, factor, size in (("artist", 1, 11), ("album", 7, 23)):
        items = pl.DataFrame({"item_id": range(30), f"{name}_id": [item * factor % size for item in range(30)]})
        items.write_parquet(folder / f"yambda/shared_metadata/{name}_item_mapping.parquet")
    preprocess(PreprocessConfig(dataset="yambda-50m", raw_dir=folder, out=folder / "data", split="time:last:1d"))
    return folder / "data"


def _run_by_key(rank: int, world_size: int, options: dict[str, Any], crash_at: int = 0) -> Trained:
    """Run a job whose tables have, wherever their rows are, the same initial values of each key."""

    def fill(rows: Tensor, table: EmbeddingConfig, *, first_row: int, seed: int) -> None:
        size = table.num_embeddings
        keys = np.arange(first_row, first_row + len(rows))
        if options["routing"] != "continuous" and table.feature_names != ["action"]:
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

    whole = train("whole", 1, balance="none", routing="continuous")
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
    often: dict[str, Any] = {"checkpoint_every": in_window - 1}
    runs = [
        train("exchanged", 2, balance="all-to-all"),
        train("parts", 2, in_window, balance="none", **often),
        train("parts", 2, balance="no-exchange", **often),
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


def test_settings_become_tables_tokens_and_what_batches_have(yambda: Path) -> None:
    manifest = read_manifest(yambda)
    task = ranking(TrainConfig(**SHAPE), manifest, World(rank=0, size=3, device=torch.device("cpu")))
    hours = ("user_x_hour", "item_x_hour", "artist_x_hour")
    crosses = ("user_x_artist", "user_x_album", *hours, "user_x_is_organic", "user_x_artist_x_hour")
    sharded = {"user_id": manifest.vocabulary_sizes["user_id"], "item_id": 30, "artist_id": 11, "album_id": 23}
    sharded |= dict.fromkeys(crosses, 50)
    names = {f"embeddings.sharded.embeddings.table:{name}.weight": size for name, size in sharded.items()}
    names |= {f"embeddings.replicated.embeddings.table:{name}.weight": n for name, n in (("action", 5), ("is_late", 2))}
    weights = {name: len(table) for name, table in task.model.state_dict().items() if name.startswith("embeddings.")}
    assert weights == names
    shape: Any = task.dense.config
    assert shape.contextual == ("user_id", "is_late", *crosses)
    assert shape.max_length == 9 + 2 * 15 + 1
    hour, order = "timestamp_ms // 3600000 % 24", Targets(where=SHAPE["targets"])
    read = task.read(batch_size=2, order=order)
    assert read.crosses.keys() == {*crosses}
    assert read.crosses["user_x_artist_x_hour"] == Cross(of=("user_id", "artist_id", "hour"), size=50)
    assert read.key_maps == {
        name: KeyMap(num_embeddings=size, world_size=3, mode="hash_roundrobin") for name, size in sharded.items()
    }
    assert dataclasses.replace(read, crosses={}, key_maps={}) == LoaderConfig(
        batch_size=2,
        order=order,
        user_id=True,
        max_num_candidates=1,
        num_tasks=1,
        label="listen_plus",
        pools=Pools(values=(1, 2, 4), within=40),
        item_features=("artist_id", "album_id"),
        target_features={"hour": hour, "is_late": f"{hour} >= 12"},
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
