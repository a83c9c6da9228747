import itertools
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from evenrank.core.errors import ConfigError, StateError
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
from evenrank.dataloader.balance import BalanceConfig, Balancer, StepMetrics
from evenrank.datasets import open_store
from tests.ranks import RankPool

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = {"item_id": np.random.default_rng(0).zipf(1.6, 101).clip(1, 60)}
LOSS_KEY = LossKey("features", "item_id")
COLLATE = JaggedCollate({"item_id": jagged(), "index": dense(dtype=torch.int64, fill=-1, shape=())}, loss_key=LOSS_KEY)


def cost(lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]) -> NDArray[np.int64]:
    return lengths["item_id"] * (lengths["item_id"] + 10)


# None: not balanced.
BALANCES: dict[str, BalanceConfig | None] = {
    "none": None,
    "steps": BalanceConfig(cost=cost),
    "windows": BalanceConfig(cost=cost, window=3),
    "packed": BalanceConfig(cost=cost, pack=True, max_tokens_per_rank=80),
}


class Histories(Dataset[dict[str, Any]]):
    def __init__(self, lengths: NDArray[np.integer] = LENGTHS["item_id"]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"item_id": np.arange(self._lengths[index]), "index": index}


def make_loader(
    rank: int, world_size: int, balance: str = "none", *, num_workers: int = 0, batch_size: int = 4, **options: Any
) -> ElasticLoader[Any]:
    if (config := BALANCES[balance]) is not None:
        options |= {"lengths": LENGTHS, "balance": config, "loss_key": LOSS_KEY}
    sampler = ElasticSampler(len(Histories()), batch_size=batch_size, rank=rank, world_size=world_size, **options)
    return ElasticLoader(DataLoader(Histories(), batch_sampler=sampler, collate_fn=COLLATE, num_workers=num_workers))


def indices_of(batches: Sequence[Any]) -> list[int]:
    return [index for batch in batches for index in batch.index[: batch.num_real].tolist()]


@pytest.mark.processes
@pytest.mark.parametrize("balance", ["none", "steps", "windows", "packed"])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_workers_that_read_ahead_change_nothing(balance: str, kind: Any) -> None:
    def loader(num_workers: int) -> ElasticLoader[Any]:
        sampler: Any = make_loader(1, 2, balance)._sampler
        return ElasticLoader(kind(Histories(), batch_sampler=sampler, collate_fn=COLLATE, num_workers=num_workers))

    expected = list(loader(0))
    assert len(expected) > 8
    stopped = loader(2)
    before = list(itertools.islice(stopped, 5))
    resumed = loader(1)
    resumed.load_state_dict(stopped.state_dict())
    earlier = loader(1)
    earlier.load_state_dict(stopped.state_dict(after=before[2]))
    for found, wanted in ((before, expected[:5]), (list(resumed), expected[5:]), (list(earlier), expected[3:])):
        assert [batch.index.tolist() for batch in found] == [batch.index.tolist() for batch in wanted]
        assert [batch.position for batch in found] == [batch.position for batch in wanted]


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_data_loader_saves_the_sampler_with_its_own_state(num_workers: int) -> None:
    def loader() -> StatefulDataLoader[Any]:
        sampler = ElasticSampler(len(Histories()), batch_size=4, rank=0, world_size=2)
        return StatefulDataLoader(Histories(), batch_sampler=sampler, collate_fn=COLLATE, num_workers=num_workers)

    expected = indices_of(list(loader()))
    stopped = loader()
    before = indices_of(list(itertools.islice(stopped, 5)))
    resumed = loader()
    resumed.load_state_dict(stopped.state_dict())
    assert before + indices_of(list(resumed)) == expected


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_a_stateful_data_loader_goes_on_after_any_step(num_workers: int, every: int) -> None:
    """Exactly there, as with any sampler: nothing is left of an epoch of which it has not seen the end."""

    def loader(**workers: int) -> StatefulDataLoader[Any]:
        sampler = ElasticSampler(len(Histories()), batch_size=24, rank=0, world_size=1)
        return StatefulDataLoader(Histories(), batch_sampler=sampler, collate_fn=COLLATE, **workers)

    def take(iterator: Any, count: int | None = None) -> list[list[int]]:
        return [indices_of([batch]) for batch in itertools.islice(iterator, count)]

    whole = loader()
    epochs = [take(whole) for _ in range(4)]
    for epoch, step in [(0, 0), (0, 3), (0, 4), (0, 5), (1, 0), (1, 2), (1, 5)]:
        stopped, resumed = (loader(num_workers=num_workers, snapshot_every_n_steps=every) for _ in range(2))
        assert [take(stopped) for _ in range(epoch)] == epochs[:epoch]
        iterator = iter(stopped)
        assert take(iterator, step) == epochs[epoch][:step]
        resumed.load_state_dict(stopped.state_dict())
        assert [take(resumed) for _ in range(2)] == [epochs[epoch][step:], epochs[epoch + 1]]
    list(iterator)
    resumed.load_state_dict(stopped.state_dict())  # which has seen the end
    assert [take(resumed) for _ in range(2)] == epochs[2:4]


