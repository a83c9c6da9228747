"""Walk one epoch of a dataset through the Balancer: load before and after, and every sample seen exactly once.

torchrun --nproc_per_node 4 scripts/inspect_balance.py out/ml
"""

from evenrank.cli.inspect_balance import inspect_balance_command
from evenrank.cli.main import run_command

if __name__ == "__main__":
    run_command(inspect_balance_command)
