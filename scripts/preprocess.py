"""Convert raw logs to sequence Parquet; the same as `evenrank preprocess`."""

from evenrank.cli.main import run_command
from evenrank.cli.preprocess import preprocess_command

if __name__ == "__main__":
    run_command(preprocess_command)
