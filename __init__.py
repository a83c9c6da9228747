"""The data side of multi-GPU training for generative recommenders: raw logs in, equal work on every rank out."""

__version__ = "0.1.0"
