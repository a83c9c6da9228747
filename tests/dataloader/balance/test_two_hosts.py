"""Balancing over two hosts: exact, also over a slow link, and an error on every rank when the link or a host is lost."""

import contextlib
import itertools
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from evenrank.dataloader import Loader, LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, HSTUCost
from tests.dataloader.balance.costs import Ints, Lengths
from tests.dataloader.batches import ids_of, rows_of
from tests.dataloader.rich_batch import rich_batch
from tests.ranks import RankFailure
from tests.two_hosts import WORLD_SIZE, Gate, TwoHosts, make_two_hosts

COST = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)
TIMEOUT = timedelta(seconds=4)
LIMIT = TIMEOUT.total_seconds() + 15  # within which every rank ends
WAYS = ("no exchange", "all-to-all", "all-gather")

Samples = list[list[tuple[int, list[int], list[int]]]]  # id, items and actions of each sample, by step


@pytest.fixture
def two_hosts() -> Iterator[TwoHosts]:
    hosts = make_two_hosts()
    yield hosts
    hosts.close()


def _tokens(lengths: Lengths, num_candidates: Ints) -> Ints:
    return lengths["a"] + lengths["b"]


def _samples(batch: SequenceBatch) -> list[tuple[int, list[int], list[int]]]:
    rows = (rows_of(batch.features, key) for key in ("item_id", "action"))
    return list(zip(ids_of(batch), *rows, strict=False))


def _loader(path: Path, rank: int, balance: BalanceConfig | None) -> Loader[SequenceBatch]:
    return build_loader(path, LoaderConfig(batch_size=5), rank=rank, world_size=WORLD_SIZE, balance=balance)


def _balance_in_all_ways(rank: int, gate: Gate, path: Path) -> list[Samples]:
    seen: list[Samples] = []
    topology = (2, WORLD_SIZE // 2)
    for way in WAYS:
        if way == "no exchange":
            batches: Any = _loader(path, rank, BalanceConfig(cost=COST, topology=topology))
        else:
            batches = Balancer(_loader(path, rank, None), cost=COST, topology=topology, exchange=way)
        with contextlib.closing(batches):
            seen.append([_samples(batch) for batch in batches])
    return seen


def _check_exactness(two_hosts: TwoHosts, path: Path) -> None:
    with two_hosts.job(_balance_in_all_ways, path) as job:
        by_rank = job.results()
    for failure in by_rank:
        assert not isinstance(failure, RankFailure), failure.trace
    loaded = [[_samples(batch) for batch in _loader(path, rank, None)] for rank in range(WORLD_SIZE)]
    for way in range(len(WAYS)):
        balanced = [seen[way] for seen in by_rank]
        assert balanced != loaded
        for of_ranks, of_loaders in zip(zip(*balanced, strict=True), zip(*loaded, strict=True), strict=True):
            assert sorted(itertools.chain(*of_ranks)) == sorted(itertools.chain(*of_loaders))


def test_every_sample_is_trained_once_over_two_hosts(two_hosts: TwoHosts, small_dataset: Path) -> None:
    _check_exactness(two_hosts, small_dataset)


def _train_forever(rank: int, gate: Gate, exchange: str) -> None:
    batch = rich_batch([[(1, 1), (1, 1)]], first_id=rank)
    with Balancer(itertools.repeat(batch), cost=_tokens, exchange=exchange, timeout=TIMEOUT) as balancer:
        for number, _ in enumerate(balancer):
            if number == 3:
                gate.reach()


def _check_ends(failures: list[Any]) -> None:
    for failure in failures:
        assert failure.type_name in ("RankError", "RankLostError"), failure.trace
        assert "\n" not in failure.message
        # print(failure.type_name, failure.message)


@pytest.mark.parametrize("host", [0, 1])
def test_a_link_that_is_cut_ends_every_rank(two_hosts: TwoHosts, host: int) -> None:
    with two_hosts.job(_train_forever, "all-to-all") as job:
        job.await_gates()
        two_hosts.cut(host)
        _check_ends(job.results(LIMIT))


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_stops_ends_every_rank(two_hosts: TwoHosts, host: int) -> None:
    with two_hosts.job(_train_forever, "all-gather") as job:
        job.await_gates()
        job.stop(host)
        _check_ends(job.results(LIMIT, hosts=[1 - host]))
        job.resume(host)
        _check_ends(job.results(LIMIT, hosts=[host]))
