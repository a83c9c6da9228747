import contextlib
import itertools
import pkgutil
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from evenrank.dataloader import Loader, LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.balance.partition.strategies import warm_up
from tests.dataloader.balance.costs import COST, rich_tokens
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.dataloader.rich_batch import rich_batch
from tests.ranks import RankFailure
from tests.two_hosts import WORLD_SIZE, Gate, TwoHosts, make_two_hosts

TIMEOUT = timedelta(seconds=8)
LIMIT = TIMEOUT.total_seconds() + 15  # within which every rank ends
CAUSES = ("a rank is lost or does not respond (", "the process group does not respond (", "rank ")
WAYS = ("no exchange", "all-to-all", "all-gather")

MakeHosts = Callable[[], TwoHosts]
Samples = list[list[tuple[int, list[int], list[int]]]]  # id, items and actions of each sample, by step


@pytest.fixture
def make_hosts() -> Iterator[MakeHosts]:
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(contextlib.closing(make_two_hosts()))


def _samples(batch: SequenceBatch) -> list[tuple[int, list[int], list[int]]]:
    rows = (rows_of(batch.features, key) for key in ("item_id", "action"))
    return list(zip(ids_of(batch), *rows, strict=False))


def _loader(path: Path, rank: int, balance: BalanceConfig | None) -> Loader[SequenceBatch]:
    return build_loader(path, LoaderConfig(batch_size=5), rank=rank, world_size=WORLD_SIZE, balance=balance)


def _balance_in_all_ways(rank: int, gate: Gate, path: Path) -> list[Samples]:
    seen: list[Samples] = []
    for way in WAYS:
        alone = BalanceConfig(cost=COST) if way == "no exchange" else None
        loader: Any = _loader(path, rank, alone)
        with contextlib.closing(
            loader if alone else Balancer(loader, BalanceConfig(cost=COST, exchange=way))
        ) as batches:
            seen.append([_samples(batch) for batch in batches])
    return seen


@pytest.mark.parametrize("discipline", [None, "netem delay 20ms"])
def test_two_hosts_train_each_sample_once(make_hosts: MakeHosts, small_dataset: Path, discipline: str | None) -> None:
    hosts = make_hosts()
    if discipline is not None:
        hosts.slow_down(discipline)
    with hosts.job(_balance_in_all_ways, small_dataset) as job:
        by_rank = job.results()
    for failure in by_rank:
        assert not isinstance(failure, RankFailure), failure.trace
    loaded = [[_samples(batch) for batch in _loader(small_dataset, rank, None)] for rank in range(WORLD_SIZE)]
    for way in range(len(WAYS)):
        balanced = [seen[way] for seen in by_rank]
        assert balanced != loaded
        for of_ranks, of_loaders in zip(zip(*balanced, strict=True), zip(*loaded, strict=True), strict=True):
            assert sorted(itertools.chain(*of_ranks)) == sorted(itertools.chain(*of_loaders))


def _train(rank: int, gate: Gate, exchange: str, leaves: bool) -> None:
    batch = rich_batch([[(1, 1), (1, 1)]], first_id=rank)
    config = BalanceConfig(cost=rich_tokens, exchange=exchange, timeout=TIMEOUT)
    warm_up(config.strategy)
    dist.barrier()  # ranks begin together, although they have started on a busy machine
    with Balancer(itertools.repeat(batch), config) as balancer:
        for number, _ in enumerate(balancer):
            if number == 3:
                if leaves:
                    gate.wait()
                    break
                gate.reach()
    if leaves:
        # What it has started has failed, but it needed nothing of it.
        Balancer([batch], config)


def _create_loader(rank: int, gate: Gate, path: Path) -> None:
    gate.wait()
    _loader(path, rank, BalanceConfig(cost=COST, timeout=TIMEOUT))


def _construct(rank: int, gate: Gate, name: str) -> None:
    warm_up("lpt-swap")
    module, attribute = name.rsplit(".", 1)
    owner = pkgutil.resolve_name(module)
    function = getattr(owner, attribute)
    after_fault = mock.Mock(side_effect=lambda *given, **options: [gate.wait(), function(*given, **options)][1])
    with mock.patch.object(owner, attribute, after_fault):
        Balancer([rich_batch([[(1, 1), (1, 1)]])], BalanceConfig(cost=rich_tokens, timeout=TIMEOUT))


def _check_ends(failures: Sequence[Any]) -> None:
    for failure in failures:
        assert isinstance(failure, RankFailure), failure
        assert failure.type_name in ("RankError", "RankLostError"), failure.trace
        assert "\n" not in failure.message
        assert failure.message.startswith(CAUSES), failure.message


def _check_cuts(make_hosts: MakeHosts, cuts: Sequence[tuple[Any, ...]]) -> None:
    """Run jobs at the same time, each on two hosts of its own, and cut their links at one of the hosts."""
    with contextlib.ExitStack() as stack:
        jobs = []
        for host, function, *arguments in cuts:
            hosts = make_hosts()
            job = stack.enter_context(hosts.job(function, *arguments))
            job.await_gates()
            hosts.cut(host)
            job.open_gates()
            jobs.append((job, time.monotonic() + LIMIT))
        for job, deadline in jobs:
            _check_ends(job.results(deadline))


def test_a_link_that_is_cut_while_ranks_train_ends_all_of_them(make_hosts: MakeHosts) -> None:
    ways = [(0, "all-to-all", False), (1, "all-gather", False), (1, "all-to-all", True)]
    _check_cuts(make_hosts, [(host, _train, exchange, leaves) for host, exchange, leaves in ways])


@pytest.mark.long
def test_a_link_that_is_cut_ends_ranks_that_begin(make_hosts: MakeHosts, small_dataset: Path) -> None:
    names = ("members_of", "handshake", "Connection")
    steps = [f"evenrank.dataloader.balance.balancer.{name}" for name in names]
    steps.append("evenrank.dataloader.balance.exchange.exchange.Exchange.connect")
    _check_cuts(make_hosts, [*((1, _construct, step) for step in steps), (1, _create_loader, small_dataset)])


def test_a_host_that_stops_ends_the_other_one_and_itself_once_it_goes_on(make_hosts: MakeHosts) -> None:
    with contextlib.ExitStack() as stack:
        jobs = []
        for host in (0, 1):
            job = stack.enter_context(make_hosts().job(_train, "all-to-all", False))
            job.await_gates()
            job.stop(host)
            jobs.append((host, job, time.monotonic() + LIMIT))
        for host, job, deadline in jobs:
            _check_ends(job.results(deadline, hosts=[1 - host]))
            job.resume(host)
            _check_ends(job.results(time.monotonic() + LIMIT, hosts=[host]))
