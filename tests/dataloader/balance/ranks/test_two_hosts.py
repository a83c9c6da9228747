import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.balance.partition.strategies import warm_up
from tests.dataloader.balance.costs import rich_tokens
from tests.dataloader.rich_batch import rich_batch
from tests.ranks import RankFailure
from tests.two_hosts import Gate, TwoHosts, make_two_hosts

TIMEOUT = timedelta(seconds=8)
LIMIT = TIMEOUT.total_seconds() + 15  # within which every rank ends
CAUSES = ("a rank is lost or does not respond (", "the process group does not respond (", "rank ")
MakeHosts = Callable[[], TwoHosts]


@pytest.fixture
def make_hosts() -> Iterator[MakeHosts]:
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(contextlib.closing(make_two_hosts()))


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


def _check_ends(failures: Sequence[Any]) -> None:
    for failure in failures:
        assert isinstance(failure, RankFailure), failure
        assert failure.type_name in ("RankError", "RankLostError"), failure.trace
        assert "\n" not in failure.message
        assert failure.message.startswith(CAUSES), failure.message


def test_a_link_that_is_cut_while_ranks_train_ends_all_of_them(make_hosts: MakeHosts) -> None:
    with contextlib.ExitStack() as stack:
        jobs = []  # at the same time, each on two hosts of its own
        for host, exchange, leaves in ((0, "all-to-all", False), (1, "all-gather", False), (1, "all-to-all", True)):
            hosts = make_hosts()
            job = stack.enter_context(hosts.job(_train, exchange, leaves))
            job.await_gates()
            hosts.cut(host)
            job.open_gates()
            jobs.append((job, time.monotonic() + LIMIT))
        for job, deadline in jobs:
            _check_ends(job.results(deadline))


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
