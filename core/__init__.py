"""What every other folder builds on: the exceptions, the decorator of compiled loops, the hash function."""
