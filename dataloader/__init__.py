"""Samples -> balanced batches."""

from evenrank.dataloader.batch import JaggedBatch, SequenceBatch, dense, host
from evenrank.dataloader.loader import LoaderConfig, SequenceLoader, build_loader
from evenrank.dataloader.pad import PaddedBatches, pad_batch

__all__ = [
    "JaggedBatch",
    "LoaderConfig",
    "PaddedBatches",
    "SequenceBatch",
    "SequenceLoader",
    "build_loader",
    "dense",
    "host",
    "pad_batch",
]
