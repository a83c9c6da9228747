"""Run the kernels of routing in Triton's interpreter, on the CPU, and compare them with Python's integers."""

import itertools
import random

import torch

from evenrank.dataloader.routing import MODES, Routing
from evenrank.dataloader.routing.gpu_bucketize import bucketize_with_kernels, owners_with_kernel
from tests.dataloader.routing.reference import EDGES, Batch, bucketized, owner_and_row


def draw(rng: random.Random, world_size: int, bits: int, lengths: list[int], stride: int) -> Batch:
    limit = 1 << (bits - 1)
    edges = [edge for edge in EDGES if -limit <= edge < limit]

    def key() -> int:
        return rng.choice([rng.randrange(-limit, limit), rng.randrange(60), rng.choice(edges)])

    rows = [[[key() for _ in range(rng.choice(lengths))] for _ in range(stride)] for _ in MODES]
    routings = tuple(Routing(mode=mode, num_embeddings=50) for mode in MODES)
    return Batch(rows=rows, routings=routings, world_size=world_size, bits=bits)


def check(batch: Batch, extra: str, lengths_dtype: torch.dtype) -> None:
    expected = bucketized(batch)
    keys = torch.tensor(batch.keys, dtype=torch.int32 if batch.bits == 32 else torch.int64)
    lengths = torch.tensor(batch.lengths, dtype=lengths_dtype)
    offsets = torch.cat([torch.zeros(1, dtype=lengths_dtype), lengths.cumsum(0).to(lengths_dtype)])
    weights = torch.arange(len(keys), dtype=torch.float32) if extra == "weights" else None
    new_lengths, values, moved, permutation = bucketize_with_kernels(
        keys, lengths, offsets, batch.routings, batch.world_size, weights=weights, positions=extra == "positions"
    )
    assert new_lengths.dtype == lengths_dtype
    assert new_lengths.tolist() == expected.lengths
    assert values.dtype == keys.dtype
    assert values.tolist() == expected.values
    assert permutation.tolist() == expected.permutation
    moved_to = {"none": None, "weights": expected.sources, "positions": expected.positions}[extra]
    assert (None if moved is None else moved.tolist()) == moved_to
    for routing in batch.routings:
        owners = owners_with_kernel(keys, batch.world_size, routing)
        assert owners.tolist() == [owner_and_row(key, batch.world_size, routing, batch.bits)[0] for key in batch.keys]


def main() -> None:
    rng = random.Random(0)
    # Short rows, several to a chunk; long ones, in several chunks; and a long one among short ones.
    kinds = [([0, 1, 2, 3], 9), ([0, 100, 150], 3), ([0] * 8 + [1] * 8 + [70], 20)]
    cases = itertools.product((1, 5, 64), (32, 64), kinds)
    for number, (world_size, bits, (lengths, stride)) in enumerate(cases):
        batch = draw(rng, world_size, bits, lengths, stride)
        check(
            batch, ("none", "weights", "positions")[(number + number // 3) % 3], (torch.int32, torch.int64)[number % 2]
        )
    check(Batch(rows=[[[]], [[]]], routings=(Routing(mode="roundrobin"),) * 2, world_size=3), "none", torch.int64)


if __name__ == "__main__":
    main()
