"""Samples -> balanced batches."""

from evenrank.dataloader.batch import JaggedBatch, SemanticIdBatch, SequenceBatch, dense, host
from evenrank.dataloader.config import LoaderConfig, SemanticIdConfig
from evenrank.dataloader.loader import Loader, build_loader
from evenrank.dataloader.pad import PaddedBatches, pad_batch
from evenrank.dataloader.random_batches import RandomBatches, RandomData
from evenrank.dataloader.samples import Mixture

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
    "build_loader",
    "dense",
    "host",
    "pad_batch",
]
