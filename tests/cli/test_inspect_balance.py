import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch.distributed as dist
from rich.console import Console

from evenrank.cli.demo import draw_loads
from evenrank.cli.inspect_balance import check_seen, walk_epoch
from evenrank.cli.reports.gains import Gain, gains_table
from evenrank.core.errors import RankError
from evenrank.dataloader import LoaderConfig, balance
from evenrank.dataloader.balance import BalanceConfig, Balancer, HSTUCost
from tests.dataloader.balance.metrics.example_steps import step
from tests.ranks import RankPool

COST = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)
FAULTS = ("lost", "twice", "altered", "altered floats", "without labels")


class _FaultyBalancer(Balancer[Any]):
    """A Balancer with the fault of a broken exchange in the third step of rank 1."""

    fault: ClassVar[str] = ""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield self._corrupt(batch) if batch.step == 2 and dist.get_rank() == 1 else batch

    def _corrupt(self, batch: Any) -> Any:
        match self.fault:
            case "lost":
                return dataclasses.replace(batch, num_real=batch.num_real - 1)
            case "twice":
                ids = batch.sample_ids.clone()
                ids[1] = ids[0]
                return dataclasses.replace(batch, sample_ids=ids)
            case "altered":
                batch.features.values()[-1] += 1
            case "altered floats":
                batch.float_features.values()[-1] += 1
            case "without labels":
                return dataclasses.replace(batch, labels=None)
        return batch


def _walk(path: Path, fault: str, has_exchange: bool = True) -> int | str:
    """Return the number of samples, or the error."""
    config = LoaderConfig(batch_size=8, num_tasks=int(has_exchange))
    with mock.patch.object(_FaultyBalancer, "fault", fault), mock.patch.object(balance, "Balancer", _FaultyBalancer):
        try:
            gain = walk_epoch(path, config, BalanceConfig(cost=COST), has_exchange=has_exchange)
        except RankError as error:
            return str(error)
    assert gain.steps[0].ratio_after < gain.steps[0].ratio_before
    return gain.num_samples


def _walk_often(rank: int, world_size: int, path: Path, rich_path: Path) -> list[int | str]:
    return [_walk(path, ""), _walk(path, "", False), *(_walk(rich_path, fault) for fault in FAULTS)]


def test_an_epoch_without_faults_passes_and_a_fault_is_noticed_on_every_rank(
    ranks: RankPool, small_dataset: Path, rich_dataset: Path
) -> None:
    found = ranks.run(3, _walk_often, small_dataset, rich_dataset)
    num_samples = found[0][0]
    assert isinstance(num_samples, int)
    assert num_samples > 150
    message = "samples differ from the dataset after balancing; steps of each rank: [[], [2], []]"
    assert found == [[num_samples, num_samples, *[message] * len(FAULTS)]] * 3
    check_seen([[2, 0], [1], []], 3)


def _walked(strategy: str, after: list[list[int]]) -> Gain:
    before = [[30, 10], [10, 20]]
    return Gain(2, strategy, [
        step(n, before=before[n], after=loads, lower_bound=sum(loads) // 2, moved_samples=n)
        for n, loads in enumerate(after)
    ])  # fmt: skip


GAINS = [_walked("none", [[30, 10], [10, 20]]), _walked("lpt-swap", [[20, 20], [15, 15]])]


def test_the_table_fits_in_80_columns_and_shows_the_gain() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(gains_table(GAINS))
    rows = {cells[1]: cells for line in capture.get().splitlines() if len(cells := line.split()) > 8}
    # Idle 1 - 70/100; speed-up (30 + 20) / (20 + 15), of the steps 30 / 20 and 20 / 15; bounds of 20 and 15.
    assert rows["none"] == ["2", "none", "30.0%", "30.0%", "1.00x", "1.00", "±", "0.00", "1.417", "0%", "25%"]
    assert rows["lpt-swap"] == ["2", "lpt-swap", "30.0%", "0.0%", "1.43x", "1.42", "±", "0.08", "1.000", "0%", "25%"]


def test_the_plot_has_the_idle_time_of_the_typical_step_and_of_all_steps(tmp_path: Path) -> None:
    path = tmp_path / "new" / "balance.png"
    of_a_step, of_all = draw_loads(GAINS, path, title="two ranks").axes
    assert path.read_bytes().startswith(b"\x89PNG")
    # The first step has the median imbalance: 30 of a mean of 20.
    assert [text.get_text().strip() for text in of_a_step.texts] == ["idle 33.33%", "idle 0.00%"]
    assert [line.get_label() for line in of_all.lines] == ["none: 30.00%", "lpt-swap: 0.00%"]
    idle = np.array([line.get_ydata() for line in of_all.lines])
    np.testing.assert_allclose(idle, np.array([[25, 100 / 3], [0, 0]]))
