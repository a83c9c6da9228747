from .error_metrics import ClassificationMetrics, RegressionMetrics
from .finite import FiniteCheck
from .loss import LossAverage, accumulate, label_bits, scale_loss
from .metrics import BinaryAUC, RankingMetrics
from .negatives import in_batch_mask
from .performance import (
    AttentionTracker,
    DevicePeaks,
    Flops,
    LayerTiming,
    ModelFlops,
    Work,
    batch_work,
    causal_work,
    computed_peaks,
    decoder_flops,
    device_peaks,
    gather_timings,
    hstu_flops,
    hstu_pairs,
    hstu_work,
    mlp_flops,
    peaks_by_name,
)
from .step_timer import StepTimer
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
