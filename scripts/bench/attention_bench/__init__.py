"""Benchmarks of attention alone, on one GPU; see the scripts `attention*.py` and `balanced_attention.py`."""
