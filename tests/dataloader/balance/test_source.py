import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from evenrank.core.errors import ConfigError, RankError, StateError
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.balance.source import _FORMAT, _FORMAT_OF_RANK
from evenrank.dataloader.state.checks import encode
from evenrank.dataloader.state.resume_point import Position
from tests.dataloader.balance.costs import item_tokens
from tests.dataloader.batch_helpers import COLLATE, nodes_over
from tests.ranks import RankPool

NUM_SAMPLES = 43


def _sample(index: int) -> dict[str, Any]:
    return {"item_id": [index] * (index * 7 % 11), "sample_ids": index}


class MapStyle(Dataset[dict[str, Any]]):
    """The samples of one rank: those of every `world_size`-th index."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.indices = range(rank, NUM_SAMPLES, world_size)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _sample(self.indices[index])


def _data_loader(dataset: Any, num_workers: int = 0, kind: Any = DataLoader, **options: Any) -> Any:
    # Ranks are started by a fork server; workers that were too would import everything again.
    options |= {"num_workers": num_workers, "multiprocessing_context": "fork" if num_workers else None}
    return kind(dataset, batch_size=5, collate_fn=COLLATE, **options)


_stateful = partial(_data_loader, kind=StatefulDataLoader)


def _ids(batch: Any) -> list[int]:
    ids = batch.sample_ids[: batch.num_real].tolist()
    rows = [row.tolist() for row in batch.features["item_id"].to_dense()[: batch.num_real]]
    assert rows == [_sample(i)["item_id"] for i in ids]
    return list(ids)


def _nodes(samples: MapStyle) -> Any:
    return nodes_over([samples[i] for i in range(len(samples))], 5)


STATEFUL: dict[str, Callable[[MapStyle], Any]] = {
    "StatefulDataLoader": _stateful,
    "StatefulDataLoader, worker": lambda samples: _stateful(samples, num_workers=1),
    "nodes": _nodes,
    "prefetched nodes": lambda samples: nodes.Prefetcher(_nodes(samples), 3),
    "torchdata's Loader": lambda samples: nodes.Loader(_nodes(samples)),
}


def _stop_and_resume(rank: int, world_size: int, kind: str) -> list[list[list[int]]]:
    """Return, for a stop after each number of steps, the samples before and after it, and of the next epoch."""

    def make() -> Balancer[Any]:
        # Uneven: 3 batches on rank 0, 5 on the others.
        samples = MapStyle(rank, world_size)
        samples.indices = samples.indices[: 13 if rank == 0 else None]
        return Balancer(STATEFUL[kind](samples), BalanceConfig(cost=item_tokens))

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
            if step % 2 and "worker" not in kind:
                resumed.state_dict()  # as torch.distributed.checkpoint, which takes it as a template
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            if step:
                assert resumed.state_dict(after=batches[step - 1]) == state
            parts = batches[:step], list(resumed), list(resumed)
            # The first batch of a rest may be a short one.
            assert {batch.batch_size for part in parts for batch in part} == {5}
            of_stops.append([[sample for batch in part for sample in _ids(batch)] for part in parts])
    return of_stops


@pytest.mark.parametrize("kind", STATEFUL)
def test_loader_of_uneven_ranks_resumes_after_the_batch_handed_out_last(ranks: RankPool, kind: str) -> None:
    samples = sorted([*range(0, 26, 2), *range(1, NUM_SAMPLES, 2)])
    of_stops = list(zip(*ranks.run(2, _stop_and_resume, kind), strict=True))
    assert len(of_stops) == 6
    for step, of_ranks in enumerate(of_stops):
        trained, rest, following = (first + second for first, second in zip(*of_ranks, strict=True))
        if step == 5:  # nothing was left: the next epoch follows
            trained, rest = rest, []
        assert sorted(trained + rest) == sorted(following) == samples


@pytest.mark.parametrize("lookahead", [1, 5])
def test_states_of_recent_batches_are_kept_whatever_was_pulled_ahead(lookahead: int) -> None:
    def make() -> Balancer[Any]:
        loader: Any = StatefulDataLoader([_sample(i) for i in range(100)], batch_size=1, collate_fn=COLLATE)
        return Balancer(loader, BalanceConfig(cost=item_tokens, lookahead=lookahead))

    with make() as balancer:
        batches = list(itertools.islice(balancer, 50))  # more than a Balancer keeps snapshots of
        for ago in (1, 2, 17):
            with make() as resumed:
                resumed.load_state_dict(balancer.state_dict(after=batches[-ago]))
                assert _ids(next(iter(resumed))) == [len(batches) - ago + 1]
        with pytest.raises(StateError, match=r"state after position 1 of epoch 0 is no longer known; .* within 16 st"):
            balancer.state_dict(after=batches[0])


OF_TWO_RANKS = _FORMAT.make(epoch=0, position=1, left="", is_end=False, world_size=2, ranks={"0": "x"})
OF_THE_STATE = "the state of the Balancer"


def _part(**changes: Any) -> dict[str, Any]:
    return {"ranks": {"0": encode(_FORMAT_OF_RANK.make(**{"rank": 0, "has_ended": False, "state": {}, **changes}))}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_end": ...}, f"{OF_THE_STATE} has no is_end; load a state that state_dict returned"),
        ({"epoch": None}, f"{OF_THE_STATE}: epoch must be of type int, got None; load a state that state_dict r"),
        ({"version": 2}, f"{OF_THE_STATE} has version 2, expected 4; load it with the version"),
        ({"ranks": {"0": b"x"}}, f"{OF_THE_STATE}: the part of rank 0 must be of type str, got b'x'"),
        (
            {"ranks": {"1": "x"}},
            "the state is of 1 ranks, with that of ranks 1; this is rank 0 of 1. Resume a Stateful",
        ),
        ({"ranks": {"\r\x1b[31m\u2028\n": "x"}}, "this is rank 0 of 1"),
        (OF_TWO_RANKS, "the state is of 2 ranks, with that of ranks 0; this is rank 0 of 1"),
        ({"ranks": {"0": "x"}}, "the loader's part of the state is damaged"),
        ({"ranks": {"0": encode({})}}, "the state of a rank has no version, and nothing else; pass what its"),
        (_part(rank=1), f"{OF_THE_STATE} has that of rank 1 under rank 0; load an intact"),
        ({"ranks": {"0": encode(Position(1, 2))}}, r"contains evenrank\..*\.Position, which is not loaded from files"),
    ],
)
def test_damaged_state_is_refused_and_the_position_kept(changes: dict[str, Any], message: str) -> None:
    with Balancer(_stateful(MapStyle(0, 1)), BalanceConfig(cost=item_tokens)) as balancer:
        next(iter(balancer))
        state = balancer.state_dict()
        damaged = {name: value for name, value in {**state, **changes}.items() if value is not ...}
        with pytest.raises(StateError, match=message) as raised:
            balancer.load_state_dict(damaged)
        assert str(raised.value).isprintable()
        assert balancer.state_dict() == state


@pytest.mark.parametrize("kind", ["StatefulDataLoader", "nodes"])
def test_state_that_the_loader_itself_cannot_load_is_refused(kind: str) -> None:
    with Balancer(STATEFUL[kind](MapStyle(0, 1)), BalanceConfig(cost=item_tokens)) as balancer:
        balancer.load_state_dict({**balancer.state_dict(), **_part(state={"x": 1})})
        with pytest.raises(RankError, match=r"the (StatefulData)?Loader cannot load its part of the state \("):
            list(balancer)


def test_steps_started_by_hand_have_the_state_of_loaders_that_know_positions_only() -> None:
    loader = _stateful(MapStyle(0, 1))
    with Balancer(loader, BalanceConfig(cost=item_tokens)) as balancer:
        batch = balancer.finish(balancer.launch(balancer.start(next(iter(loader)))))
        assert batch is not None
        with pytest.raises(ConfigError, match="steps were started with batches that the Balancer has not pulled"):
            balancer.state_dict()


class Stopping(MapStyle):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return next(iter([])) if self.indices[index] == 23 else super().__getitem__(index)


def _fail(rank: int, world_size: int) -> list[str]:
    def fail(*arguments: Any) -> Any:
        raise OSError("no such bucket")

    loaders: list[Any] = []
    for method in ("__iter__", "__len__", "rank_invariants"):
        kind = type("Unreadable", (list,), {"rank_invariants": lambda self: {}} | ({method: fail} if rank == 1 else {}))
        loaders.append(kind([COLLATE([_sample(3)])]))
    for kind, num_workers in ((DataLoader, 0), (DataLoader, 1), (StatefulDataLoader, 0)):
        loaders.append(_data_loader(Stopping(rank, world_size), num_workers, kind))
    errors = []
    for loader in loaders:
        with pytest.raises((OSError, RankError)) as raised, Balancer(loader, BalanceConfig(cost=item_tokens)) as steps:
            list(steps)
        errors.append(str(raised.value))
    return errors


def test_a_loader_that_fails_or_that_a_sample_ended_is_an_error_on_all_ranks(ranks: RankPool) -> None:
    for errors in ranks.run(2, _fail):
        assert {*errors[:3]} <= {"rank 1 failed: OSError: no such bucket", "no such bucket"}
        for ended in errors[3:]:
            assert ended.startswith("rank 1 failed: the DataLoader ended after 2 of 5 batches: its dataset or ")


@pytest.mark.gpu
def test_pinning_data_loader_is_balanced_on_a_gpu() -> None:
    loader = _data_loader(MapStyle(0, 1), num_workers=1, pin_memory=True, persistent_workers=True)
    assert all(batch.features.values().is_pinned() and batch.sample_ids.is_pinned() for batch in loader)
    with Balancer(loader, BalanceConfig(cost=item_tokens), device="cuda") as balancer:
        for _ in range(2):
            batches = list(balancer)
            assert all(batch.sample_ids.is_cuda and batch.features.values().is_cuda for batch in batches)
            assert sorted(i for batch in batches for i in _ids(batch.to("cpu"))) == list(range(NUM_SAMPLES))


class EstimatingSampler(SequentialSampler):
    def __len__(self) -> int:
        return super().__len__() + 10


def test_only_lengths_that_are_exact_are_checked() -> None:
    dataset = MapStyle(0, 1)
    trained, resumed = (_stateful(dataset) for _ in range(2))
    list(itertools.islice(iterator := iter(trained), 2))
    resumed.load_state_dict(trained.state_dict())  # not through the Balancer
    del iterator
    sampled = _data_loader(dataset, sampler=EstimatingSampler(dataset))
    for loader, expected in ((sampled, 43), (resumed, 33)):
        with Balancer(loader, BalanceConfig(cost=item_tokens)) as balancer:
            assert [sum(batch.num_real for batch in balancer) for _ in range(2)] == [expected, 43]
