"""Samplers with the loaders of PyTorch and torchdata, and their workers; for samples and states, see the laws."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from evenrank.core.errors import ConfigError
from evenrank.dataloader import (
    ElasticLoader,
    ElasticSampler,
    JaggedCollate,
    LoaderConfig,
    LossKey,
    build_loader,
    dense,
    jagged,
)
from evenrank.dataloader.balance import BalanceConfig
from evenrank.datasets import open_store
from tests.ranks import RankPool

LENGTHS = {
    "item_id": np.random.default_rng(0).zipf(1.6, 101).clip(1, 60),
    "num_candidates": np.ones(101, dtype=np.int64),
}
ROWS = dense(dtype=torch.int64, shape=())
LOSS_KEY = LossKey("features", "item_id")
COLLATE = JaggedCollate({"item_id": jagged(), "index": ROWS, "num_candidates": ROWS}, loss_key=LOSS_KEY)


def cost(lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]) -> NDArray[np.int64]:
    return lengths["item_id"] * (lengths["item_id"] + 10)


STEPS = BalanceConfig(cost=cost)
WINDOW = BalanceConfig(cost=cost, window=3)
PACKED = BalanceConfig(cost=cost, pack=True, max_tokens_per_rank=80)


class Histories(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 101

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"item_id": np.arange(LENGTHS["item_id"][index]), "index": index, "num_candidates": 1}


def _sampler(
    rank: int = 0, world_size: int = 2, balance: BalanceConfig | None = None, **options: Any
) -> ElasticSampler:
    balanced: Any = {} if balance is None else {"lengths": LENGTHS, "balance": balance, "loss_key": LOSS_KEY}
    return ElasticSampler(101, **{"batch_size": 4, "rank": rank, "world_size": world_size, **balanced, **options})


def _loader(*shape: Any, kind: Any = DataLoader, collate: Any = COLLATE, workers: Any = None, **options: Any) -> Any:
    sampler = _sampler(*shape, **options)
    return ElasticLoader(kind(Histories(), batch_sampler=sampler, collate_fn=collate, **(workers or {})))


def _seen(batches: Any) -> list[tuple[int, list[int]]]:
    return [(batch.position, batch.index[: batch.num_real].tolist()) for batch in batches]


@pytest.mark.processes
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_workers_that_read_ahead_change_nothing(kind: Any) -> None:
    for balance in (None, STEPS, WINDOW, PACKED):
        whole, stopped, resumed, earlier = (
            _loader(1, 2, balance, kind=kind, workers={"num_workers": workers}) for workers in (0, 2, 1, 1)
        )
        expected = _seen(whole)
        assert len(expected) > 8
        before = list(itertools.islice(stopped, 5))
        resumed.load_state_dict(stopped.state_dict())
        earlier.load_state_dict(stopped.state_dict(after=before[2]))
        assert [_seen(batches) for batches in (before, resumed, earlier)] == [expected[:5], expected[5:], expected[3:]]


@pytest.mark.processes
@pytest.mark.parametrize(("num_workers", "every"), [(0, 1), (2, 3)])
def test_a_stateful_data_loader_goes_on_after_any_step(num_workers: int, every: int) -> None:
    """Exactly there, as with any sampler: nothing is left of an epoch of which it has not seen the end."""

    def loader(**workers: int) -> StatefulDataLoader[Any]:
        sampler = _sampler(0, 1, batch_size=24)
        return StatefulDataLoader(Histories(), batch_sampler=sampler, collate_fn=COLLATE, **workers)

    whole = loader()
    epochs = [_seen(whole) for _ in range(4)]
    for epoch, step in [(0, 0), (0, 3), (0, 5), (1, 0), (1, 2), (1, 5)]:
        stopped, resumed = (loader(num_workers=num_workers, snapshot_every_n_steps=every) for _ in range(2))
        assert [_seen(stopped) for _ in range(epoch)] == epochs[:epoch]
        iterator = iter(stopped)
        assert _seen(itertools.islice(iterator, step)) == epochs[epoch][:step]
        resumed.load_state_dict(stopped.state_dict())
        assert [_seen(resumed) for _ in range(2)] == [epochs[epoch][step:], epochs[epoch + 1]]
    list(iterator)
    resumed.load_state_dict(stopped.state_dict())  # which has seen the end
    assert [_seen(resumed) for _ in range(2)] == epochs[2:4]


@pytest.mark.processes
def test_two_iterators_at_once_have_an_epoch_each_or_say_why_not() -> None:
    loader, pairs = _loader(), _loader()
    expected = [_seen(loader) for _ in range(2)]
    assert expected[0] != expected[1]
    assert [_seen(batches) for batches in zip(*zip(pairs, pairs, strict=True), strict=True)] == expected
    loader._sampler.set_epoch(1)
    assert _seen(loader) == expected[1]
    assert _seen(_loader(shuffle=False))[:2] == [(8, [0, 1, 2, 3]), (16, [8, 9, 10, 11])]
    persistent = _loader(workers={"num_workers": 1, "persistent_workers": True})
    first, second = iter(persistent), iter(persistent)
    next(first)
    assert next(second).epoch == 1
    with pytest.raises(ConfigError, match="or of two at once over persistent workers; iterate over the ElasticLoader"):
        list(first)


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"pack": True, "max_tokens_per_rank": 600}])
def test_batches_are_those_of_build_loader(small_dataset: Path, options: dict[str, Any]) -> None:
    store, balance = open_store(small_dataset, "train"), BalanceConfig(cost=cost, **options)
    config, lengths = LoaderConfig(batch_size=4, max_history_length=50), {"item_id": np.minimum(store.lengths, 50)}
    for rank in range(3):
        loader = build_loader(small_dataset, config, rank=rank, world_size=3, balance=balance)
        expected = [batch.sample_ids[: batch.num_real].tolist() for batch in loader]
        assert len(expected) > 5
        of_rank: Any = {"batch_size": 4, "rank": rank, "world_size": 3}
        assert list(ElasticSampler(len(store), **of_rank, lengths=lengths, balance=balance)) == expected


def _train(rank: int, world_size: int, *of_ranks: Any) -> int:
    """Train with the lengths that each rank has."""
    loader = _loader(rank, world_size, STEPS, lengths=of_ranks[rank % len(of_ranks)])
    return sum(batch.num_real for batch in loader)


def test_lengths_that_differ_between_ranks_or_from_the_samples_are_an_error_of_all_ranks(ranks: RankPool) -> None:
    """One rank reads the sample; the other one would wait for it at the end of the epoch, for 30 minutes."""
    assert sum(ranks.run(2, _train, LENGTHS)) == 101
    for failure in ranks.try_run(2, _train, LENGTHS, {**LENGTHS, "item_id": LENGTHS["item_id"][::-1]}):
        assert failure.type_name == "RankError"
        assert failure.message.startswith("costs and plan of the first step differs between ranks")
    for failure in ranks.try_run(2, _train, LENGTHS, {"item_id": np.arange(7)}):
        assert failure.message.endswith("lengths['item_id'] must be integers of shape (101,), got int64 of shape (7,)")
    for key, length in (("item_id", LENGTHS["item_id"][77]), ("num_candidates", 1)):
        wrong = {**LENGTHS, key: LENGTHS[key] + (np.arange(101) == 77)}
        errors = {failure.type_name: failure.message for failure in ranks.try_run(2, _train, wrong)}
        found = f"sample 77 has {length} for '{key}' in its batch, but lengths['{key}'] says {length + 1}; pass the len"
        assert errors["ConfigError"].startswith(found)
        assert errors["RankError"].endswith(f" failed: {errors['ConfigError']}")


def test_other_batches_are_passed_on_as_they_are() -> None:
    def collate(samples: Sequence[dict[str, Any]]) -> list[int]:
        return [sample["index"] for sample in samples]

    loader, resumed = (_loader(0, 1, collate=collate) for _ in range(2))
    before = list(itertools.islice(loader, 7))
    resumed.load_state_dict(loader.state_dict())
    assert sorted(itertools.chain(*before, *resumed)) == list(range(101))
