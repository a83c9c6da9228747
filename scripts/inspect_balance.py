"""Iterate over one epoch of a dataset through the Balancer; show the loads and check every sample.

torchrun --nproc_per_node 4 scripts/inspect_balance.py out/ml-20m
"""

from evenrank.cli.inspect_balance import inspect_balance_command
from evenrank.cli.main import run_command

if __name__ == "__main__":
    run_command(inspect_balance_command)
