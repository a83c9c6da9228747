"""A Balancer on GPUs: real NCCL groups, one process per GPU, compared with the CPU."""

from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import init_device_mesh
from torchdata.nodes import PinMemory
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError, EvenrankError
from evenrank.dataloader import LoaderConfig
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer, HSTUCost
from evenrank.dataloader.balance.exchange.batch_buffer import as_bytes
from evenrank.dataloader.balance.exchange.collectives import COLLECTIVES
from evenrank.dataloader.balance.ranks import process_group
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.random_batches import RandomBatches, RandomData
from evenrank.datasets.distributions import Lognormal
from tests.dataloader.rich_batch import RichBatch, rich_batch
from tests.ranks import RankPool


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """Processes that have not used a GPU before."""
    pool = RankPool()
    yield pool
    pool.stop()


COST = HSTUCost(hidden=64, heads=1, head_dim=64, layers=1, interleave_actions=False)
CONFIG = LoaderConfig(batch_size=16, max_history_length=512, max_num_candidates=1)
DATA = RandomData(lengths=Lognormal(mean=64, std=64, high=512))


def _tokens(lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]) -> NDArray[np.int64]:
    return lengths["a"] + lengths["b"] * 2 + lengths["weighted.a"] + lengths["c"]


def _bits(batch: JaggedBatch) -> list[Any]:
    """Return every bit of a batch."""
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
            (name, tensor.dtype, tuple(tensor.shape), as_bytes(tensor.cpu().contiguous()).numpy().tobytes())
            for tensor in tensors
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
        for exchange in COLLECTIVES:
            for strategy in STRATEGIES:
                bits = []
                for where in (None, f"{device}:{rank}"):
                    config = BalanceConfig(cost=_tokens, exchange=exchange, strategy=strategy)
                    with Balancer(_world(rank, seed), config, device=where) as balancer:
                        bits.append([_bits(batch) for batch in balancer])
                assert bits[0] == bits[1]
                compared += len(bits[0])
    return compared


@pytest.mark.gpu
def test_one_gpu_returns_the_same_bits_as_the_cpu(pool: RankPool) -> None:
    assert pool.run(1, _same_as_on_the_cpu, "cuda", 3)[0] > 10


@pytest.mark.multi_gpu
def test_gpus_return_the_same_bits_as_the_cpu(pool: RankPool) -> None:
    count = min(torch.cuda.device_count(), 4)
    assert min(pool.run(count, _same_as_on_the_cpu, "cuda", 4)) > 10


def _pass_devices(rank: int, world_size: int, devices: list[str | None]) -> str:
    # A rank that creates a group would wait there for the others.
    with patch.object(process_group.FailFastGroup, "__init__", side_effect=AssertionError("created a group")):
        try:
            Balancer(_world(rank, 0), BalanceConfig(cost=_tokens), device=devices[rank])
        except EvenrankError as error:
            return str(error)
    return "no error"


@pytest.mark.multi_gpu
def test_devices_that_cannot_exchange_are_an_error_on_all_ranks_before_any_group_is_created(pool: RankPool) -> None:
    count = torch.cuda.device_count()
    missing = f"device is cuda:{count}, but this host has {count} CUDA devices; pass cuda:0..{count - 1}"
    same = "call torch.cuda.set_device(local_rank) first, or pass each rank its own device"
    assert pool.run(2, _pass_devices, ["cuda:0", f"cuda:{count}"]) == [f"rank 1 failed: {missing}", missing]
    differs = "device differs between ranks: cuda on rank 0, cpu on rank 1"
    assert pool.run(2, _pass_devices, ["cuda:0", None]) == [differs, differs]
    for message in pool.run(2, _pass_devices, ["cuda", "cuda:0"]):
        assert message.startswith("ranks 0 and 1 use the same GPU of host ")
        assert message.endswith(same)


def _balance_on_a_mesh(rank: int, world_size: int) -> list[list[int]]:
    torch.cuda.set_device(rank)
    seen = []
    mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("replicate", "shard"))
    for group in (None, mesh["shard"]):  # the default group is over Gloo, that of the mesh over NCCL
        batches = RandomBatches(CONFIG, DATA, num_batches=5, rank=rank, world_size=world_size)
        with Balancer(PinMemory(batches), BalanceConfig(cost=COST), device="cuda", group=group) as balancer:
            seen.append([int(sample) for batch in balancer for sample in batch.sample_ids[: batch.num_real]])
    assert seen[0] == seen[1]
    return seen