def test_epochs_differ_and_go_on_after_the_last_step() -> None:
    loader = make_loader(0, 2)
    first, second = indices_of(list(loader)), indices_of(list(loader))
    assert first != second
    assert loader.epoch == 2
    resumed = make_loader(0, 2)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.epoch == 2
    resumed._sampler.set_epoch(1)
    assert indices_of(list(resumed)) == second
    assert indices_of(list(make_loader(0, 2, shuffle=False)))[:8] == [0, 1, 2, 3, 8, 9, 10, 11]


def test_two_iterators_at_once_have_an_epoch_each() -> None:
    loader = make_loader(0, 2)
    expected = [indices_of(list(make_loader(0, 2))), indices_of([*loader, *loader])]
    loader = make_loader(0, 2)
    pairs = list(zip(loader, loader, strict=True))
    assert [indices_of(batches) for batches in zip(*pairs, strict=True)] == [
        expected[0],
        expected[1][len(expected[0]) :],
    ]


@pytest.mark.processes
def test_an_iterator_that_workers_serve_another_epoch_says_why() -> None:
    sampler: Any = make_loader(0, 2)._sampler
    persistent: Any = {"collate_fn": COLLATE, "num_workers": 1, "persistent_workers": True}
    loader: ElasticLoader[Any] = ElasticLoader(DataLoader(Histories(), batch_sampler=sampler, **persistent))
    first, second = iter(loader), iter(loader)
    next(first)
    assert next(second).epoch == 1
    with pytest.raises(ConfigError, match="or of two at once over persistent workers; iterate over the ElasticLoader"):
        list(first)


def test_a_loader_begins_after_the_state_of_another_dataset() -> None:
    state = make_loader(0, 2).state_dict()
    longer: ElasticLoader[Any] = ElasticLoader(
        DataLoader(range(999), batch_sampler=ElasticSampler(999, batch_size=4, rank=0, world_size=2))  # type: ignore[arg-type]
    )
    with pytest.raises(StateError, match="or train on other data after it with begin_after"):
        longer.load_state_dict(state)
    longer.begin_after(state)
    assert longer.epoch == longer.state_dict()["epoch"] == 1


def test_the_epoch_of_a_loaded_state_can_be_set_again() -> None:
    loader = make_loader(0, 2)
    before = indices_of(list(itertools.islice(loader, 3)))
    resumed = make_loader(0, 2)
    resumed.load_state_dict(loader.state_dict())
    resumed._sampler.set_epoch(0)  # as trainers do before each epoch
    assert before + indices_of(list(resumed)) == indices_of(list(make_loader(0, 2)))


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"pack": True, "max_tokens_per_rank": 600}])
def test_batches_are_those_of_build_loader(small_dataset: Path, options: dict[str, Any]) -> None:
    store = open_store(small_dataset, "train")
    config = LoaderConfig(batch_size=4, max_history_length=50)
    balance = BalanceConfig(cost=cost, **options)
    lengths = np.minimum(np.diff(store.offsets), 50)
    for rank in range(3):
        loader = build_loader(small_dataset, config, rank=rank, world_size=3, balance=balance)
        sampler = ElasticSampler(
            len(store), batch_size=4, rank=rank, world_size=3, lengths={"item_id": lengths}, balance=balance
        )
        expected = [batch.sample_ids[: batch.num_real].tolist() for batch in loader]
        assert len(expected) > 5
        assert list(sampler) == expected


