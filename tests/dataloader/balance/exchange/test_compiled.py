import importlib
import os
import subprocess
import sys
from pathlib import Path

from numba.core.dispatcher import Dispatcher

from evenrank.dataloader.balance.exchange import device, layout
from evenrank.dataloader.balance.partition import strategies

_BALANCE = """
from numba.core import event
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer
from tests.dataloader.balance.costs import rich_tokens
from tests.dataloader.rich_batch import rich_batch

batches = [rich_batch([[(1, 2), (3, 4)], [(5, 6), (7, 8)]])] * 3
for strategy in STRATEGIES:
    for options in ({}, {"max_tokens_per_rank": 20, "on_overflow": "warn"}):
        with Balancer(batches, BalanceConfig(cost=rich_tokens, strategy=strategy, on_step=id, **options)) as balancer:
            with event.install_recorder("numba:compile") as recorder:
                assert len(list(balancer)) == 3
            print(len(recorder.buffer), end="")
"""


def test_a_balancer_compiles_nothing_once_it_is_made() -> None:
    command = [sys.executable, "-P", "-W", "ignore", "-c", _BALANCE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout == 8 * "0"


def test_all_compiled_loops_of_planning_and_exchanging_release_the_gil() -> None:
    names = [path.stem for path in Path(strategies.__file__).parent.glob("[!_]*.py")]
    modules = [importlib.import_module(f"{strategies.__package__}.{name}") for name in names] + [device, layout]
    functions = [value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)]
    assert len(functions) > 30
    for function in functions:
        assert function.targetoptions["nogil"], function