@pytest.mark.multi_gpu
def test_a_mesh_of_gpus_and_a_node_that_pins_memory_give_the_same_batches(pool: RankPool) -> None:
    samples = sorted(sample for seen in pool.run(2, _balance_on_a_mesh) for sample in seen[0])
    assert len(samples) == len(set(samples)) > 0


def _train_on_another_stream(rank: int, world_size: int) -> list[list[int]]:
    stream = torch.cuda.Stream(rank)
    batches = RandomBatches(CONFIG, DATA, num_batches=50, rank=rank, world_size=world_size)
    expected = [int(batch.features.values().sum()) for batch in batches]
    sums = []
    with (
        torch.cuda.stream(stream),
        Balancer(batches, BalanceConfig(cost=COST, strategy="none"), device=f"cuda:{rank}") as balancer,
    ):
        for batch in balancer:
            assert torch.cuda.current_stream() == stream
            sums.append(batch.features.values().sum())
    return [expected, [int(total) for total in sums]]


@pytest.mark.gpu
def test_the_current_stream_stays_current_and_sees_complete_batches(pool: RankPool) -> None:
    ((expected, sums),) = pool.run(1, _train_on_another_stream)
    assert sums == expected
    assert len(set(sums)) > 40


def _on_the_second_gpu(rank: int, world_size: int) -> tuple[int, bool]:
    torch.cuda.set_device(1)
    batches = RandomBatches(CONFIG, DATA, num_batches=5, rank=rank, world_size=world_size)
    with Balancer(batches, BalanceConfig(cost=COST), device="cuda:1") as balancer:
        count = sum(1 for _ in balancer)
    return count, torch._C._cuda_hasPrimaryContext(0)  # type: ignore[attr-defined]  # undocumented


@pytest.mark.multi_gpu
def test_a_rank_creates_no_context_on_another_ranks_gpu(pool: RankPool) -> None:
    assert pool.run(1, _on_the_second_gpu) == [(5, False)]


def _interleave(rank: int, world_size: int, steps: int) -> tuple[int, list[int]]:
    """Balance while all-reduces run on another communicator, as of gradients, and the main stream is busy."""
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    weight = torch.randn(1024, 1024, device="cuda")
    compiled = torch.compile(lambda lengths: lengths * 2 + 1)
    total = torch.zeros(3, dtype=torch.int64, device="cuda")
    wrong = 0
    batches = RandomBatches(CONFIG, DATA, num_batches=steps, rank=rank, world_size=world_size)
    with Balancer(batches, BalanceConfig(cost=COST, strategy="min-move"), device=f"cuda:{rank}") as balancer:
        for batch in balancer:
            for _ in range(4):
                weight = torch.tanh(weight @ weight)
            # The next step reuses freed buffers, so a batch that was not kept allocated would be overwritten.
            values, lengths = batch.features.values(), batch.features.lengths()
            sums = torch.stack([values.sum(), compiled(lengths).sum(), (batch.sample_ids * (batch.step + 1)).sum()])
            dist.all_reduce(sums, group=group)
            total += sums
            ones = torch.ones(1, device="cuda")
            dist.all_reduce(ones, group=group)
            wrong += int(ones.item() != world_size) if batch.step % 100 == 0 else 0
    return wrong, total.tolist()


def _sums_on_the_cpu(rank: int, world_size: int, steps: int) -> list[int]:
    sums = np.zeros(3, dtype=np.int64)
    for batch in RandomBatches(CONFIG, DATA, num_batches=steps, rank=rank, world_size=world_size):
        sums += [
            int(batch.features.values().sum()),
            int((batch.features.lengths() * 2 + 1).sum()),
            int((batch.sample_ids * (batch.step + 1)).sum()),
        ]
    return sums.tolist()


@pytest.mark.multi_gpu
def test_1000_steps_between_all_reduces_neither_hang_nor_lose_samples(pool: RankPool) -> None:
    count = min(torch.cuda.device_count(), 4)
    balanced = pool.run(count, _interleave, 1000)
    expected = np.sum(pool.run(count, _sums_on_the_cpu, 1000), axis=0).tolist()
    assert [wrong for wrong, _ in balanced] == [0] * count
    assert [sums for _, sums in balanced] == [expected] * count


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu", "device is 'tpu', which PyTorch does not know"),
        ("meta", "device is meta; batches are exchanged on cpu or cuda"),
    ],
)
def test_an_unknown_device_is_named(device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Balancer([], BalanceConfig(cost=COST), device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_named() -> None:
    with pytest.raises(ConfigError, match="device is cuda, but PyTorch finds no CUDA device on this host"):
        Balancer([], BalanceConfig(cost=COST), device="cuda")
