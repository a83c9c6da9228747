"""Measure what an AttentionTracker costs a step: without one, outside its window, and within.

    .venv/bin/python scripts/bench/tracker.py [--layers 8] [--steps 200] [--repeats 15] [--device cpu]

Prints one JSON line per state:

    state              never: no tracker; before, after: outside its window; within: in it, with FLOPs
    us_per_step        microseconds of host time for a step, forward and backward; smallest of the repeats
    median_us          their median
    hooks              hooks on the layers
    us_per_layer       microseconds more than without a tracker, per layer

The layers do next to nothing, so that what is measured is the cost of calling them. States alternate within a repeat.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evenrank.training import AttentionTracker, Flops


class Layer(nn.Module):
    """A layer that does next to nothing."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Return x."""
        return x * scale


def layer_flops(module: nn.Module, arguments: Mapping[str, Any]) -> Flops:
    """Return made-up FLOPs that depend on an argument."""
    rows = arguments["x"].shape[0]
    return Flops(linear_forward=rows, linear_backward=2 * rows, attention_forward=0, attention_backward=0)


def seconds_per_step(model: nn.Module, x: Tensor, steps: int, tracker: AttentionTracker | None) -> float:
    """Return the host time of a step; the tracker counts steps like those of a training loop."""
    started = time.perf_counter()
    for _ in range(steps):
        model(x).sum().backward()
        if tracker is not None:
            tracker.step()
    return (time.perf_counter() - started) / steps


def main() -> None:
    """Print a line per state."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    layers = [Layer() for _ in range(options.layers)]
    model = nn.Sequential(*layers)
    x = torch.ones(4, device=options.device, requires_grad=True)
    seconds_per_step(model, x, options.steps, None)  # warm-up

    times: dict[str, list[float]] = {"never": [], "before": [], "within": [], "after": []}
    hooks = dict.fromkeys(times, 0)
    for _ in range(options.repeats):
        # Its window begins after the first batch of steps, and ends with the second.
        steps = options.steps
        tracker = AttentionTracker(model, Layer, device=options.device, start=steps, stop=2 * steps, flops=layer_flops)
        for state in times:
            hooks[state] = sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in layers)
            times[state].append(seconds_per_step(model, x, steps, None if state == "never" else tracker))
    baseline = min(times["never"])
    for state, seconds in times.items():
        row = {
            "state": state,
            "us_per_step": round(1e6 * min(seconds), 2),
            "median_us": round(1e6 * statistics.median(seconds), 2),
            "hooks": hooks[state],
            "us_per_layer": round(1e6 * (min(seconds) - baseline) / options.layers, 3),
            "device": options.device,
            "torch": torch.__version__,
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
