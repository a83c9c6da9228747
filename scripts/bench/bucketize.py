"""Compare `bucketize` with fbgemm's block bucketize, of which TorchRec's row-wise sharding is made.

    .venv/bin/python scripts/bench/bucketize.py [--device cuda] [--rounds 50] [--ranks 8,64] [--lengths lognormal,...]

Prints one JSON line per row. The variants of a row take turns on the same batch, and agree in `continuous`, which is
checked; the other modes have no counterpart in fbgemm and are compared with its `continuous`.

    ms, fbgemm_ms     median of a call's time on the device: on a GPU from kernel to kernel, with calls launched ahead
                      of it; on the CPU from call to return
    ratio             ms / fbgemm_ms
    call_ms, fbgemm_call_ms, torchrec_call_ms    on a GPU: median from the call on an idle device to the result, the
                      host's part included; of TorchRec's `bucketize_kjt_before_all2all` too, which calls fbgemm
    call_ratio        call_ms / fbgemm_call_ms

Keys are int64 of a table of 10 million rows, drawn uniformly; fbgemm returns its permutation (`sequence=True`), as ours
does. --lengths: lognormal (mean 512, std 512, at most 4096) and long (4096 each) of 4 features; short (1 each) and
skewed (Zipf with exponent 2, at most 4096) of 26 features.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.routing import MODES, Routing, bucketize
from evenrank.datasets.distributions import Lognormal, Zipf

NUM_EMBEDDINGS = 10_000_000
WARM_UP = 5  # calls of each variant
FLUSHED_BYTES = 1 << 30  # zeroed before each call: no cache holds its input, and the host gets ahead of the GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A kind of batches."""

    batch_sizes: tuple[int, ...]
    features: int
    lengths: Callable[[np.random.Generator, int], np.typing.NDArray[np.int64]]


SHAPES = {
    "lognormal": Shape(
        batch_sizes=(32, 128, 512),
        features=4,
        lengths=lambda rng, size: Lognormal(mean=512, std=512, low=1, high=4096).sample(rng, size),
    ),
    "long": Shape(batch_sizes=(32,), features=4, lengths=lambda _, size: np.full(size, 4096)),
    "short": Shape(batch_sizes=(512, 4096), features=26, lengths=lambda _, size: np.full(size, 1)),
    "skewed": Shape(
        batch_sizes=(512, 4096), features=26, lengths=lambda rng, size: Zipf(exponent=2, high=4096).sample(rng, size)
    ),
}
Batch = tuple[list[str], Tensor, Tensor]  # features, values, lengths
Variant = Callable[[KeyedJaggedTensor], object]


def draw(shape: Shape, batch_size: int, device: torch.device) -> Batch:
    """Draw a batch."""
    rng = np.random.default_rng(0)
    lengths = shape.lengths(rng, shape.features * batch_size)
    values = rng.integers(0, NUM_EMBEDDINGS, int(lengths.sum()))
    names = [f"feature_{number}" for number in range(shape.features)]
    return names, torch.from_numpy(values).to(device), torch.from_numpy(lengths).to(device)


