from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig
from tests.dataloader.balance.costs import COST, Ints, Lengths
from tests.ranks import RankPool


class _Cost:
    """Costs of one name, which are compared by what they return."""

    def __init__(self, power: int) -> None:
        self._power = power

    def __call__(self, lengths: Lengths, num_candidates: Ints) -> Ints:
        return lengths["item_id"] ** self._power


def _create(rank: int, world_size: int, path: Path, of_second: dict[str, Any]) -> None:
    options: dict[str, Any] = {"path": path, "config": {}, "balance": {}, "rank": rank, "world_size": world_size}
    options |= of_second if rank == 1 else {}
    config = LoaderConfig(**{"batch_size": 4, **options.pop("config")})
    balance = BalanceConfig(**{"cost": _Cost(1), "timeout": timedelta(seconds=30), **options.pop("balance")})
    build_loader(options.pop("path"), config, **options, balance=balance)


@pytest.mark.parametrize(
    ("change", "own", "message"),
    [
        ({"path": Path("/nowhere")}, "DataError", "rank 1 failed: /nowhere"),
        ({"config": {"seed": 1}}, "RankError", "seed differs between ranks: 0 on rank 0, 1 on rank 1"),
        ({"config": {"max_history_length": 7}}, "RankError", "max_history_length differs between ranks: 512 on rank 0"),
        ({"config": {"prefetch": 3}}, "RankError", "prefetch differs between ranks: 16 on rank 0, 3 on rank 1"),
        ({"balance": {"window": 4}}, "RankError", "window differs between ranks: 1 on rank 0, 4 on rank 1"),
        ({"balance": {"cost": COST}}, "RankError", "cost differs between ranks: _Cost on rank 0, HSTUCost("),
        ({"balance": {"cost": _Cost(2)}}, "RankError", "costs and plan of the first step differs between ranks: "),
        ({"balance": {"tolerance": 2}}, "ConfigError", "rank 1 failed: tolerance must be at least 0 and below 1"),
        ({"rank": 0}, "RankError", "the loader of rank 1 was created for rank 0"),
        ({"world_size": 3}, "ConfigError", "rank 1 failed: the loader is created for world_size 3, but 2 ranks would"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else str(value)[:40],
)
def test_what_differs_is_told(ranks: RankPool, small_dataset: Path, change: Any, own: str, message: str) -> None:
    first, second = ranks.try_run(2, _create, small_dataset, change)
    assert (first.type_name, second.type_name) == ("RankError", own)
    assert message in first.message
