"""Time HSTU attention by jagged kernels on one GPU, beside others, and skewed lengths beside equal ones.

    .venv/bin/python scripts/bench/attention.py [--samples 32] [--length 2048] [--width 1024] [--head-dims 64,128,256]

    equal     all samples have --length tokens; for each dtype, head_dim and implementation; in bfloat16 also PyTorch's
              causal attention, with softmax, by the backends `flash` and `cudnn` where they can
    x_softmax rate of `triton` over that of the faster of these two
    skewed    lognormal lengths (mean 1,024, std 1,024, at most 4,096): medians of 5 draws; x_equal: time over that of
              equal lengths of the same cost

Milliseconds are the median of 50 runs after 10 warm-up runs, each on a cold level-2 cache. FLOPs are those of causal
attention: two matrix products per pair of tokens in the forward pass, and 2.5 times as many in the backward pass, which
computes the scores again. Other operations of an implementation are not counted.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from evenrank.datasets.distributions import Lognormal
from hstu.attention import Sequences
from hstu.config import ATTENTIONS
from report import Row, emit, machine, show

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SOFTMAX = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
SKEWED, DRAWS = Lognormal(mean=1024, std=1024, high=4096), 5
WARM_UP, RUNS, SCALE_LENGTH = 10, 50, 4096
KERNEL_BACKWARD = 2.5
"""Operations of the backward over the forward's."""

Timer = Callable[[Callable[[], object]], float]
"""Returns the milliseconds of a function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """What is the same for all samples."""

    count: int
    head_dim: int
    dtype: torch.dtype

    def forward_flops(self, lengths: Sequence[int]) -> int:
        """Return the operations of causal attention in the forward: two products for each pair of tokens."""
        return 4 * self.count * self.head_dim * sum(length * (length + 1) // 2 for length in lengths)


class Passes(NamedTuple):
    """Milliseconds of both passes."""

    forward: float
    backward: float


def cuda_ms(run: Callable[[], object]) -> float:
    """Return the median milliseconds of a function on the current CUDA device, after warm-up runs."""
    cache = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(WARM_UP + RUNS)]
    for start, stop in events:
        cache.zero_()  # so that the level-2 cache holds nothing of the run before
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events[WARM_UP:])


def time_hstu(name: str, lengths: Sequence[int], heads: Heads, timer: Timer, device: str = "cuda") -> Passes:
    """Time an implementation of HSTU attention on samples without contextual tokens and candidates."""
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
    inputs = [tensor.detach().requires_grad_() for tensor in fused.unbind(2)[:3]]
    run = functools.partial(ATTENTIONS[name], *inputs, sequences, scale_length=SCALE_LENGTH)
    return _time_both(run, inputs, fused[:, :, 3], timer)


def time_softmax(
    backend: SDPBackend, samples: int, length: int, heads: Heads, timer: Timer, device: str = "cuda"
) -> Passes:
    """Time PyTorch's causal attention, with softmax, on samples of equal length.

    Raises:
        RuntimeError: the backend cannot, for instance because of the head_dim.
    """
    shape = (4, samples, length, heads.count, heads.head_dim)  # whose order flash attention reads without a copy
    *tensors, gradient = torch.randn(shape, device=device, dtype=heads.dtype).transpose(2, 3).unbind()
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*inputs, is_causal=True)

    return _time_both(run, inputs, gradient, timer)


def _time_both(
    run: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], gradient: torch.Tensor, timer: Timer
) -> Passes:
    forward, output = timer(run), run()
    return Passes(forward, timer(lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)))


def measure(name: str, lengths: Sequence[int], heads: Heads) -> Row:
    """Return times and rates of an implementation, or why there are none."""
    try:
        if name in SOFTMAX:
            passes = time_softmax(SOFTMAX[name], len(lengths), lengths[0], heads, cuda_ms)
        else:
            passes = time_hstu(name, lengths, heads, cuda_ms)
    except torch.OutOfMemoryError:
        return {"failure": "out of memory"}
    except RuntimeError as error:  # a backend that cannot: warnings say why
        if name not in SOFTMAX:
            raise
        return {"failure": str(error).splitlines()[0]}
    tflop = heads.forward_flops(lengths) / 1e9  # per millisecond, 1e12 per second
    return {
        "forward_ms": round(passes.forward, 3),
        "backward_ms": round(passes.backward, 3),
        "both_ms": round(sum(passes), 3),
        "forward_tflops": round(tflop / passes.forward, 1),
        "both_tflops": round((1 + KERNEL_BACKWARD) * tflop / sum(passes), 1),
    }


def compare(heads: Heads, samples: int, length: int) -> list[Row]:
    """Return the rows of equal and of skewed lengths."""
    names = ["triton", "padded", *(SOFTMAX if heads.dtype == torch.bfloat16 else ())]
    rows = {name: measure(name, [length] * samples, heads) for name in names}
    others = [rows[name]["both_ms"] for name in SOFTMAX if "both_ms" in rows.get(name, {})]
    if others:
        rows["triton"]["x_softmax"] = round(min(others) / rows["triton"]["both_ms"], 3)
    found = [{"lengths": "equal", "implementation": name, **row} for name, row in rows.items()]
    draws, ratios = [], []
    for seed in range(DRAWS):
        skewed = SKEWED.sample(np.random.default_rng(seed), samples).tolist()
        equal = [round((sum(each**2 for each in skewed) / samples) ** 0.5)] * samples
        draws.append(measure("triton", skewed, heads))
        ratios.append(round(draws[-1]["both_ms"] / measure("triton", equal, heads)["both_ms"], 3))
    medians = {key: round(statistics.median(draw[key] for draw in draws), 3) for key in draws[0]}
    return [*found, {"lengths": "skewed", "implementation": "triton", **medians, "x_equal": ratios}]


def main() -> None:
    """Time all dtypes and shapes of heads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=32, help="of a batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the samples of equal length")
    parser.add_argument("--width", type=int, default=1024, help="heads times head_dim")
    parser.add_argument("--head-dims", default="64,128,256", help="comma-separated")
    parser.add_argument("--dtypes", default="bfloat16,float32", help=f"comma-separated, of {', '.join(DTYPES)}")
    options = parser.parse_args()
    if unknown := [name for name in options.dtypes.split(",") if name not in DTYPES]:
        parser.error(f"--dtypes must be of {', '.join(DTYPES)}, got {unknown[0]!r}")
    if not torch.cuda.is_available():
        parser.error("this benchmark times a CUDA device, and PyTorch finds none; run it on a host with a GPU")
    emit(machine())
    rows = []
    for dtype in options.dtypes.split(","):
        for head_dim in map(int, options.head_dims.split(",")):
            heads = Heads(count=options.width // head_dim, head_dim=head_dim, dtype=DTYPES[dtype])
            shape = {"dtype": dtype, "head_dim": head_dim}
            rows += [emit({**shape, **row}) for row in compare(heads, options.samples, options.length)]
    show(rows)


if __name__ == "__main__":
    main()
