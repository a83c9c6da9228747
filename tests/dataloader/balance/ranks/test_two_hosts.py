import contextlib
import itertools
import time
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.balance.partition.strategies import warm_up
from tests.dataloader.balance.costs import rich_tokens
from tests.dataloader.rich_batch import rich_batch
from tests.ranks import RankFailure
from tests.two_hosts import Gate, make_two_hosts

TIMEOUT = timedelta(seconds=8)
LIMIT = TIMEOUT.total_seconds() + 15  # within which every rank ends
CAUSES = ("a rank is lost or does not respond (", "the process group does not respond (", "rank ")


class Case(NamedTuple):
    is_cut: bool
    """Whether the link is cut; else the processes of a host stop for a while."""
    host: int
    exchange: str = "all-to-all"
    leaves: bool = False
    """Whether ranks have left their loops before."""


def _train(rank: int, gate: Gate, case: Case) -> None:
    batch = rich_batch([[(1, 1), (1, 1)]], first_id=rank)
    config = BalanceConfig(cost=rich_tokens, exchange=case.exchange, timeout=TIMEOUT)
    warm_up(config.strategy)
    dist.barrier()  # ranks begin together, although they have started on a busy machine
    with Balancer(itertools.repeat(batch), config) as balancer:
        for number, _ in enumerate(balancer):
            if number == 3:
                if case.leaves:
                    gate.wait()
                    break
                gate.reach()
    if case.leaves:
        # What it has started has failed, but it needed nothing of it.
        Balancer([batch], config)


def _check_ends(failures: list[Any]) -> None:
    for failure in failures:
        assert isinstance(failure, RankFailure), failure
        assert failure.type_name in ("RankError", "RankLostError"), failure.trace
        assert "\n" not in failure.message
        assert failure.message.startswith(CAUSES), failure.message


@pytest.mark.parametrize(
    "cases",
    [
        [Case(True, 1), Case(False, 0)],
        pytest.param([Case(True, 0, "all-gather"), Case(True, 1, leaves=True), Case(False, 1)], marks=pytest.mark.long),
    ],
)
def test_a_link_that_is_cut_or_a_host_that_stops_ends_all_ranks(cases: list[Case]) -> None:
    with contextlib.ExitStack() as stack:
        jobs = []  # at the same time, each on two hosts of its own
        for case in cases:
            hosts = stack.enter_context(contextlib.closing(make_two_hosts()))
            job = stack.enter_context(hosts.job(_train, case))
            job.await_gates()
            if case.is_cut:
                hosts.cut(case.host)
                job.open_gates()
            else:
                job.stop(case.host)
            jobs.append((case, job, time.monotonic() + LIMIT))
        for case, job, deadline in jobs:
            if case.is_cut:
                _check_ends(job.results(deadline))
            else:  # also the host that had stopped ends, once it goes on
                _check_ends(job.results(deadline, hosts=[1 - case.host]))
                job.resume(case.host)
                _check_ends(job.results(time.monotonic() + LIMIT, hosts=[case.host]))
