"""Show the content of a dataset; the same as `evenrank inspect`."""

from evenrank.cli.inspect_dataset import inspect_command
from evenrank.cli.main import run_command

if __name__ == "__main__":
    run_command(inspect_command)
