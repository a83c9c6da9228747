"""Balancers over anyone's loaders."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler
from torchdata.nodes import Batcher, Mapper, MapStyleWrapper, Prefetcher
from torchdata.nodes import Loader as NodeLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from evenrank.core.errors import ConfigError, RankError, StateError
from evenrank.dataloader import (
    JaggedCollate,
    PaddedBatches,
    dense,
    jagged,
)
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.balance.source import _FORMAT_OF_RANK
from evenrank.dataloader.state.checks import encode
from evenrank.dataloader.state.resume_point import Position
from tests.dataloader.balance.costs import Ints, Lengths
from tests.ranks import RankFailure, RankPool

COLLATE = JaggedCollate({"item_id": jagged(), "id": dense(dtype=torch.int64, shape=())})
NUM_SAMPLES = 43


def _tokens(lengths: Lengths, num_candidates: Ints) -> Ints:
    return lengths["item_id"]


def _sample(index: int) -> dict[str, Any]:
    return {"item_id": [index] * (index * 7 % 11), "id": index}


class MapStyle(Dataset[dict[str, Any]]):
    """The samples of one rank: those of every `world_size`-th index."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.indices = range(rank, NUM_SAMPLES, world_size)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _sample(self.indices[index])


class IterableStyle(IterableDataset[dict[str, Any]]):
    """The same, as a stream that one worker reads."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.samples = MapStyle(rank, world_size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.samples[index] for index in range(len(self.samples)))


def _data_loader(dataset: Any, num_workers: int = 0, **options: Any) -> Any:
    # Ranks are started by a fork server; workers that were too would import everything again.
    context = "fork" if num_workers else None
    options |= {"num_workers": num_workers, "multiprocessing_context": context}
    return DataLoader(dataset, batch_size=5, collate_fn=COLLATE, **options)


def _stateful(dataset: Any, num_workers: int = 0) -> Any:
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
    return StatefulDataLoader(dataset, batch_size=5, collate_fn=COLLATE, num_workers=num_workers, **options)


def _generator(rank: int, world_size: int) -> Any:
    class Epochs:
        def __iter__(self) -> Iterator[Any]:
            yield from _data_loader(MapStyle(rank, world_size))

    return Epochs()


LOADERS: dict[str, Callable[[int, int], Any]] = {
    "map-style": lambda rank, n: _data_loader(MapStyle(rank, n), shuffle=True),
    "map-style, workers": lambda rank, n: _data_loader(MapStyle(rank, n), num_workers=2),
    "map-style, persistent workers": lambda rank, n: _data_loader(
        MapStyle(rank, n), num_workers=1, persistent_workers=True
    ),
    "iterable, worker": lambda rank, n: _data_loader(IterableStyle(rank, n), num_workers=1),
    "stateful, worker": lambda rank, n: _stateful(MapStyle(rank, n), num_workers=1),
    "padded batches": lambda rank, n: PaddedBatches(MapStyle(rank, n).indices, batch_size=5, collate=_collate_indices),
    "list": lambda rank, n: list(_data_loader(MapStyle(rank, n))),
    "iterable of one's own": _generator,
}
WITH_LENGTH = {name for name in LOADERS if not name.startswith("iterable")}


def _collate_indices(indices: Any) -> Any:
    return COLLATE([_sample(index) for index in indices])


def _ids(batch: Any) -> list[int]:
    ids = batch.id[: batch.num_real].tolist()
    rows = [row.tolist() for row in batch.features["item_id"].to_dense()[: batch.num_real]]
    assert rows == [_sample(i)["item_id"] for i in ids]
    return list(ids)


def _balance_two_epochs(rank: int, world_size: int, kind: str) -> tuple[list[list[int]], Any, Any]:
    loader = LOADERS[kind](rank, world_size)
    with Balancer(loader, BalanceConfig(cost=_tokens)) as balancer:
        length = len(balancer) if kind in WITH_LENGTH else None
        positions = []
        epochs = []
        for _ in range(2):
            ids = []
            for batch in balancer:
                assert batch.batch_size == 5
                positions.append((batch.epoch, batch.step, batch.position))
                ids += _ids(batch)
            epochs.append(ids)
        return epochs, length, positions


@pytest.mark.parametrize("kind", LOADERS)
def test_any_loader_is_balanced_with_each_sample_once_per_epoch(ranks: RankPool, kind: str) -> None:
    results = ranks.run(2, _balance_two_epochs, kind)
    for epoch in range(2):
        assert sorted(i for epochs, _, _ in results for i in epochs[epoch]) == list(range(NUM_SAMPLES))
    for _, length, positions in results:
        assert length == (5 if kind in WITH_LENGTH else None)  # 22 and 21 samples: 5 batches each
        assert positions == [(epoch, step, step + 1) for epoch in range(2) for step in range(5)]


def _nodes(samples: MapStyle) -> Any:
    source = MapStyleWrapper(dict(enumerate(samples[i] for i in range(len(samples)))), SequentialSampler(samples))
    return Mapper(Batcher(source, 5, drop_last=False), COLLATE)


STATEFUL: dict[str, Callable[[MapStyle], Any]] = {
    "StatefulDataLoader": _stateful,
    "StatefulDataLoader, worker": lambda samples: _stateful(samples, num_workers=1),
    "nodes": _nodes,
    "prefetched nodes": lambda samples: Prefetcher(_nodes(samples), 3),
    "torchdata's Loader": lambda samples: NodeLoader(_nodes(samples)),
}


def _stop_and_resume(rank: int, world_size: int, kind: str) -> list[tuple[list[int], list[int], list[int]]]:
    """Return, for a stop after each number of steps, the samples before and after it, and of the next epoch."""

    def make() -> Balancer[Any]:
        # Uneven: 3 batches on rank 0, 5 on the others.
        samples = MapStyle(rank, world_size)
        samples.indices = samples.indices[: 13 if rank == 0 else None]
        return Balancer(STATEFUL[kind](samples), BalanceConfig(cost=_tokens))

    with make() as balancer:
        batches, states = [], [balancer.state_dict()]
        for batch in balancer:
            batches.append(batch)
            states.append(balancer.state_dict())
            assert (states[-1]["epoch"], states[-1]["position"]) == (batch.epoch, batch.position)
        assert [balancer.state_dict(after=batch) for batch in batches] == states[1:]
    of_stops = []
    for step, state in enumerate(states):
        with make() as resumed:
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            if step:
                assert resumed.state_dict(after=batches[step - 1]) == state
            rest, following = ([i for batch in resumed for i in _ids(batch)] for _ in range(2))
            of_stops.append(([i for batch in batches[:step] for i in _ids(batch)], rest, following))
    return of_stops


@pytest.mark.parametrize("kind", STATEFUL)
def test_loader_of_uneven_ranks_resumes_after_the_batch_handed_out_last(ranks: RankPool, kind: str) -> None:
    samples = sorted([*range(0, 26, 2), *range(1, NUM_SAMPLES, 2)])
    of_stops = list(zip(*ranks.run(2, _stop_and_resume, kind), strict=True))
    assert len(of_stops) == 6
    for step, of_ranks in enumerate(of_stops):
        trained, rest, following = (sorted(i for part in parts for i in part) for parts in zip(*of_ranks, strict=True))
        if step < 5:
            assert sorted(trained + rest) == samples
        else:  # nothing was left: the next epoch follows
            assert [trained, rest] == [samples, samples]
        assert following == samples


LONG = 100  # steps, more than a Balancer keeps snapshots of


@pytest.mark.parametrize("lookahead", [1, 5])
def test_states_of_recent_batches_are_kept_whatever_was_pulled_ahead(lookahead: int) -> None:
    samples = [_sample(i) for i in range(LONG)]

    def make() -> Balancer[Any]:
        loader: Any = StatefulDataLoader(samples, batch_size=1, collate_fn=COLLATE)
        return Balancer(loader, BalanceConfig(cost=_tokens, lookahead=lookahead))

    with make() as balancer:
        batches = [batch for batch, _ in zip(balancer, range(LONG // 2), strict=False)]
        for ago in (1, 2, 17):
            with make() as resumed:
                resumed.load_state_dict(balancer.state_dict(after=batches[-ago]))
                assert _ids(next(iter(resumed))) == [len(batches) - ago + 1]
        message = r"state after position 1 of epoch 0 is no longer known; .* within 16 steps"
        with pytest.raises(StateError, match=message):
            balancer.state_dict(after=batches[0])


def _load_of_other_ranks(rank: int, world_size: int) -> None:
    with Balancer(_stateful(MapStyle(rank, world_size)), BalanceConfig(cost=_tokens)) as balancer:
        next(iter(balancer))
        state = balancer.state_dict()
        state["ranks"] = {"0": state["ranks"].get("0", "")}  # as saved by a library that saves rank 0's state only
        balancer.load_state_dict(state)


def test_state_of_another_rank_is_refused(ranks: RankPool) -> None:
    own, other = ranks.try_run(2, _load_of_other_ranks)
    assert own is None
    assert (other.type_name, other.message) == (
        StateError.__name__,
        "the state is of 2 ranks, with that of ranks 0; this is rank 1 of 2. Resume a StatefulDataLoader on as many "
        "ranks, each with its own state, or use build_loader, which resumes on any number",
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.pop("is_end"), "the state of the Balancer has no is_end; load a state that state_dict returned"),
        (lambda s: s.update(epoch=None), "the state of the Balancer has epoch None, expected an integer from 0 to "),
        (lambda s: s.update(ranks={"0": b"x"}), "the state of the Balancer has, for rank 0, b'x', expected text"),
        (lambda s: s.update(ranks={"0": "x"}), "the loader's part of the state is damaged"),
        (lambda s: s.update(ranks={"0": "abcd"}), "the loader's part of the state is damaged"),
        (lambda s: s.update(ranks={"0": encode({})}), "the state of a rank has version None, expected 3"),
        (
            lambda s: s.update(ranks={"0": encode(_FORMAT_OF_RANK.make(rank=1, has_ended=False, state={}))}),
            "the state of the Balancer has that of rank 1 under rank 0; load an intact",
        ),
        (
            lambda s: s.update(version=2),
            "the state of the Balancer has version 2, expected 3; load it with the version",
        ),
        (
            lambda s: s.update(ranks={"0": encode(Position(1, 2))}),
            r"contains evenrank\.dataloader\.state\.resume_point\.Position, which is not loaded from files by default;",
        ),
    ],
)
def test_damaged_state_is_refused_and_the_position_kept(damage: Callable[[dict[str, Any]], None], message: str) -> None:
    with Balancer(_stateful(MapStyle(0, 1)), BalanceConfig(cost=_tokens)) as balancer:
        batches = iter(balancer)
        next(batches)
        state = balancer.state_dict()
        damaged = dict(state)
        damage(damaged)
        with pytest.raises(StateError, match=message) as raised:
            balancer.load_state_dict(damaged)
        assert "\n" not in str(raised.value)
        assert balancer.state_dict() == state


@pytest.mark.parametrize("kind", [kind for kind in STATEFUL if "worker" not in kind])
def test_state_is_loaded_after_another_one_was_asked_for(kind: str) -> None:
    """As torch.distributed.checkpoint does, which takes it as a template."""
    with Balancer(STATEFUL[kind](MapStyle(0, 1)), BalanceConfig(cost=_tokens)) as balancer:
        steps = iter(balancer)
        trained = _ids(next(steps)) + _ids(next(steps))
        state = balancer.state_dict()
    with Balancer(STATEFUL[kind](MapStyle(0, 1)), BalanceConfig(cost=_tokens)) as resumed:
        resumed.state_dict()
        resumed.load_state_dict(state)
        rest = [i for batch in resumed for i in _ids(batch)]
    assert sorted(trained + rest) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("kind", ["StatefulDataLoader", "nodes"])
def test_state_that_the_loader_itself_cannot_load_is_refused(kind: str) -> None:
    with Balancer(STATEFUL[kind](MapStyle(0, 1)), BalanceConfig(cost=_tokens)) as balancer:
        state = balancer.state_dict()
        state["ranks"] = {"0": encode(_FORMAT_OF_RANK.make(rank=0, has_ended=False, state={"x": 1}))}
        balancer.load_state_dict(state)
        with pytest.raises(RankError, match=r"the (StatefulData)?Loader cannot load its part of the state \("):
            list(balancer)


def test_steps_started_by_hand_have_the_state_of_loaders_that_know_positions_only() -> None:
    loader = _stateful(MapStyle(0, 1))
    with Balancer(loader, BalanceConfig(cost=_tokens)) as balancer:
        batch = balancer.finish(balancer.launch(balancer.start(next(iter(loader)))))
        assert batch is not None
        with pytest.raises(ConfigError, match="steps were started with batches that the Balancer has not pulled"):
            balancer.state_dict()


def test_loader_without_state_is_an_error_only_when_state_is_asked_for() -> None:
    with Balancer(_data_loader(MapStyle(0, 1)), BalanceConfig(cost=_tokens)) as balancer:
        assert len(list(balancer)) == len(balancer) == 9
        for use in (balancer.state_dict, lambda: balancer.load_state_dict({})):
            with pytest.raises(
                ConfigError, match="the loader, a DataLoader, has no state_dict and load_state_dict; use "
            ):
                use()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ("out/ml-20m", r"batches is a path, 'out/ml-20m'; pass build_loader\(path, config, rank=\.\.\., world_size="),
        (Path("data"), "batches is a path, 'data'; pass build_loader"),
        (
            MapStyle(0, 1),
            r"batches is a MapStyle, a Dataset of samples; pass DataLoader\(dataset, ",
        ),
        (COLLATE([_sample(1)]), "batches must be an iterable of JaggedBatches, such as a loader; got a CollatedBatch"),
        ({"item_id": [1]}, "batches must be an iterable of JaggedBatches, such as a loader; got a dict"),
        (7, "batches must be an iterable of JaggedBatches, such as a loader; got a int"),
    ],
)
def test_what_is_no_loader_is_refused(batches: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Balancer(batches, BalanceConfig(cost=_tokens))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"item_id": torch.ones(3), "label": torch.ones(1)},
            "the loader yields a dict of item_id, label instead of a JaggedBatch; pass its DataLoader collate",
        ),
        ((torch.ones(3),), "the loader yields a tuple instead of a JaggedBatch; pass its DataLoader collate"),
        (torch.ones(3), "the loader yields a Tensor instead of a JaggedBatch; pass its DataLoader collate"),
        (
            COLLATE([_sample(3)]).features,
            "the loader yields KeyedJaggedTensors; derive a dataclass from JaggedBatch with a field for ",
        ),
    ],
    ids=["dict", "tuple", "Tensor", "KeyedJaggedTensor"],
)
def test_wrong_batch_is_named(wrong: Any, message: str) -> None:
    batches: Any = [COLLATE([_sample(3)]), wrong]
    with Balancer(batches, BalanceConfig(cost=_tokens)) as balancer, pytest.raises(RankError) as raised:
        list(balancer)
    assert str(raised.value).startswith(f"rank 0 failed: {message}")


def _fail(rank: int, world_size: int, method: str) -> None:
    class Unreadable:
        def _raise(self, name: str) -> None:
            if rank == 1 and name == method:
                raise OSError("no such bucket")

        def __iter__(self) -> Iterator[Any]:
            self._raise("__iter__")
            return iter([COLLATE([_sample(3)])])

        def __len__(self) -> int:
            self._raise("__len__")
            return 1

        def rank_invariants(self) -> dict[str, Any]:
            self._raise("rank_invariants")
            return {}

    with Balancer(Unreadable(), BalanceConfig(cost=_tokens)) as balancer:
        list(balancer)


@pytest.mark.parametrize("method", ["__iter__", "__len__", "rank_invariants"])
def test_loader_that_fails_on_one_rank_is_reported_on_all(ranks: RankPool, method: str) -> None:
    for failure in ranks.try_run(2, _fail, method):
        assert failure.message in ("rank 1 failed: OSError: no such bucket", "no such bucket")


@pytest.mark.gpu
def test_pinning_data_loader_is_balanced_on_a_gpu() -> None:
    loader = _data_loader(MapStyle(0, 1), num_workers=1, pin_memory=True, persistent_workers=True)
    assert all(batch.features.values().is_pinned() and batch.id.is_pinned() for batch in loader)
    with Balancer(loader, BalanceConfig(cost=_tokens), device="cuda") as balancer:
        for _ in range(2):
            batches = list(balancer)
            assert all(batch.id.is_cuda and batch.features.values().is_cuda for batch in batches)
            assert sorted(i for batch in batches for i in _ids(batch.to("cpu"))) == list(range(NUM_SAMPLES))


class Stopping(MapStyle):
    """A dataset that raises StopIteration for one of the samples of rank 1."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return next(iter([])) if self.indices[index] == 23 else super().__getitem__(index)


