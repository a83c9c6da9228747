"""Time the forward and backward of an attention on samples of given lengths, and count their operations."""

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from evenrank.core.errors import ConfigError
from hstu.attention import Sequences
from hstu.config import Attention

WARM_UP, RUNS = 10, 50
MIN_RUNS = 3
SCALE_LENGTH = 4096
KERNEL_BACKWARD, MODEL_BACKWARD = 2.5, 2.0
"""Operations of the backward over the forward's, of which kernels that compute the scores again are said to have 2.5,
and of which MFU counts 2; see `Flops.with_recomputed_scores`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """What is the same for all samples."""

    count: int
    head_dim: int
    dtype: torch.dtype

    def forward_flops(self, lengths: Sequence[int]) -> int:
        """Return the operations of causal attention in the forward: two products for each pair of tokens."""
        return 4 * self.count * self.head_dim * sum(length * (length + 1) // 2 for length in lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """The time of a function."""

    ms: float
    """Median."""
    runs: int
    """Of which it is the median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """The times of both passes."""

    forward: Times
    backward: Times

    @property
    def both(self) -> Times:
        """The sum of the two medians, and the fewer runs."""
        ms = self.forward.ms + self.backward.ms
        return Times(ms=ms, runs=min(self.forward.runs, self.backward.runs))


Timer = Callable[[Callable[[], object]], Times]


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaTimer:
    """Times a function on the current CUDA device, each run on a level-2 cache that holds nothing of the last."""

    seconds: float = math.inf
    """Fewer than 10 warm-up and 50 timed runs are made of functions for which these would take longer."""

    def __call__(self, run: Callable[[], object]) -> Times:
        """Return the median time, after warm-up runs."""
        run()  # compiles
        (estimate,) = _milliseconds(run, 1)
        warm_up, runs = planned_runs(estimate, self.seconds)
        return Times(ms=statistics.median(_milliseconds(run, warm_up + runs)[warm_up:]), runs=runs)


def planned_runs(ms: float, seconds: float) -> tuple[int, int]:
    """Return how many warm-up and timed runs of `ms` fit into `seconds`: at most 10 and 50, at least 1 and 3."""
    share = min(1.0, seconds / ((WARM_UP + RUNS) * ms / 1e3)) if ms > 0 else 1.0
    return max(int(WARM_UP * share), 1), max(int(RUNS * share), MIN_RUNS)


def _milliseconds(run: Callable[[], object], runs: int) -> list[float]:
    cache = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for start, stop in events:
        cache.zero_()
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in events]


def time_passes(
    attention: Attention, lengths: Sequence[int], heads: Heads, *, timer: Timer, device: str = "cuda"
) -> Passes:
    """Time both passes of an attention on samples without contextual tokens and candidates.

    Args:
        attention: one of `ATTENTIONS`.
        lengths: tokens of each sample.
        heads: the rest of the shape.
        timer: what times a function.
        device: where the tensors are.

    Raises:
        torch.OutOfMemoryError: they do not fit.
    """
    sizes = torch.tensor(lengths)
    none = torch.zeros(len(lengths), dtype=torch.int64, device=device)
    sequences = Sequences(
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).to(device),
        num_contextual=none,
        num_candidates=none,
        num_tokens=sum(lengths),
        max_length=max(lengths),
    )
    # In one tensor, as in a layer.
    fused = torch.randn(sum(lengths), heads.count, 4, heads.head_dim, device=device, dtype=heads.dtype)
    query, key, value = (tensor.detach().requires_grad_() for tensor in fused.unbind(2)[:3])
    run = functools.partial(attention, query, key, value, sequences, scale_length=SCALE_LENGTH)
    return _time_both(run, (query, key, value), fused[:, :, 3], timer)


def time_softmax(
    backend: SDPBackend, samples: int, length: int, heads: Heads, *, timer: Timer, device: str = "cuda"
) -> Passes:
    """Time both passes of PyTorch's causal attention, with softmax, on samples of equal length.

    Args:
        backend: of `scaled_dot_product_attention`.
        samples: how many.
        length: tokens of each sample.
        heads: the rest of the shape.
        timer: what times a function.
        device: where the tensors are.

    Raises:
        RuntimeError: the backend cannot, for instance because of the head_dim.
    """
    shape = (4, samples, length, heads.count, heads.head_dim)  # whose order flash attention reads without a copy
    *inputs, gradient = torch.randn(shape, device=device, dtype=heads.dtype).transpose(2, 3).unbind()
    query, key, value = (tensor.detach().requires_grad_() for tensor in inputs)

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, is_causal=True)

    return _time_both(run, (query, key, value), gradient, timer)


def _time_both(
    run: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], gradient: torch.Tensor, timer: Timer
) -> Passes:
    forward = timer(run)
    output = run()
    backward = timer(lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True))
    return Passes(forward=forward, backward=backward)


def require_cuda() -> None:
    """Check that there is a device to time on.

    Raises:
        ConfigError: there is none.
    """
    if not torch.cuda.is_available():
        raise ConfigError("this benchmark times a CUDA device, and there is none; run it on a host with a GPU")


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name.

    Raises:
        ConfigError: attention has no such dtype.
    """
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if name not in dtypes:
        raise ConfigError(f"dtype must be one of {', '.join(dtypes)}, got {name!r}")
    return dtypes[name]
