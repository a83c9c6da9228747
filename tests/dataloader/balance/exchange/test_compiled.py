import importlib
import os
import subprocess
import sys
from pathlib import Path

from numba.core.dispatcher import Dispatcher

from evenrank.dataloader.balance.exchange import device, layout
from evenrank.dataloader.balance.partition import strategies

_PLAN_AFTER_WARM_UP = """
import numpy as np
from numba.core import event
from datetime import timedelta
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, partition
from evenrank.dataloader.balance.exchange.device import make_device
from evenrank.dataloader.balance.exchange.exchange import Exchange, Handle
from evenrank.dataloader.balance.ranks.process_group import FailFastGroup, Members
from evenrank.dataloader.balance.step_planner import StepPlanner
from evenrank.dataloader.balance.partition.strategies import warm_up
from evenrank.dataloader.balance.exchange.exchange import warm_up as warm_up_exchange
from evenrank.dataloader.balance.refit import CostSchedule
from tests.dataloader.balance.costs import rich_tokens
from tests.dataloader.rich_batch import rich_batch

for strategy in STRATEGIES:
    warm_up(strategy, limits_tokens=True)
warm_up_exchange()
rng = np.random.default_rng(0)
costs, tokens = rng.integers(0, 1 << 40, 512), rng.integers(0, 1000, 512)
batch = rich_batch([[(1, 2), (3, 4)], [(5, 6), (7, 8)]])
group = FailFastGroup(Members(rank=0, world_size=1, store=None), "alone", timedelta(seconds=1))
exchange = Exchange("all-to-all", group, make_device(None), rank=0)
config = BalanceConfig(cost=rich_tokens)
planner = StepPlanner(
    dict,
    config=config,
    group=group,
    prepare=exchange.prepare,
    batch_size=0,
    is_measured=True,
    costs=CostSchedule(rich_tokens),
)
with event.install_recorder("numba:compile") as recorder:
    planner.plan([step := Handle(batch)])
    exchange.launch(step)
    exchange.finish(step)
    for strategy in STRATEGIES:
        partition(costs, 64, strategy=strategy, tokens=tokens)
        partition(costs, 64, strategy=strategy, tokens=tokens, max_tokens_per_rank=4100, on_overflow="warn")
print(len(recorder.buffer))
"""


def test_planning_and_exchanging_compile_nothing_after_warm_up() -> None:
    command = [sys.executable, "-P", "-W", "ignore", "-c", _PLAN_AFTER_WARM_UP]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout == "0\n"


def test_all_compiled_loops_of_planning_and_exchanging_release_the_gil() -> None:
    names = [path.stem for path in Path(strategies.__file__).parent.glob("[!_]*.py")]
    modules = [importlib.import_module(f"{strategies.__package__}.{name}") for name in names] + [device, layout]
    functions = [value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)]
    assert len(functions) > 30
    for function in functions:
        assert function.targetoptions["nogil"], function
