"""Samples -> balanced batches."""

from evenrank.dataloader.batch import JaggedBatch, SemanticIdBatch, SequenceBatch, dense, host
from evenrank.dataloader.config import LoaderConfig, SemanticIdConfig
from evenrank.dataloader.loader import Loader, build_loader
from evenrank.dataloader.pad import PaddedBatches, pad_batch
from evenrank.dataloader.random_batches import RandomBatches, RandomData, random_codes
from evenrank.dataloader.samples import Mixture
from evenrank.dataloader.stream_loader import StreamLoader, build_stream_loader, merge_stream_states
from evenrank.datasets.stream import StreamConfig

__all__ = [
    "JaggedBatch",
    "Loader",
    "LoaderConfig",
    "Mixture",
    "PaddedBatches",
    "RandomBatches",
    "RandomData",
    "SemanticIdBatch",
    "SemanticIdConfig",
    "SequenceBatch",
    "StreamConfig",
    "StreamLoader",
    "build_loader",
    "build_stream_loader",
    "dense",
    "host",
    "merge_stream_states",
    "pad_batch",
    "random_codes",
]
