"""The command `evenrank`, and the programs of `scripts/`."""
