"""The arguments of a Balancer: checked on each rank and compared between ranks, before any process group is created."""

import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from evenrank.core.errors import RankError, one_line
from evenrank.core.source_hash import code_hash
from evenrank.dataloader.adapt import Source
from evenrank.dataloader.balance.control.consistency import RankReport, Settled, describe_cost, judge_ranks
from evenrank.dataloader.balance.control.process_group import Members
from evenrank.dataloader.balance.control.settle import settle
from evenrank.dataloader.balance.cost import Cost
from evenrank.dataloader.balance.exchange.collectives import COLLECTIVES
from evenrank.dataloader.balance.exchange.device import ExchangeDevice, make_device
from evenrank.dataloader.balance.partition.registry import find_strategy
from evenrank.dataloader.balance.settings import BalancerSettings, check_topology
from evenrank.dataloader.batch import JaggedBatch

Batch = TypeVar("Batch", bound=JaggedBatch)


def settle_arguments(
    make_settings: Callable[[], BalancerSettings],
    batches: Iterable[Batch],
    *,
    device: torch.device | str | None,
    cost: Cost,
    members: Members,
    timeout: timedelta,
) -> tuple[BalancerSettings, ExchangeDevice, Source[Batch], Settled]:
    """Check this rank's arguments and compare them between ranks.

    Collective: every rank must call this.

    Raises:
        ConfigError: the arguments are invalid on this rank.
        RankError: they are invalid on another rank, or differ between ranks.

    """
    settings, exchange_device, source, num_batches, error = None, None, None, None, None
    shared: dict[str, Any] = {}
    try:
        settings = make_settings()
        find_strategy(settings.partition.strategy, equal_counts=settings.partition.equal_counts)
        COLLECTIVES.check(settings.exchange)
        if settings.topology is not None:
            check_topology(settings.topology, members.world_size)
        source = Source(batches, rank=members.rank, world_size=members.world_size)
        num_batches = source.length()
        exchange_device = make_device(device)
        shared = settings.shared() | {
            "cost": describe_cost(cost),
            "device": exchange_device.device.type,
            "the code of evenrank": code_hash(),
        }
    except Exception as raised:  # reported to all ranks
        error = raised
    report = RankReport(
        error=None if error is None else one_line(error),
        settings=shared,
        hardware=None if exchange_device is None else exchange_device.hardware,
        num_batches=num_batches,
        host=socket.gethostname(),
    )
    try:
        settled = settle(report, judge_ranks, members, timeout)
    except RankError:
        if error is not None:
            raise error from None
        raise
    assert settings is not None
    assert source is not None
    assert exchange_device is not None
    return settings, exchange_device, source, settled
