from .attention_timing import AttentionTracker, LayerTiming, gather_timings
from .error_metrics import ClassificationMetrics, RegressionMetrics
from .finite import FiniteCheck
from .flops import (
    Flops,
    ModelFlops,
    Work,
    batch_work,
    causal_work,
    decoder_flops,
    hstu_flops,
    hstu_pairs,
    hstu_work,
    mlp_flops,
)
from .loss import LossAverage, accumulate, label_bits, scale_loss
from .metrics import BinaryAUC, RankingMetrics
from .negatives import in_batch_mask
from .step_timer import StepTimer
from .throughput import DevicePeaks, Throughput, ThroughputMeter, computed_peaks, device_peaks, peaks_by_name
from .watch import MemoryUsage, MemoryWatch, StallWatch

__all__ = [
    "AttentionTracker",
    "BinaryAUC",
    "ClassificationMetrics",
    "DevicePeaks",
    "FiniteCheck",
    "Flops",
    "LayerTiming",
    "LossAverage",
    "MemoryUsage",
    "MemoryWatch",
    "ModelFlops",
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
    "mlp_flops",
    "peaks_by_name",
    "scale_loss",
]