def variants_of(names: list[str], world_size: int, device: torch.device) -> dict[str, Variant]:
    """Return what is timed: ours by mode, fbgemm's operator, and TorchRec's function around it."""
    block_sizes = torch.full((len(names),), -(-NUM_EMBEDDINGS // world_size), device=device)

    def ours(routings: dict[str, Routing]) -> Variant:
        return lambda kjt: bucketize(kjt, world_size, routings)

    def fbgemm(kjt: KeyedJaggedTensor) -> object:
        return torch.ops.fbgemm.block_bucketize_sparse_features(
            kjt.lengths(),
            kjt.values(),
            bucketize_pos=False,
            sequence=True,
            block_sizes=block_sizes,
            my_size=world_size,
        )

    def torchrec(kjt: KeyedJaggedTensor) -> object:
        return bucketize_kjt_before_all2all(kjt, world_size, block_sizes, output_permute=True)

    by_mode = {mode: ours(dict.fromkeys(names, Routing(mode=mode, num_embeddings=NUM_EMBEDDINGS))) for mode in MODES}
    return by_mode | {"fbgemm": fbgemm, "torchrec": torchrec}


def check_equal(variants: dict[str, Variant], batch: Batch) -> None:
    """Check that `continuous` is what TorchRec computes."""
    results: list[Any] = [variants[name](fresh(batch)) for name in ("continuous", "torchrec")]
    (ours, permutation), (theirs, expected) = results
    assert torch.equal(ours.values(), theirs.values())
    assert torch.equal(ours.lengths(), theirs.lengths())
    assert torch.equal(permutation, expected)


def fresh(batch: Batch) -> KeyedJaggedTensor:
    """Return the batch without the offsets that an earlier call has left in it."""
    names, values, lengths = batch
    return KeyedJaggedTensor(keys=names, values=values, lengths=lengths, stride=len(lengths) // len(names))


def device_ms(variants: dict[str, Variant], batch: Batch, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of a call on the GPU."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    events: dict[str, list[list[torch.cuda.Event]]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            kjt = fresh(batch)
            start_stop = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            flushed.zero_()
            flushed.zero_()
            start_stop[0].record()
            run(kjt)
            start_stop[1].record()
            torch.cuda.synchronize()
            events[name].append(start_stop)
    return {
        name: statistics.median(start.elapsed_time(stop) for start, stop in timed) for name, timed in events.items()
    }


def call_ms(variants: dict[str, Variant], batch: Batch, rounds: int, device: torch.device) -> dict[str, float]:
    """Return the median milliseconds from the call on an idle device to the result."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            kjt = fresh(batch)
            synchronize(device)
            started = time.perf_counter()
            run(kjt)
            synchronize(device)
            seconds[name].append(time.perf_counter() - started)
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(name: str, batch_size: int, world_size: int, rounds: int, device: torch.device) -> list[dict[str, object]]:
    """Return the rows of a shape, one per mode."""
    batch = draw(SHAPES[name], batch_size, device)
    variants = variants_of(batch[0], world_size, device)
    check_equal(variants, batch)
    call_ms(variants, batch, WARM_UP, device)
    calls = call_ms(variants, batch, rounds, device)
    times = device_ms(variants, batch, rounds) if device.type == "cuda" else calls
    rows: list[dict[str, object]] = []
    for mode in MODES:
        row: dict[str, object] = {
            "device": device.type,
            "lengths": name,
            "features": len(batch[0]),
            "batch_size": batch_size,
            "values": len(batch[1]),
            "ranks": world_size,
            "mode": mode,
            "ms": round(times[mode], 4),
            "fbgemm_ms": round(times["fbgemm"], 4),
            "ratio": round(times[mode] / times["fbgemm"], 3),
        }
        if device.type == "cuda":
            row |= {
                "call_ms": round(calls[mode], 4),
                "fbgemm_call_ms": round(calls["fbgemm"], 4),
                "torchrec_call_ms": round(calls["torchrec"], 4),
                "call_ratio": round(calls[mode] / calls["fbgemm"], 3),
            }
        rows.append(row)
    return rows


def main() -> None:
    """Print a row for each shape, batch size, world size and mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--rounds", type=int, default=50, help="timed calls of each variant")
    parser.add_argument("--ranks", default="8,64", help="world sizes, comma-separated")
    parser.add_argument("--lengths", default=",".join(SHAPES), help="kinds of batches, comma-separated")
    arguments = parser.parse_args()
    for name in arguments.lengths.split(","):
        for batch_size in SHAPES[name].batch_sizes:
            for world_size in map(int, arguments.ranks.split(",")):
                for row in measure(name, batch_size, world_size, arguments.rounds, torch.device(arguments.device)):
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
