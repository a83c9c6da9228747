from .batches.batch import JaggedBatch, LossKey, SemanticIdBatch, SequenceBatch, dense, host
from .batches.padding import PaddedBatches, pad_batch
from .codes import CodeTable
from .collate.jagged import JaggedCollate, jagged
from .config import Cross, LoaderConfig, Mixture, Negatives, Pools, Requests, StochasticLength, Targets, TimeWindows
from .elastic_sampler import ElasticLoader, ElasticSampler
from .loader import Loader, build_loader
from .log_loader import LogLoader
from .random_batches import RandomBatches, RandomData, RandomFeature, random_codes
from .replay import Replay
from .stream_loader import StreamConfig, StreamLoader, build_stream_loader
from .vectors import VectorLookup

__all__ = [
    "CodeTable",
    "Cross",
    "ElasticLoader",
    "ElasticSampler",
    "JaggedBatch",
    "JaggedCollate",
    "Loader",
    "LoaderConfig",
    "LogLoader",
    "LossKey",
    "Mixture",
    "Negatives",
    "PaddedBatches",
    "Pools",
    "RandomBatches",
    "RandomData",
    "RandomFeature",
    "Replay",
    "Requests",
    "SemanticIdBatch",
    "SequenceBatch",
    "StochasticLength",
    "StreamConfig",
    "StreamLoader",
    "Targets",
    "TimeWindows",
    "VectorLookup",
    "build_loader",
    "build_stream_loader",
    "dense",
    "host",
    "jagged",
    "pad_batch",
    "random_codes",
]
