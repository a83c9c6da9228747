"""Time HSTU attention by jagged kernels on one GPU, beside others, and skewed lengths beside equal ones.

python scripts/bench/attention.py
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from attention_timing import (
    KERNEL_BACKWARD,
    CudaTimer,
    Heads,
    parse_dtype,
    require_cuda,
    time_passes,
    time_softmax,
)
from evenrank.cli.main import run_command
from evenrank.datasets.distributions import Lognormal
from hstu.config import ATTENTIONS

IMPLEMENTATIONS = ("triton", "padded")
SOFTMAX = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
SKEWED = Lognormal(mean=1024, std=1024, high=4096)
SKEWED_DRAWS = 5


def main(
    samples: Annotated[int, typer.Option(help="Samples of a batch.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of the samples of equal length.")] = 2048,
    width: Annotated[int, typer.Option(help="Heads times head_dim.")] = 1024,
    head_dims: Annotated[str, typer.Option(help="Comma-separated.")] = "64,128,256",
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "bfloat16,float32",
) -> None:
    """Time HSTU attention on one GPU, beside others, and skewed lengths beside equal ones.

    Prints one JSON line per row: milliseconds (median of 50 runs after 10 warm-up runs), TFLOP/s, and ratios.

    \b
        equal     all samples have --length tokens; for each head_dim and implementation; in bfloat16 also PyTorch's
                  causal attention, with softmax, by the backends `flash` and `cudnn` where they can
        softmax   the rate of `triton` over that of the faster of these two
        skewed    lognormal lengths (mean 1,024, std 1,024, at most 4,096), beside equal ones of the same cost:
                  `ratio` is the time of the skewed over the time of the equal lengths

    FLOPs are those of causal attention: two matrix products per pair of tokens in the forward pass, and 2.5 times as
    many in the backward pass, which computes the scores again. What an implementation computes in addition is not
    counted.
    """
    require_cuda()
    _print(device=torch.cuda.get_device_name(), torch=torch.__version__)
    for dtype in dtypes.split(","):
        for head_dim in map(int, head_dims.split(",")):
            heads = Heads(count=width // head_dim, head_dim=head_dim, dtype=parse_dtype(dtype))
            shape = {"dtype": dtype, "head_dim": head_dim}
            names = [*IMPLEMENTATIONS, *(SOFTMAX if heads.dtype == torch.bfloat16 else ())]
            equals = {name: _measure(name, [length] * samples, heads) for name in names}
            for name, measured in equals.items():
                _print(row="equal", implementation=name, **shape, **measured)
            times = {name: equals[name]["both_ms"] for name in SOFTMAX if "both_ms" in equals.get(name, {})}
            if times and "both_ms" in equals["triton"]:
                backend = min(times, key=times.__getitem__)
                ratio = round(times[backend] / equals["triton"]["both_ms"], 3)
                _print(row="softmax", backend=backend, **shape, both_tflops_ratio=ratio)
            for draw in range(SKEWED_DRAWS):
                skewed = SKEWED.sample(np.random.default_rng(draw), samples).tolist()
                cost = sum(length**2 for length in skewed)
                equal = [round((cost / samples) ** 0.5)] * samples
                rows = [_measure("triton", lengths, heads) for lengths in (skewed, equal)]
                ratios = {
                    f"{key}_ratio": round(rows[0][key] / rows[1][key], 3) for key in rows[0] if key.endswith("ms")
                }
                sizes = {"longest": max(skewed), "equal_length": equal[0]}
                _print(row="skewed", draw=draw, **sizes, **shape, **rows[0], **ratios)


def _measure(name: str, lengths: Sequence[int], heads: Heads) -> dict[str, Any]:
    """Return times and rates of an implementation, or why there are none."""
    try:
        if name in SOFTMAX:
            passes = time_softmax(SOFTMAX[name], len(lengths), lengths[0], heads, timer=CudaTimer())
        else:
            passes = time_passes(ATTENTIONS[name], lengths, heads, timer=CudaTimer())
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    except RuntimeError as error:  # a backend that cannot: warnings say why
        if name not in SOFTMAX:
            raise
        return {"unavailable": str(error).splitlines()[0]}
    flops = heads.forward_flops(lengths)
    return {
        "forward_ms": round(passes.forward.ms, 3),
        "backward_ms": round(passes.backward.ms, 3),
        "both_ms": round(passes.both.ms, 3),
        "forward_tflops": round(flops / passes.forward.ms / 1e9, 1),
        "both_tflops": round((1 + KERNEL_BACKWARD) * flops / passes.both.ms / 1e9, 1),
    }


def _print(**row: object) -> None:
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    run_command(main)
