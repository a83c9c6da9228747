"""Time HSTU attention by jagged kernels on one GPU, beside others, and skewed lengths beside equal ones.

    .venv/bin/python scripts/bench/attention.py [--dtypes bfloat16 float32] [--head-dims 64 128 256]

    equal     32 samples of 2,048 tokens, 1,024 wide; for each dtype, head_dim and implementation; in bfloat16 also
              PyTorch's causal attention, with softmax, by the backends `flash` and `cudnn` where they can
    x_softmax rate of `triton` over that of the faster of these two
    skewed    lognormal lengths (mean 1,024, std 1,024, at most 4,096): medians of 5 draws; x_equal: time over that of
              equal lengths of the same cost

Milliseconds are the median of 50 runs after 10 warm-up runs, each on a cold level-2 cache. FLOPs are those of causal
attention: two matrix products per pair of tokens in the forward pass, and 2.5 times as many in the backward pass, which
computes the scores again. Other operations of an implementation are not counted.
"""

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from evenrank.datasets.distributions import Lognormal
from hstu import ATTENTIONS, Sequences
from report import Row, emit, machine, show

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SOFTMAX = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
SKEWED, DRAWS = Lognormal(mean=1024, std=1024, high=4096), 5
SAMPLES, LENGTH, WIDTH = 32, 2048, 1024
WARM_UP, RUNS, SCALE_LENGTH = 10, 50, 4096
KERNEL_BACKWARD = 2.5  # operations of the backward over the forward's

Timer = Callable[[Callable[[], object]], float]  # returns the milliseconds of a function


class Heads(NamedTuple):
    """What is the same for all samples."""

    num_heads: int
    head_dim: int
    dtype: torch.dtype

    def forward_flops(self, lengths: Sequence[int]) -> int:
        """Return the operations of causal attention in the forward: two products for each pair of tokens."""
        return 4 * self.num_heads * self.head_dim * sum(length * (length + 1) // 2 for length in lengths)


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
    return float(statistics.median(start.elapsed_time(stop) for start, stop in events[WARM_UP:]))


def time_hstu(
    name: str, lengths: Sequence[int], heads: Heads, timer: Timer, device: str = "cuda"
) -> tuple[float, float]:
    """Return the ms of the forward and the backward of an implementation, on samples that are histories alone."""
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
    fused = torch.randn(sum(lengths), heads.num_heads, 4, heads.head_dim, device=device, dtype=heads.dtype)
    query, key, value = inputs = [tensor.detach().requires_grad_() for tensor in fused.unbind(2)[:3]]
    run = functools.partial(ATTENTIONS[name], query, key, value, sequences, scale_length=SCALE_LENGTH)
    return _time_both(run, inputs, fused[:, :, 3], timer)


def time_softmax(
    backend: SDPBackend, samples: int, length: int, heads: Heads, timer: Timer, device: str = "cuda"
) -> tuple[float, float]:
    """Time PyTorch's causal attention on samples of equal length; a RuntimeError says that the backend cannot."""
    shape = (4, samples, length, heads.num_heads, heads.head_dim)  # whose order flash attention reads without a copy
    *tensors, gradient = torch.randn(shape, device=device, dtype=heads.dtype).transpose(2, 3).unbind()
    query, key, value = inputs = [tensor.detach().requires_grad_() for tensor in tensors]

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, is_causal=True)

    return _time_both(run, inputs, gradient, timer)


def _time_both(
    run: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], gradient: torch.Tensor, timer: Timer
) -> tuple[float, float]:
    forward, output = timer(run), run()
    return forward, timer(lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True))


def measure(name: str, lengths: Sequence[int], heads: Heads) -> Row:
    """Return times and rates of an implementation, or why there are none."""
    try:
        if name in SOFTMAX:
            forward, backward = time_softmax(SOFTMAX[name], len(lengths), lengths[0], heads, cuda_ms)
        else:
            forward, backward = time_hstu(name, lengths, heads, cuda_ms)
    except torch.OutOfMemoryError:
        return {"failure": "out of memory"}
    except RuntimeError as error:  # a backend that cannot: warnings say why
        if name not in SOFTMAX:
            raise
        return {"failure": str(error).splitlines()[0]}
    tflop = heads.forward_flops(lengths) / 1e9  # per millisecond, 1e12 per second
    return {
        "forward_ms": round(forward, 3),
        "backward_ms": round(backward, 3),
        "both_ms": round(forward + backward, 3),
        "forward_tflops": round(tflop / forward, 1),
        "both_tflops": round((1 + KERNEL_BACKWARD) * tflop / (forward + backward), 1),
    }


def compare(heads: Heads) -> list[Row]:
    """Return the rows of equal and of skewed lengths."""
    names = ["triton", "padded", *(SOFTMAX if heads.dtype == torch.bfloat16 else ())]
    rows = {name: measure(name, [LENGTH] * SAMPLES, heads) for name in names}
    others = [rows[name]["both_ms"] for name in SOFTMAX if "both_ms" in rows.get(name, {})]
    if others:
        rows["triton"]["x_softmax"] = round(min(others) / rows["triton"]["both_ms"], 3)
    found = [{"lengths": "equal", "implementation": name, **row} for name, row in rows.items()]
    draws, ratios = [], []
    for seed in range(DRAWS):
        skewed = SKEWED.sample(np.random.default_rng(seed), SAMPLES).tolist()
        equal = [round((sum(each**2 for each in skewed) / SAMPLES) ** 0.5)] * SAMPLES
        draws.append(measure("triton", skewed, heads))
        ratios.append(round(draws[-1]["both_ms"] / measure("triton", equal, heads)["both_ms"], 3))
    medians = {key: round(statistics.median(draw[key] for draw in draws), 3) for key in draws[0]}
    return [*found, {"lengths": "skewed", "implementation": "triton", **medians, "x_equal": ratios}]


def main() -> None:
    """Time all dtypes and shapes of heads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark times a CUDA device, and PyTorch finds none; run it on a host with a GPU")
    emit(machine())
    rows = []
    for dtype, head_dim in itertools.product(options.dtypes, options.head_dims):
        shape = {"dtype": dtype, "head_dim": head_dim}
        rows += [emit({**shape, **row}) for row in compare(Heads(WIDTH // head_dim, head_dim, DTYPES[dtype]))]
    show(rows)


if __name__ == "__main__":
    main()
