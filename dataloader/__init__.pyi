from .batch import JaggedBatch as JaggedBatch
from .batch import SemanticIdBatch as SemanticIdBatch
from .batch import SequenceBatch as SequenceBatch
from .batch import dense as dense
from .batch import host as host
from .collate.jagged import JaggedCollate as JaggedCollate
from .collate.jagged import jagged as jagged
from .collate.semantic_ids import CodeTable as CodeTable
from .config import LoaderConfig as LoaderConfig
from .config import SemanticIdConfig as SemanticIdConfig
from .loader import Loader as Loader
from .loader import build_loader as build_loader
from .loss_key import LossKey as LossKey
from .pad import PaddedBatches as PaddedBatches
from .pad import pad_batch as pad_batch
from .random_batches import RandomBatches as RandomBatches
from .random_batches import random_codes as random_codes
from .random_data import RandomData as RandomData
from .random_data import RandomFeature as RandomFeature
from .samples import Mixture as Mixture
from .stream_loader import StreamConfig as StreamConfig
from .stream_loader import StreamLoader as StreamLoader
from .stream_loader import build_stream_loader as build_stream_loader
from .stream_state import merge_stream_states as merge_stream_states

__all__ = [
    "CodeTable",
    "JaggedBatch",
    "JaggedCollate",
    "Loader",
    "LoaderConfig",
    "LossKey",
    "Mixture",
    "PaddedBatches",
    "RandomBatches",
    "RandomData",
    "RandomFeature",
    "SemanticIdBatch",
    "SemanticIdConfig",
    "SequenceBatch",
    "StreamConfig",
    "StreamLoader",
    "build_loader",
    "build_stream_loader",
    "dense",
    "host",
    "jagged",
    "merge_stream_states",
    "pad_batch",
    "random_codes",
]
