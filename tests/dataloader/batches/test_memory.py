import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from evenrank.core.errors import ConfigError
from evenrank.dataloader import (
    LoaderConfig,
    RandomBatches,
    RandomData,
    SequenceBatch,
    build_loader,
    random_codes,
)
from evenrank.dataloader.balance import BalanceConfig, Balancer, LinearCost
from evenrank.dataloader.batches.memory import Memory, resolve_device
from evenrank.dataloader.random_batches import draw_samples
from evenrank.datasets.distributions import Lognormal, Uniform
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.collate.stores import STORE

DATA = RandomData(lengths=Lognormal(mean=30, std=40, low=2, high=200), items=Uniform(low=1, high=499))
SAMPLES = draw_samples(DATA, np.random.default_rng(0), 400, min_length=2, split="train")
BALANCE = BalanceConfig(cost=LinearCost(interleave_actions=False))
CODES = random_codes(500, levels=2, codebook_size=8)


def _double(batch: SequenceBatch, rng: np.random.Generator) -> SequenceBatch:
    """Keep some tensors, and replace others by new ones."""
    return batch.replace(num_candidates=2 * batch.num_candidates)


def _loaded(balance: BalanceConfig | None = None, transform: Any = None, **options: Any) -> Iterable[Any]:
    config = LoaderConfig(**{"batch_size": 8, "max_num_candidates": 1, "user_id": True, **options})
    return build_loader(SAMPLES, config, rank=1, world_size=2, balance=balance, transform=transform)


def _drawn(**options: Any) -> Iterable[Any]:
    config = LoaderConfig(**{"batch_size": 8, **options})
    return RandomBatches(config, DATA, num_batches=9, num_distinct=4)


WAYS: dict[str, Callable[..., Iterable[Any]]] = {
    "loaded": _loaded,
    "with threads": lambda **options: _loaded(num_workers=2, prefetch=3, **options),
    "balanced": lambda **options: _loaded(BALANCE, num_workers=1, **options),
    "transformed": lambda **options: _loaded(transform=_double, num_workers=1, **options),
    "with codes": lambda **options: _loaded(codes=CODES, **options),
    "with bits of actions": lambda **options: _loaded(num_tasks=3, extra_events=("timestamp_ms",), **options),
    "drawn": _drawn,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_cpu_is_a_device_too(way: str) -> None:
    before, after = (list(map(bits_of, WAYS[way](**options))) for options in ({}, {"device": "cpu"}))
    assert before == after
    assert len(before) > 5


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_a_gpu_has_the_same_bits_as_the_cpu(way: str) -> None:
    on_cpu, on_gpu, pinned = (list(WAYS[way](**options)) for options in ({}, {"device": "cuda"}, {"pin_memory": True}))
    assert [bits_of(batch) for batch in on_cpu] == [bits_of(batch) for batch in on_gpu]
    assert [bits_of(batch) for batch in on_cpu] == [bits_of(batch) for batch in pinned]
    for batch in on_gpu:
        assert batch.to(f"cuda:{torch.cuda.current_device()}") is batch
        for _, value in batch.tensors():
            for tensor in (
                ()
                if value is None
                else (value,)
                if isinstance(value, torch.Tensor)
                else (value.values(), value.lengths(), value.offsets())
            ):
                assert tensor.is_cuda
    for batch in pinned:
        assert batch.features.values().is_pinned()
        assert batch.features.lengths().is_pinned()
        assert batch.sample_ids.is_pinned()


@pytest.mark.gpu
@pytest.mark.parametrize("changes_stream", [False, True])
def test_memory_is_not_reused_while_a_stream_reads_it(changes_stream: bool) -> None:
    expected = [int(batch.features.values().sum()) for batch in _loaded(num_workers=1, prefetch=2)]
    stream, sums = torch.cuda.Stream(), []
    batches = iter(_loaded(num_workers=1, prefetch=2, device="cuda"))
    if changes_stream:
        first = next(batches)
        sums.append(first.features.values().sum())
        torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for batch in batches:
            torch.cuda._sleep(20_000_000)  # about 10 ms: later batches are uploaded meanwhile
            sums.append(batch.features.values().sum())
            del batch
    assert [int(total) for total in sums] == expected


@pytest.mark.gpu
def test_a_loader_on_a_gpu_can_be_pickled() -> None:
    loader = _loaded(device="cuda", num_workers=1)
    again = pickle.loads(pickle.dumps(loader))
    assert [bits_of(batch) for batch in again] == [bits_of(batch) for batch in loader]


def test_arrays_become_tensors_of_their_shapes() -> None:
    arrays: list[Any] = [np.arange(6).reshape(2, 3), np.empty(0, dtype=np.float32), np.array([[1.5]], dtype=np.float32)]
    tensors = Memory().place(arrays)
    assert [tensor.tolist() for tensor in tensors] == [[[0, 1, 2], [3, 4, 5]], [], [[1.5]]]
    assert [tensor.dtype for tensor in tensors] == [torch.int64, torch.float32, torch.float32]


def test_pinned_arrays_share_one_buffer_in_which_each_begins_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    # A host without CUDA devices cannot pin memory.
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options))
    arrays: list[Any] = [
        np.array([1, 2, 3]),  # 24 bytes
        np.empty((2, 0), dtype=np.int32),
        np.array([[1.5], [2.5]], dtype=np.float32),
        np.array([4, 5, 6, 7], dtype=np.int32),  # 16 bytes
        np.array([True]),
    ]
    tensors = Memory(pins=True).place(arrays)
    assert [tensor.tolist() for tensor in tensors] == [array.tolist() for array in arrays]
    assert [tensor.numpy().dtype for tensor in tensors] == [array.dtype for array in arrays]
    starts = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
    assert starts == [0, 32, 32, 48, 64]
    assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {80}


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "device is 'gpu', which PyTorch does not know"),
        ("meta", "device is meta; batches can be on cpu or cuda"),
    ],
)
def test_an_unknown_device_is_refused(device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_loader(STORE, LoaderConfig(batch_size=2, device=device), rank=0, world_size=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has CUDA devices")
def test_a_device_that_the_host_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="device is cuda, but PyTorch finds no CUDA device on this host; pass"):
        resolve_device("cuda")


@pytest.mark.gpu
def test_a_balancer_names_batches_that_are_on_a_gpu() -> None:
    message = r"features must be on the CPU .* but it is on cuda:0; detach or move it"
    with pytest.raises(Exception, match=message), Balancer(_loaded(device="cuda"), BALANCE) as balancer:
        next(iter(balancer))


def test_nothing_is_pinned_for_a_device() -> None:
    with pytest.raises(ConfigError, match="batches are handed out on device='cuda:0', so nothing copies them"):
        LoaderConfig(batch_size=2, device="cuda:0", pin_memory=True)
    again = pickle.loads(pickle.dumps(LoaderConfig(batch_size=2, device=torch.device("cuda", 1))))
    assert again.device == torch.device("cuda", 1)
