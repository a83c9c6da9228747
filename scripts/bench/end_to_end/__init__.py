"""The training benchmark of `scripts/bench/train.py`: what balancing buys, end to end."""
