from .attention_timing import AttentionTracker as AttentionTracker
from .attention_timing import LayerTiming as LayerTiming
from .attention_timing import gather_timings as gather_timings
from .embedding_caches import CacheUse as CacheUse
from .embedding_caches import EmbeddingCaches as EmbeddingCaches
from .error_metrics import ClassificationMetrics as ClassificationMetrics
from .error_metrics import RegressionMetrics as RegressionMetrics
from .finite import FiniteCheck as FiniteCheck
from .flops import Flops as Flops
from .flops import ModelFlops as ModelFlops
from .flops import Work as Work
from .flops import batch_work as batch_work
from .flops import causal_work as causal_work
from .flops import decoder_flops as decoder_flops
from .flops import hstu_flops as hstu_flops
from .flops import hstu_pairs as hstu_pairs
from .flops import hstu_work as hstu_work
from .flops import mlp_flops as mlp_flops
from .loss import LossAverage as LossAverage
from .loss import accumulate as accumulate
from .loss import label_bits as label_bits
from .loss import scale_loss as scale_loss
from .metrics import BinaryAUC as BinaryAUC
from .metrics import RankingMetrics as RankingMetrics
from .negatives import in_batch_mask as in_batch_mask
from .pipelines import PIPELINES as PIPELINES
from .pipelines import Pipeline as Pipeline
from .pipelines import PipelineForward as PipelineForward
from .pipelines import PipelineStep as PipelineStep
from .pipelines import make_pipeline as make_pipeline
from .pipelines import register_pipeline as register_pipeline
from .pipelines import run_pipeline as run_pipeline
from .step_timer import StepTimer as StepTimer
from .throughput import DevicePeaks as DevicePeaks
from .throughput import Throughput as Throughput
from .throughput import ThroughputMeter as ThroughputMeter
from .throughput import computed_peaks as computed_peaks
from .throughput import device_peaks as device_peaks
from .throughput import peaks_by_name as peaks_by_name
from .watch import MemoryUsage as MemoryUsage
from .watch import MemoryWatch as MemoryWatch
from .watch import StallWatch as StallWatch

__all__ = [
    "PIPELINES",
    "AttentionTracker",
    "BinaryAUC",
    "CacheUse",
    "ClassificationMetrics",
    "DevicePeaks",
    "EmbeddingCaches",
    "FiniteCheck",
    "Flops",
    "LayerTiming",
    "LossAverage",
    "MemoryUsage",
    "MemoryWatch",
    "ModelFlops",
    "Pipeline",
    "PipelineForward",
    "PipelineStep",
    "RankingMetrics",
    "RegressionMetrics",
    "StallWatch",
    "StepTimer",
    "Throughput",
    "ThroughputMeter",
    "Work",
    "accumulate",
    "batch_work",
    "causal_work",
    "computed_peaks",
    "decoder_flops",
    "device_peaks",
    "gather_timings",
    "hstu_flops",
    "hstu_pairs",
    "hstu_work",
    "in_batch_mask",
    "label_bits",
    "make_pipeline",
    "mlp_flops",
    "peaks_by_name",
    "register_pipeline",
    "run_pipeline",
    "scale_loss",
]
