import itertools
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from evenrank.dataloader import LoaderConfig, RandomBatches, RandomData, SequenceBatch
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer
from evenrank.dataloader.balance.config import EXCHANGES
from evenrank.dataloader.balance.ranks import process_group
from evenrank.datasets.distributions import Lognormal
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.balance.costs import COST, rich_tokens
from tests.dataloader.rich_batch import RichBatch, rich_batch
from tests.ranks import RankPool


def _world(rank: int, seed: int) -> list[RichBatch]:
    rng = np.random.default_rng((seed, rank))
    lengths = rng.integers(0, 40, (int(rng.integers(0, 5)), 4, 4)).tolist()
    return [rich_batch([[(a, b), (c, d)] for a, b, c, d in step], first_id=rank * 100) for step in lengths]


def _random_batches(rank: int, world_size: int, num_batches: int) -> RandomBatches[SequenceBatch]:
    config = LoaderConfig(batch_size=16, max_history_length=512, max_num_candidates=1)
    data = RandomData(lengths=Lognormal(mean=64, std=64, high=512))
    return RandomBatches(config, data, num_batches=num_batches, rank=rank, world_size=world_size)


def _same_as_on_the_cpu(rank: int, world_size: int, seeds: int) -> int:
    torch.cuda.set_device(rank)
    compared = 0
    for seed, exchange, strategy in itertools.product(range(seeds), EXCHANGES, STRATEGIES):
        config = BalanceConfig(cost=rich_tokens, exchange=exchange, strategy=strategy)
        bits = []
        for device in (None, f"cuda:{rank}"):
            with Balancer(_world(rank, seed), config, device=device) as balancer:
                bits.append([bits_of(batch) for batch in balancer])
        assert bits[0] == bits[1]
        compared += len(bits[0])
    return compared


@pytest.mark.parametrize("most", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(4, marks=pytest.mark.multi_gpu)])
def test_gpus_return_the_same_bits_as_the_cpu(gpu_ranks: RankPool, most: int) -> None:
    assert min(gpu_ranks.run(min(torch.cuda.device_count(), most), _same_as_on_the_cpu, 4)) > 10


def _pass_devices(rank: int, world_size: int, devices: list[str | None]) -> None:
    # A rank that creates a group would wait there for the others.
    with patch.object(process_group.FailFastGroup, "__init__", side_effect=AssertionError("created a group")):
        Balancer(_world(rank, 0), BalanceConfig(cost=rich_tokens), device=devices[rank])


@pytest.mark.multi_gpu
def test_devices_that_cannot_exchange_are_an_error_on_all_ranks_before_any_group_is_created(
    gpu_ranks: RankPool,
) -> None:
    count = torch.cuda.device_count()
    missing = f"device is cuda:{count}, but this host has {count} CUDA devices; pass cuda:0..{count - 1}"
    differs = "device differs between ranks: cuda on rank 0, cpu on rank 1"
    same = "ranks 0 and 1 use the same GPU of host "
    for devices, messages in (
        (["cuda:0", f"cuda:{count}"], [f"rank 1 failed: {missing}", missing]),
        (["cuda:0", None], [differs, differs]),
        (["cuda", "cuda:0"], [same, same]),
    ):
        for failure, message in zip(gpu_ranks.try_run(2, _pass_devices, devices), messages, strict=True):
            assert failure.message.startswith(message)


def _train_on_another_stream(rank: int, world_size: int, device: int) -> tuple[list[int], list[int], bool]:
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream()
    batches = _random_batches(rank, world_size, 50)
    sums = []
    with (
        torch.cuda.stream(stream),
        Balancer(batches, BalanceConfig(cost=COST, strategy="none"), device=f"cuda:{device}") as balancer,
    ):
        for batch in balancer:
            assert torch.cuda.current_stream() == stream
            sums.append(batch.features.values().sum())
    has_context = torch._C._cuda_hasPrimaryContext(0)  # type: ignore[attr-defined]  # undocumented
    return [int(batch.features.values().sum()) for batch in batches], [int(total) for total in sums], has_context


@pytest.mark.parametrize(
    "device", [pytest.param(0, marks=pytest.mark.gpu), pytest.param(1, marks=pytest.mark.multi_gpu)]
)
def test_the_current_stream_sees_complete_batches_and_other_gpus_get_no_context(
    gpu_ranks: RankPool, device: int
) -> None:
    ((expected, sums, has_context),) = gpu_ranks.run(1, _train_on_another_stream, device)
    assert sums == expected
    assert len(set(sums)) > 40
    assert has_context == (device == 0)


def _interleave(rank: int, world_size: int, steps: int) -> tuple[int, list[int]]:
    """Balance while all-reduces run on another communicator, as of gradients, and the main stream is busy."""
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    weight = torch.randn(1024, 1024, device="cuda")
    compiled = torch.compile(lambda lengths: lengths * 2 + 1)
    total = torch.zeros(3, dtype=torch.int64, device="cuda")
    wrong = 0
    batches = _random_batches(rank, world_size, steps)
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
    for batch in _random_batches(rank, world_size, steps):
        values, lengths = batch.features.values(), batch.features.lengths()
        sums += [int(each.sum()) for each in (values, lengths * 2 + 1, batch.sample_ids * (batch.step + 1))]
    return sums.tolist()


@pytest.mark.multi_gpu
def test_1000_steps_between_all_reduces_neither_hang_nor_lose_samples(gpu_ranks: RankPool) -> None:
    count = min(torch.cuda.device_count(), 4)
    expected = np.sum(gpu_ranks.run(count, _sums_on_the_cpu, 1000), axis=0).tolist()
    assert gpu_ranks.run(count, _interleave, 1000) == [(0, expected)] * count