def test_balanced_batches_have_the_loss_tokens_of_all_ranks() -> None:
    metrics: list[StepMetrics] = []
    BALANCES["measured"] = BalanceConfig(cost=cost, on_step=metrics.append)
    loaders = [make_loader(rank, 3, "measured") for rank in range(3)]
    steps = list(zip(*loaders, strict=True))
    for step, batches in enumerate(steps):
        total = int(sum(LENGTHS["item_id"][batch.index].sum() for batch in batches))
        assert [batch.world_loss_tokens for batch in batches] == [total] * 3
        assert sum(batch.loss_tokens for batch in batches) == total
        assert [(batch.step, batch.dp_size) for batch in batches] == [(step, 3)] * 3
        assert len({batch.plan_hash for batch in batches}) == 1
    assert len(metrics) == 3 * len(steps)
    assert np.mean([one.after.max() for one in metrics]) < 0.95 * np.mean([one.before.max() for one in metrics])


def _resume_behind_a_balancer(rank: int, world_size: int, state: Any, stop: int | None) -> Any:
    sampler = ElasticSampler(len(Histories()), batch_size=12 // world_size, rank=rank, world_size=world_size)
    loader = DataLoader(Histories(), batch_sampler=sampler, collate_fn=COLLATE, num_workers=1)
    with Balancer(loader, BalanceConfig(cost=cost, lookahead=2)) as balancer:
        if state is not None:
            balancer.load_state_dict(state)
        batches = list(itertools.islice(balancer, stop))
        return indices_of([batch.slice(0, batch.num_real) for batch in batches]), balancer.state_dict(), len(batches)


def test_a_balancer_over_it_resumes_on_another_number_of_ranks(ranks: RankPool) -> None:
    first = ranks.run(2, _resume_behind_a_balancer, None, 4)
    second = ranks.run(3, _resume_behind_a_balancer, first[1][1], None)
    assert [of_rank[2] for of_rank in second] == [5] * 3
    assert sorted(index for of_rank in first + second for index in of_rank[0]) == list(range(len(Histories())))


def _make_with_lengths(rank: int, world_size: int, lengths: list[Any]) -> list[list[int]]:
    return list(
        ElasticSampler(
            8, batch_size=2, rank=rank, world_size=world_size, lengths=lengths[rank], balance=BALANCES["steps"]
        )
    )


def test_ranks_with_other_lengths_are_found_before_the_first_step(ranks: RankPool) -> None:
    lengths = [{"item_id": np.arange(8)}, {"item_id": np.arange(8)[::-1]}]
    sampled = ranks.run(2, _make_with_lengths, [lengths[0]] * 2)
    assert sorted(index for of_rank in sampled for step in of_rank for index in step) == list(range(8))
    for failure in ranks.try_run(2, _make_with_lengths, lengths):
        assert failure.type_name == "RankError"
        assert failure.message.startswith("costs and plan of the first step differs between ranks")
    for failure in ranks.try_run(2, _make_with_lengths, [lengths[0], {"item_id": np.arange(7)}]):
        assert failure.message.endswith("lengths['item_id'] must be integers of shape (8,), got int64 of shape (7,)")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2}, "rank must be between 0 and world_size - 1, got rank 2 of 2"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"seed": 1 << 63}, r"seed must be at least -2\^63 and below 2\^63, got 9223372036"),
        ({"lengths": LENGTHS}, "lengths and balance belong together"),
        ({"balance": BALANCES["steps"]}, "lengths and balance belong together"),
        ({"balance": BALANCES["steps"], "lengths": {"item_id": -LENGTHS["item_id"]}}, "must not be negative, got -"),
        ({"balance": BALANCES["steps"], "lengths": LENGTHS, "loss_key": LossKey("labels", "label")}, "has no LossKey"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ElasticSampler(101, **{"batch_size": 4, "rank": 0, "world_size": 2, **options})


def test_a_loader_that_does_not_fit_its_sampler_is_refused() -> None:
    sampler = ElasticSampler(9, batch_size=4, rank=0, world_size=2)
    with pytest.raises(ConfigError, match="the dataset has 101 samples, its ElasticSampler 9"):
        ElasticLoader(DataLoader(Histories(), batch_sampler=sampler))
    with pytest.raises(ConfigError, match="the loader has a BatchSampler; pass DataLoader"):
        ElasticLoader(DataLoader(Histories()))


def test_batches_that_do_not_fit_the_plan_are_refused() -> None:
    sampler: Any = make_loader(0, 2, "steps")._sampler
    no_loss_key = JaggedCollate({"item_id": jagged(), "index": dense(dtype=torch.int64)})
    with pytest.raises(ConfigError, match="the batch has loss_key None, its ElasticSampler LossKey"):
        next(iter(ElasticLoader(DataLoader(Histories(), batch_sampler=sampler, collate_fn=no_loss_key))))

    def drop_one(samples: Sequence[Mapping[str, Any]]) -> Any:
        return COLLATE(samples[1:])

    with pytest.raises(ConfigError, match="collate_fn made 3 rows of 4 samples"):
        next(iter(ElasticLoader(DataLoader(Histories(), batch_sampler=sampler, collate_fn=drop_one))))


def _train_with_lengths(rank: int, world_size: int, key: str, wrong: int | None) -> int:
    lengths = {"item_id": LENGTHS["item_id"].copy(), "num_candidates": np.ones(101, dtype=np.int64)}
    if wrong is not None:
        lengths[key][wrong] += 1
    sampler = ElasticSampler(
        101, batch_size=4, rank=rank, world_size=world_size, lengths=lengths, balance=BALANCES["steps"]
    )
    collate = JaggedCollate({"item_id": jagged(), "num_candidates": dense(dtype=torch.int64, shape=())})

    def with_candidates(samples: Sequence[dict[str, Any]]) -> Any:
        return collate([{**sample, "num_candidates": 1} for sample in samples])

    loader: ElasticLoader[Any] = ElasticLoader(
        DataLoader(Histories(), batch_sampler=sampler, collate_fn=with_candidates)
    )
    return sum(batch.num_real for batch in loader)


@pytest.mark.parametrize("key", ["item_id", "num_candidates"])
def test_a_length_that_is_not_that_of_its_sample_is_an_error_of_all_ranks(ranks: RankPool, key: str) -> None:
    """One rank reads the sample; the other one would wait for it at the end of the epoch, for 30 minutes."""
    assert sum(ranks.run(2, _train_with_lengths, key, None)) == 101
    failures = ranks.try_run(2, _train_with_lengths, key, 77)
    errors = {failure.type_name: failure.message for failure in failures}
    length = LENGTHS["item_id"][77] if key == "item_id" else 1
    found = f"sample 77 has {length} for '{key}' in its batch, but lengths['{key}'] says {length + 1}; pass the lengths"
    assert errors["ConfigError"].startswith(found)
    assert errors["RankError"].endswith(f" failed: {errors['ConfigError']}")


def test_other_batches_are_passed_on_as_they_are() -> None:
    sampler = ElasticSampler(101, batch_size=4, rank=0, world_size=1)
    loader: ElasticLoader[list[int]] = ElasticLoader(
        DataLoader(Histories(), batch_sampler=sampler, collate_fn=lambda samples: [one["index"] for one in samples])
    )
    before = list(itertools.islice(loader, 7))
    state = loader.state_dict()
    resumed: ElasticLoader[list[int]] = ElasticLoader(
        DataLoader(
            Histories(),
            batch_sampler=ElasticSampler(101, batch_size=4, rank=0, world_size=1),
            collate_fn=lambda samples: [one["index"] for one in samples],
        )
    )
    resumed.load_state_dict(state)
    assert sorted(itertools.chain(*before, *resumed)) == list(range(101))


def test_a_state_of_another_dataset_is_refused() -> None:
    state = make_loader(0, 1).state_dict()
    other = ElasticSampler(102, batch_size=4, rank=0, world_size=1)
    with pytest.raises(StateError, match="it has 101 samples"):
        other.load_state_dict(state)


QUIET = """
import sys
sys.path.append(sys.argv[1])
from tests.dataloader.test_elastic_sampler import make_loader
if __name__ == "__main__":
    print(sum(len(batch.features["item_id"].lengths()) for batch in make_loader(0, 2, num_workers=1)))
"""


def test_batches_of_workers_give_no_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-c", QUIET, str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert (done.stdout, done.stderr) == ("52\n", "")
