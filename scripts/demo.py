"""Run the whole pipeline offline on synthetic data; the same as `make demo`."""

from evenrank.cli.demo import demo_command
from evenrank.cli.main import run_command

if __name__ == "__main__":
    run_command(demo_command)
