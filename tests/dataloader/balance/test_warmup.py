import subprocess
import sys
import threading

import numpy as np

from evenrank.dataloader.balance.partition.strategies import partition
from evenrank.dataloader.balance.warmup import compile_ahead
from evenrank.datasets.distributions import Lognormal

_PLAN_AFTER_COMPILING = """
import numpy as np
from numba.core import event
from evenrank.dataloader.balance.warmup import compile_ahead
from evenrank.dataloader.balance.partition.strategies import STRATEGIES, partition

compile_ahead()
rng = np.random.default_rng(0)
costs, sizes = rng.integers(0, 1 << 40, 512), rng.integers(0, 1000, 512)
with event.install_recorder("numba:compile") as recorder:
    for strategy in STRATEGIES:
        partition(costs, 64, strategy=strategy, sizes=sizes)
        partition(costs, 64, strategy=strategy, sizes=sizes, max_tokens_per_rank=4100, on_overflow="warn")
print(len(recorder.buffer))
"""


def test_planning_compiles_nothing_after_compiling_ahead() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _PLAN_AFTER_COMPILING]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"


def test_the_main_thread_goes_on_during_a_long_plan() -> None:
    world_size = 1 << 16
    tokens = Lognormal(mean=512, std=512).sample(np.random.default_rng(0), world_size * 32)
    costs = 10 * tokens * 1024 + 4 * tokens**2
    compile_ahead()
    planning = threading.Thread(target=partition, args=(costs, world_size), kwargs={"sizes": tokens})
    # Waits are counted in turns of this loop, which needs the interpreter's lock for each. A plan that held it would
    # leave a handful.
    turns = 0
    planning.start()
    while planning.is_alive():
        turns += 1
    assert turns > 50_000


def test_compiling_from_several_threads_at_once_is_safe() -> None:
    threads = [threading.Thread(target=compile_ahead) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert partition(np.array([3, 1, 1, 1]), 2).loads(np.array([3, 1, 1, 1])).tolist() == [4, 2]
