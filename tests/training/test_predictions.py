"""PredictionWriter: each sample once on any ranks, with the ids of the log; what is not complete is not there."""

import contextlib
import json
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from evenrank.core.errors import DataError, one_line
from evenrank.dataloader import LoaderConfig, Mixture, TimeWindows, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets import open_store
from evenrank.training import PredictionWriter, predictions
from tests.dataloader.balance.costs import COST
from tests.ranks import RankPool

MAPS = {"item_id": KeyMap(num_embeddings=901, world_size=2, mode="hash_roundrobin")}
MAPS["user_id"] = KeyMap(num_embeddings=333, world_size=2, mode="roundrobin")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset whose users and items are numbered; many users have no events."""
    pytest.importorskip("polars", reason="data is made with Polars, which hosts that only train lack")
    from evenrank.datasets.distributions import Lognormal
    from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess

    synthetic = SyntheticConfig(num_users=90, lengths=Lognormal(mean=4, std=3, low=0, high=20))
    out = tmp_path_factory.mktemp("dense") / "data"
    preprocess(PreprocessConfig(dataset="synthetic", out=out, ids="user=dense,item=dense", synthetic=synthetic))
    return out


class Job(NamedTuple):
    data: Path
    out: Path
    k: int | None = None
    fault: str = ""
    options: dict[str, Any] | None = None
    is_balanced: bool = False
    overwrite: bool = False


def _items(ids: Any, k: int) -> Any:
    return 1 + (7 * ids[:, None] + torch.arange(k)) % 30


def evaluate(rank: int, world_size: int, job: Job) -> str:
    """Write predictions; return the line of the error. What goes wrong, goes wrong on the last rank."""
    is_faulty, k = rank == world_size - 1, job.k or 1
    config = LoaderConfig(batch_size=7, max_num_candidates=1, **(job.options or {}))
    loader: Any = build_loader(job.data, config, rank=rank, world_size=world_size)
    batches: Any = Balancer(loader, BalanceConfig(cost=COST)) if job.is_balanced else loader
    try:
        with PredictionWriter(job.out, loader, overwrite=job.overwrite) as writer:
            for batch in batches:
                items, scores = _items(batch.sample_ids, k), batch.sample_ids[:, None] + torch.arange(k) / 8
                if "item_id" in config.key_maps:
                    items = MAPS["item_id"](items)
                if job.k is None or (job.fault == "shape" and is_faulty):
                    items, scores = items[:, 0], scores[:, 0]
                if job.fault == "item" and is_faulty:
                    items = items + 10**6
                if job.fault == "disk" and is_faulty:
                    with mock.patch.object(pq, "ParquetWriter", side_effect=OSError(28, "No space left on device")):
                        writer.write(batch, items, scores)
                        writer._try(writer._flush)
                for _ in range({"missing": 0, "twice": 2}.get(job.fault, 1) if is_faulty else 1):
                    n = batch.num_real if job.k == 2 else batch.batch_size  # with padding, or without
                    writer.write(batch, items[:n], scores[:n].double())
                if job.fault == "body":
                    raise KeyError("a mistake in the loop")
    except Exception as error:
        return one_line(error)
    return ""


def check(job: Job, world_size: int) -> None:
    store = open_store(job.data)
    rows = np.flatnonzero(store.lengths > 0)
    files = json.loads((job.out / "_predictions.json").read_text())
    found = pq.read_table(job.out).sort_by("sample_id").to_pydict()
    names = [f"part-{rank:05}.parquet" for rank in range(world_size)]
    assert files["samples"] == sum(files["files"].values()) == len(rows)
    assert {*files["files"]} <= {*names}
    assert {path.name for path in job.out.iterdir()} == {*files["files"], "_predictions.json"}
    users, items = (
        pq.read_table(job.data / f"vocabulary_{name}_id.parquet")["value"].to_pylist() for name in ("user", "item")
    )
    ids = torch.from_numpy(rows)
    expected: dict[str, Any] = {"item_id": _items(ids, job.k or 1).tolist()}
    expected["item_id"] = [[items[item - 1] for item in row] for row in expected["item_id"]]
    expected["score"] = (ids[:, None] + torch.arange(job.k or 1) / 8).tolist()
    if job.k is None:
        expected = {name: [value for (value,) in of_rows] for name, of_rows in expected.items()}
    expected |= {"sample_id": rows.tolist(), "user_id": [users[user - 1] for user in store.columns["user_id"][rows]]}
    assert found == expected
    assert not [*job.out.parent.glob(f".{job.out.name}.*")]


JOBS: dict[str, dict[str, Any]] = {
    "one": {},
    "three": {"k": 3, "options": {"num_workers": 1}},
    "mapped": {"k": 2, "options": {"key_maps": MAPS, "user_id": True}},
    "balanced": {"is_balanced": True, "options": {"order": "rows"}},
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", JOBS)
def test_each_sample_is_there_once_with_the_ids_of_the_log(
    ranks: RankPool, dense: Path, tmp_path: Path, name: str, world_size: int
) -> None:
    job = Job(dense, tmp_path / "out", **JOBS[name])
    assert ranks.run(world_size, evaluate, job) == [""] * world_size
    check(job, world_size)


COUNTS = (
    "<partial> has ... predictions of ... samples, the epoch has ... samples; write each batch of a whole iteration..."
)
FAULTS = {
    "missing": COUNTS,
    "twice": COUNTS,
    "shape": "ranks have written other columns to <partial>; pass items and scores of one shape",
    "item": "rank 2 failed: predictions have item_id 10000... to 10000..., the dataset 0 to ...; pass ids as in b...",
    "disk": "rank 2 failed: predictions cannot be written to <partial> ([Errno 28] No space left on device); ch...",
}


def test_a_fault_is_one_line_on_all_ranks_and_leaves_nothing_that_is_complete(
    ranks: RankPool, dense: Path, tmp_path: Path
) -> None:
    job = Job(dense, tmp_path / "out", k=3)
    others = [tmp_path / "out.old" / "kept", tmp_path / "out.partial" / "kept"]  # which are not the writer's
    for other in others:
        other.mkdir(parents=True)
    for fault, line in FAULTS.items():
        lines = ranks.run(3, evaluate, job._replace(fault=fault))
        assert len({*lines}) == 1
        expected = line.replace("<partial>", str(tmp_path / ".out.partial")).split("...")
        assert all(part in lines[0] for part in expected), lines[0]
        assert not job.out.exists()
    assert ranks.run(2, evaluate, job._replace(fault="body")) == ["KeyError: 'a mistake in the loop'"] * 2
    assert {path.name for path in tmp_path.iterdir()} == {".out.partial", "out.old", "out.partial"}
    # Begun again, on fewer ranks, and not a second time.
    assert ranks.run(2, evaluate, job) == ["", ""]
    check(job, 2)
    refused = ranks.run(2, evaluate, job)
    assert refused[0] == f"{job.out} has predictions; pass overwrite=True, or choose another folder"
    check(job, 2)
    assert all(ranks.run(3, evaluate, job._replace(overwrite=True, fault="missing")))
    (tmp_path / ".out.partial").rename(tmp_path / "another")
    check(job, 2)
    assert ranks.run(1, evaluate, job._replace(overwrite=True, k=None)) == [""]
    check(job._replace(k=None), 1)
    assert all(other.is_dir() for other in others)


def _cannot_open(rank: int, world_size: int, data: Path, out: Path) -> str:
    """Return the line of the error of a writer, where the last rank cannot read the dataset anymore."""
    loader: Any = build_loader(data, LoaderConfig(batch_size=7), rank=rank, world_size=world_size)
    fault = mock.patch.object(type(loader), "stores", mock.PropertyMock(side_effect=DataError("gone")))
    try:
        with fault if rank == world_size - 1 else contextlib.nullcontext():
            PredictionWriter(out, loader)
    except Exception as error:
        return one_line(error)
    return ""


def test_a_dataset_that_one_rank_cannot_read_is_an_error_of_all(ranks: RankPool, dense: Path, tmp_path: Path) -> None:
    lines = ranks.run(2, _cannot_open, dense, tmp_path / "out")
    assert lines == ["rank 1 failed: gone", "gone"]


def test_ids_without_a_vocabulary_are_those_of_batches(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if each batch is written by itself, as those of many large scores."""
    monkeypatch.setattr(predictions, "_BYTES_AT_ONCE", 50 * 24)
    config = LoaderConfig(batch_size=50, max_num_candidates=1, order=TimeWindows(every="1w"))
    loader = build_loader(small_dataset, config, rank=0, world_size=1)
    for name in ("first window", "second window"):
        with PredictionWriter(tmp_path / name, loader) as writer:
            (store,) = loader.stores
            for batch in loader:
                writer.write(batch, batch.sample_ids, batch.sample_ids)
        assert pq.read_metadata(tmp_path / name / "part-00000.parquet").num_row_groups == -(-len(store) // 50)
        found = pq.read_table(tmp_path / name)
        assert len(found) == len(store)
        assert found["item_id"].to_pylist() == found["sample_id"].to_pylist()
        rows = store.rows_of(found["sample_id"].to_numpy())
        assert found["user_id"].to_pylist() == store.columns["user_id"][rows].tolist()


def test_users_and_items_of_several_datasets_are_those_of_the_larger_vocabularies(tmp_path: Path) -> None:
    """Of the second day, users are new, items are not."""
    pytest.importorskip("polars", reason="data is made with Polars, which hosts that only train lack")
    from tests.preprocess.decoded import number

    days = [tmp_path / "day1", tmp_path / "day2"]
    for day, first in zip(days, (10, 20), strict=True):
        log = day.with_suffix(".csv")
        events = (f"{first + n},{n % 3},{1_700_000_000 + n}\n" for n in range(9))
        log.write_text("user,item,time\n" + "".join(events))
        number(day, log, **({"ids": "user=dense,item=dense"} if first == 10 else {"vocabulary": days[0]}))
    mixture = Mixture(weights=dict.fromkeys(days, 1))
    loader = build_loader(mixture, LoaderConfig(batch_size=4), rank=0, world_size=1)
    with PredictionWriter(tmp_path / "out", loader) as writer:
        for batch in loader:
            writer.write(batch, batch.sample_ids % 3 + 1, batch.sample_ids)
    found = pq.read_table(tmp_path / "out")["user_id"].to_pylist()
    assert sorted(found) == [*range(10, 19), *range(20, 29)]
