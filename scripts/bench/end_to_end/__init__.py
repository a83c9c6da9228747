"""The training benchmark: from experiments in TOML to a row for each run."""
