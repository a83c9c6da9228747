from .attention_timing import AttentionTracker, LayerTiming, gather_timings
from .dmp import load_dmp, make_dmp_optimizer, save_dmp
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
from .loss import LossAverage, accumulate, in_batch_mask, label_bits, scale_loss
from .metrics import BinaryAUC, ClassificationMetrics, RankingMetrics, RegressionMetrics
from .peaks import DevicePeaks, computed_peaks, device_peaks, peaks_by_name
from .predictions import PredictionWriter
from .step_timer import StepTimer
from .watch import FiniteCheck, MemoryUsage, MemoryWatch, StallWatch

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
    "PredictionWriter",
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
    "load_dmp",
    "make_dmp_optimizer",
    "mlp_flops",
    "peaks_by_name",
    "save_dmp",
    "scale_loss",
]
