"""Time HSTU attention by jagged kernels on one GPU, beside the padded reference, and skewed lengths beside equal ones.

    python scripts/bench/attention.py [--samples 32] [--length 2048] [--width 1024] [--head-dims 64,128,256]

Prints one JSON line per row: milliseconds (median of 50 runs after 10 warm-up runs), TFLOP/s, and ratios.

    equal     all samples have --length tokens; for each head_dim and implementation
    skewed    lognormal lengths (mean 1,024, std 1,024, at most 4,096), beside equal ones of the same cost: `ratio` is
              the time of the skewed over the time of the equal lengths

FLOPs are those of causal attention: two matrix products per pair of tokens in the forward pass, and 2.5 times as many
in the backward pass, which computes the scores again. What an implementation computes in addition is not counted.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from hstu.attention import Sequences, padded_attention
from hstu.triton_attention import triton_attention

WARM_UP, RUNS = 10, 50
BACKWARD_FLOPS = 2.5  # times the forward's
SCALE_LENGTH = 4096
SKEWED_DRAWS = 5
IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {"triton": triton_attention, "padded": padded_attention}


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048, help="tokens of the samples of equal length")
    parser.add_argument("--width", type=int, default=1024, help="heads times head_dim")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    options = parser.parse_args()
    _print(device=torch.cuda.get_device_name(), torch=torch.__version__)
    for dtype in [getattr(torch, name) for name in options.dtypes.split(",")]:
        for head_dim in map(int, options.head_dims.split(",")):
            shape = {"dtype": str(dtype).removeprefix("torch."), "head_dim": head_dim}
            for name in IMPLEMENTATIONS:
                times = _measure(name, [options.length] * options.samples, options.width // head_dim, head_dim, dtype)
                _print(row="equal", implementation=name, **shape, **times)
            for draw in range(SKEWED_DRAWS):
                skewed = _lognormal(options.samples, draw)
                cost = sum(length**2 for length in skewed)
                equal = [round((cost / options.samples) ** 0.5)] * options.samples
                rows = [
                    _measure("triton", list(n), options.width // head_dim, head_dim, dtype) for n in (skewed, equal)
                ]
                ratios = {
                    f"{key}_ratio": round(rows[0][key] / rows[1][key], 3) for key in rows[0] if key.endswith("ms")
                }
                _print(row="skewed", draw=draw, longest=max(skewed), equal_length=equal[0], **shape, **ratios)


def _lognormal(samples: int, seed: int, mean: float = 1024, std: float = 1024, high: int = 4096) -> list[int]:
    variance = np.log(1 + (std / mean) ** 2)
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - variance / 2, variance**0.5, samples)
    return [int(length) for length in np.clip(drawn, 1, high)]


def _measure(name: str, lengths: Sequence[int], heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return times and rates of an implementation, or that it ran out of memory."""
    sizes = torch.tensor(lengths)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).cuda()
    none = torch.zeros(len(lengths), dtype=torch.int64, device="cuda")
    tokens = sum(lengths)
    sequences = Sequences(
        offsets=offsets, num_contextual=none, num_candidates=none, num_tokens=tokens, max_length=max(lengths)
    )
    fused = torch.randn(tokens, heads, 4, head_dim, device="cuda").to(dtype)
    query, key, value, gradient = fused.unbind(2)
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    attention = IMPLEMENTATIONS[name]
    try:
        forward = _time(lambda: attention(*inputs, sequences, scale_length=SCALE_LENGTH))
        output = attention(*inputs, sequences, scale_length=SCALE_LENGTH)
        backward = _time(lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True))
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    flops = 2 * 2 * heads * head_dim * sum(length * (length + 1) // 2 for length in lengths)
    both = forward + backward
    return {
        "forward_ms": round(forward, 3),
        "backward_ms": round(backward, 3),
        "both_ms": round(both, 3),
        "forward_tflops": round(flops / forward / 1e9, 1),
        "both_tflops": round((1 + BACKWARD_FLOPS) * flops / both / 1e9, 1),
    }


def _time(run: Callable[[], object]) -> float:
    """Return the median time in milliseconds, each run on a level-2 cache that holds nothing of the last."""
    cache = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(WARM_UP + RUNS)]
    for start, stop in events:
        cache.zero_()
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    times: list[float] = [start.elapsed_time(stop) for start, stop in events[WARM_UP:]]
    return statistics.median(times)


def _print(**row: object) -> None:
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