def _stop_early(rank: int, world_size: int, kind: str) -> None:
    dataset = Stopping(rank, world_size)
    loader = {"DataLoader": _data_loader, "StatefulDataLoader": _stateful}[kind.split(",")[0]](
        dataset, num_workers=int(kind.endswith("worker"))
    )
    with Balancer(loader, BalanceConfig(cost=_tokens)) as balancer:
        list(balancer)


@pytest.mark.parametrize("kind", ["DataLoader", "DataLoader, worker", "StatefulDataLoader"])
def test_data_loader_that_a_sample_has_ended_is_an_error_on_all_ranks(ranks: RankPool, kind: str) -> None:
    for failure in ranks.try_run(2, _stop_early, kind):
        assert isinstance(failure, RankFailure)
        assert failure.message.startswith("rank 1 failed: the DataLoader ended after 2 of 5 batches: its dataset or ")


class EstimatingSampler(SequentialSampler):
    """Its length is only an estimate."""

    def __len__(self) -> int:
        return super().__len__() + 10


def test_only_lengths_that_are_exact_are_checked() -> None:
    dataset = MapStyle(0, 1)
    resumed, asked = _stateful(dataset), _stateful(dataset)
    for loader in (resumed, asked):
        loader.load_state_dict(_state_after(2, _stateful(dataset)))  # not through the Balancer
    asked.state_dict()  # creates the next iterator
    batch_sampler = BatchSampler(EstimatingSampler(dataset), batch_size=5, drop_last=False)
    for loader, expected in (
        (_data_loader(dataset, sampler=EstimatingSampler(dataset)), 43),
        (DataLoader(dataset, batch_sampler=batch_sampler, collate_fn=COLLATE), 43),
        (resumed, 33),
        (asked, 33),
    ):
        with Balancer(loader, BalanceConfig(cost=_tokens)) as balancer:
            assert sum(batch.num_real for batch in balancer) == expected
            assert sum(batch.num_real for batch in balancer) == 43


def _state_after(step: int, loader: Any) -> Any:
    iterator = iter(loader)
    for _ in range(step):
        next(iterator)
    return loader.state_dict()
