"""The walk that proves that nothing is lost has to notice when something is."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from evenrank.cli import balance_walk
from evenrank.core.errors import RankError
from evenrank.dataloader import LoaderConfig
from evenrank.dataloader.balance import Balancer, HSTUCost
from tests.ranks import RankPool

COST = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1)


class _Faulty(Balancer[Any]):
    """Does what a broken exchange might do, in the third step of rank 1."""

    fault = ""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield self._spoilt(batch) if batch.step == 2 and dist.get_rank() == 1 else batch

    def _spoilt(self, batch: Any) -> Any:
        match self.fault:
            case "lost":
                return replace(batch, num_real=batch.num_real - 1)
            case "twice":
                ids = batch.sample_ids.clone()
                ids[1] = ids[0]
                return replace(batch, sample_ids=ids)
            case "altered":
                batch.features.values()[-1] += 1
        return batch


def _walk(rank: int, world_size: int, path: Path, fault: str) -> int:
    _Faulty.fault = fault
    balance_walk.Balancer = _Faulty
    config = LoaderConfig(batch_size=8)
    return balance_walk.walk_epoch(path, config, cost=COST, strategy="lpt-swap").samples


def test_a_sound_epoch_passes(ranks: RankPool, small_dataset: Path) -> None:
    samples = ranks.run(3, _walk, small_dataset, "")
    assert samples == [samples[0]] * 3
    assert samples[0] > 150


@pytest.mark.parametrize("fault", ["lost", "twice", "altered"])
def test_a_fault_is_noticed_on_every_rank(ranks: RankPool, small_dataset: Path, fault: str) -> None:
    failures = ranks.try_run(3, _walk, small_dataset, fault)
    assert [failure.message for failure in failures] == [
        "samples were altered, in steps [[], [2], []] of each rank"
    ] * 3


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        ([[0], [1]], "of 3 samples 2 were seen, 2 times in all"),
        ([[0, 1], [1]], "of 3 samples 2 were seen, 3 times in all"),
        ([[0, 1, 2], [1]], "of 3 samples 3 were seen, 4 times in all"),
    ],
)
def test_each_sample_has_to_be_seen_exactly_once(seen: list[list[int]], message: str) -> None:
    balance_walk.check_seen([[2, 0], [1], []], 3)
    with pytest.raises(RankError, match=message):
        balance_walk.check_seen(seen, 3)
