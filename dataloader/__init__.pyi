from .batches.batch import JaggedBatch as JaggedBatch
from .batches.batch import LossKey as LossKey
from .batches.batch import SemanticIdBatch as SemanticIdBatch
from .batches.batch import SequenceBatch as SequenceBatch
from .batches.batch import dense as dense
from .batches.batch import host as host
from .batches.padding import PaddedBatches as PaddedBatches
from .batches.padding import pad_batch as pad_batch
from .collate.jagged import JaggedCollate as JaggedCollate
from .collate.jagged import jagged as jagged
from .collate.negatives import Negatives as Negatives
from .collate.semantic_ids import CodeTable as CodeTable
from .config import LoaderConfig as LoaderConfig
from .config import Requests as Requests
from .config import SemanticIdConfig as SemanticIdConfig
from .config import TimeWindows as TimeWindows
from .elastic_sampler import ElasticLoader as ElasticLoader
from .elastic_sampler import ElasticSampler as ElasticSampler
from .loader import Loader as Loader
from .loader import TimeWindowLoader as TimeWindowLoader
from .loader import build_loader as build_loader
from .log_loader import LogLoader as LogLoader
from .random_batches import RandomBatches as RandomBatches
from .random_batches import RandomData as RandomData
from .random_batches import RandomFeature as RandomFeature
from .random_batches import random_codes as random_codes
from .replay import Replay as Replay
from .sampling.steps import Mixture as Mixture
from .stream_loader import StreamConfig as StreamConfig
from .stream_loader import StreamLoader as StreamLoader
from .stream_loader import build_stream_loader as build_stream_loader
from .stream_loader import merge_stream_states as merge_stream_states

__all__ = [
    "CodeTable",
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
    "RandomBatches",
    "RandomData",
    "RandomFeature",
    "Replay",
    "Requests",
    "SemanticIdBatch",
    "SemanticIdConfig",
    "SequenceBatch",
    "StreamConfig",
    "StreamLoader",
    "TimeWindowLoader",
    "TimeWindows",
    "build_loader",
    "build_stream_loader",
    "dense",
    "host",
    "jagged",
    "merge_stream_states",
    "pad_batch",
    "random_codes",
]
