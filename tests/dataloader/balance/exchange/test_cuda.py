"""A Balancer on GPUs: real NCCL groups, one process a GPU. The CPU path is the reference."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import Balancer, HSTUCost
from evenrank.dataloader.balance.exchange.byte_copy import as_bytes
from evenrank.dataloader.balance.exchange.exchange import EXCHANGES
from evenrank.dataloader.batch import JaggedBatch
from evenrank.dataloader.random_batches import RandomBatches, RandomData
from evenrank.datasets.distributions import Lognormal
from tests.dataloader.rich_batch import RichBatch, rich_batch
from tests.ranks import RankPool

COST = HSTUCost(hidden=64, heads=1, head_dim=64, layers=1)


def _tokens(lengths: dict[str, np.ndarray], num_candidates: np.ndarray) -> np.ndarray:
    return lengths["a"] + lengths["b"] * 2 + lengths["weighted.a"] + lengths["c"]


def _bits(batch: JaggedBatch) -> list[Any]:
    """Every bit of a batch."""
    parts: list[Any] = [batch.num_real, batch.step, batch.loss_tokens, batch.world_loss_tokens, batch.max_lengths]
    for name, value in batch.tensors():
        tensors = []
        if isinstance(value, KeyedJaggedTensor):
            weights = value.weights_or_none()
            tensors = [value.values(), value.lengths(), value.offsets(), *([] if weights is None else [weights])]
            parts += [value.length_per_key(), value.offset_per_key(), value.stride()]
        elif value is not None:
            tensors = [value]
        parts += [
            (name, one.dtype, tuple(one.shape), as_bytes(one.cpu().contiguous()).numpy().tobytes()) for one in tensors
        ]
    return parts


def _world(rank: int, seed: int) -> list[RichBatch]:
    rng = np.random.default_rng((seed, rank))
    steps = int(rng.integers(0, 5))
    return [
        rich_batch(
            [[(int(a), int(b)), (int(c), int(d))] for a, b, c, d in rng.integers(0, 40, (4, 4))], first_id=rank * 100
        )
        for _ in range(steps)
    ]


def _same_as_on_the_cpu(rank: int, world_size: int, device: str, seeds: int) -> int:
    torch.cuda.set_device(f"{device}:{rank}")
    compared = 0
    for seed in range(seeds):
        for exchange in EXCHANGES:
            for strategy in ("lpt-swap", "min-move", "identity"):
                found = []
                for where in (None, f"{device}:{rank}"):
                    with Balancer(
                        _world(rank, seed), cost=_tokens, strategy=strategy, exchange=exchange, device=where
                    ) as balancer:
                        found.append([_bits(batch) for batch in balancer])
                assert found[0] == found[1]
                compared += len(found[0])
    return compared


@pytest.mark.gpu
def test_one_gpu_alone_gives_what_the_cpu_gives() -> None:
    pool = RankPool()
    try:
        assert pool.run(1, _same_as_on_the_cpu, "cuda", 3)[0] > 10
    finally:
        pool.stop()


@pytest.mark.multi_gpu
@pytest.mark.timeout(280)
def test_gpus_give_what_the_cpu_gives() -> None:
    pool = RankPool(timeout=240)
    try:
        count = min(torch.cuda.device_count(), 4)
        assert min(pool.run(count, _same_as_on_the_cpu, "cuda", 4)) > 10
    finally:
        pool.stop()


def _on_a_stream_of_its_own(rank: int, world_size: int) -> list[list[int]]:
    stream = torch.cuda.Stream(rank)
    batches = RandomBatches(_config(), DATA, num_batches=50, rank=rank, world_size=world_size)
    expected = [int(batch.features.values().sum()) for batch in batches]
    found = []
    with (
        torch.cuda.stream(stream),
        Balancer(batches, cost=COST, strategy="identity", device=f"cuda:{rank}") as balancer,
    ):
        for batch in balancer:
            assert torch.cuda.current_stream() == stream
            found.append(batch.features.values().sum())
    return [expected, [int(one) for one in found]]


@pytest.mark.gpu
def test_the_stream_on_which_one_trains_stays_the_current_one() -> None:
    pool = RankPool()
    try:
        ((expected, found),) = pool.run(1, _on_a_stream_of_its_own)
        assert found == expected
        assert len(set(found)) > 40
    finally:
        pool.stop()


def _on_the_second_gpu(rank: int, world_size: int) -> tuple[int, bool]:
    torch.cuda.set_device(1)
    batches = RandomBatches(_config(), DATA, num_batches=5, rank=rank, world_size=world_size)
    with Balancer(batches, cost=COST, device="cuda:1") as balancer:
        count = sum(1 for _ in balancer)
    return count, torch._C._cuda_hasPrimaryContext(0)


@pytest.mark.multi_gpu
def test_a_rank_takes_no_memory_of_another_ranks_gpu() -> None:
    pool = RankPool()
    try:
        assert pool.run(1, _on_the_second_gpu) == [(5, False)]
    finally:
        pool.stop()


DATA = RandomData(lengths=Lognormal(mean=64, std=64, high=512))


def _interleave(rank: int, world_size: int, steps: int) -> tuple[int, list[int]]:
    """Balance while gradients, so to speak, are reduced on another communicator and the main stream is busy."""
    torch.cuda.set_device(rank)
    reduced = dist.new_group(backend="nccl")
    weight = torch.randn(1024, 1024, device="cuda")
    grow = torch.compile(lambda lengths: lengths * 2 + 1)
    total = torch.zeros(3, dtype=torch.int64, device="cuda")
    wrong = 0
    batches = RandomBatches(_config(), DATA, num_batches=steps, rank=rank, world_size=world_size)
    with Balancer(batches, cost=COST, strategy="min-move", device=f"cuda:{rank}") as balancer:
        for batch in balancer:
            for _ in range(4):
                weight = torch.tanh(weight @ weight)
            # What is left of a step's memory is taken by the next: a batch that was not safe would be overwritten.
            values, lengths = batch.features.values(), batch.features.lengths()
            sums = torch.stack([values.sum(), grow(lengths).sum(), (batch.sample_ids * (batch.step + 1)).sum()])
            dist.all_reduce(sums, group=reduced)
            total += sums
            ones = torch.ones(1, device="cuda")
            dist.all_reduce(ones, group=reduced)
            wrong += int(ones.item() != world_size) if batch.step % 100 == 0 else 0
    return wrong, total.tolist()


def _config() -> Any:
    from evenrank.dataloader import LoaderConfig

    return LoaderConfig(batch_size=16, max_history_length=512, max_num_candidates=1)


def _sums_on_the_cpu(rank: int, world_size: int, steps: int) -> list[int]:
    sums = np.zeros(3, dtype=np.int64)
    for batch in RandomBatches(_config(), DATA, num_batches=steps, rank=rank, world_size=world_size):
        sums += [
            int(batch.features.values().sum()),
            int((batch.features.lengths() * 2 + 1).sum()),
            int((batch.sample_ids * (batch.step + 1)).sum()),
        ]
    return sums.tolist()


@pytest.mark.multi_gpu
@pytest.mark.timeout(280)
def test_a_thousand_steps_between_all_reduces_neither_hang_nor_lose_anything() -> None:
    pool = RankPool(timeout=240)
    try:
        count = min(torch.cuda.device_count(), 4)
        balanced = pool.run(count, _interleave, 1000)
        expected = np.sum(pool.run(count, _sums_on_the_cpu, 1000), axis=0).tolist()
        assert [wrong for wrong, _ in balanced] == [0] * count
        assert [sums for _, sums in balanced] == [expected] * count
    finally:
        pool.stop()


@pytest.mark.parametrize(
    ("device", "message"),
    [("tpu", "device is 'tpu', which PyTorch does not know"), ("meta", "on cpu or cuda, device is meta")],
)
def test_a_device_that_cannot_be_is_named(device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Balancer([], cost=COST, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="device is cuda, but PyTorch finds no CUDA device here"):
        Balancer([], cost=COST, device="cuda")
