"""Where the tensors of batches are: shared, cloned, pinned or on a GPU, with the same bits everywhere."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.nodes import IterableWrapper

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, RandomBatches, RandomData, SequenceBatch, build_loader, random_codes
from evenrank.dataloader.balance import BalanceConfig, Balancer, LinearCost
from evenrank.dataloader.batches.memory import Memory, resolve_device
from evenrank.dataloader.random_batches import draw_samples
from evenrank.datasets.distributions import Lognormal, Uniform
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.balance.costs import item_tokens
from tests.dataloader.batch_helpers import COLLATE, all_ids

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
    return RandomBatches(LoaderConfig(**{"batch_size": 8, **options}), DATA, num_batches=9, num_distinct=4)


WAYS: dict[str, Callable[..., Iterable[Any]]] = {
    "loaded": _loaded,
    "with threads": lambda **options: _loaded(num_workers=2, prefetch=3, **options),
    "balanced": lambda **options: _loaded(BALANCE, num_workers=1, **options),
    "transformed": lambda **options: _loaded(transform=_double, num_workers=1, **options),
    "with codes": lambda **options: _loaded(codes=CODES, **options),
    "with bits of actions": lambda **options: _loaded(num_tasks=3, extra_events=("timestamp_ms",), **options),
    "drawn": _drawn,
}


def test_the_cpu_is_a_device_too() -> None:
    for way in WAYS.values():
        before, after = (list(map(bits_of, way(**options))) for options in ({}, {"device": "cpu"}))
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
        for value in (value for _, value in batch.tensors() if value is not None):
            parts = (value,) if isinstance(value, torch.Tensor) else (value.values(), value.lengths(), value.offsets())
            assert all(tensor.is_cuda for tensor in parts)
    for batch in pinned:
        for jagged in (batch.features, batch.labels):
            assert jagged is None or (jagged.values().is_pinned() and jagged.lengths().is_pinned())
        assert batch.sample_ids.is_pinned()
        assert getattr(batch, "num_candidates", batch.sample_ids).is_pinned()


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
    torch.cuda.synchronize()
    assert [int(total) for total in sums] == expected


@pytest.mark.gpu
def test_threads_place_batches_at_once_loaders_are_pickled_and_a_balancer_refuses_what_is_on_a_gpu() -> None:
    memory, arrays = Memory("cuda"), [np.arange(1 << 16) + number for number in range(64)]
    with ThreadPoolExecutor(8) as threads:
        placed = [tensor for tensors in threads.map(memory.place, [[array] for array in arrays]) for tensor in tensors]
    assert all(np.array_equal(tensor.cpu(), array) for tensor, array in zip(placed, arrays, strict=True))
    loader = _loaded(device="cuda", num_workers=1)
    again = pickle.loads(pickle.dumps(loader))
    assert [bits_of(batch) for batch in again] == [bits_of(batch) for batch in loader]
    message = r"features must be on the CPU .* but it is on cuda:0; move it, or leave out the device"
    with pytest.raises(Exception, match=message), Balancer(_drawn(device="cuda"), BALANCE) as balancer:
        next(iter(balancer))


@pytest.mark.parametrize("pins", [False, True])
def test_arrays_become_tensors_which_if_pinned_share_one_buffer(pins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    # A host without CUDA devices cannot pin memory.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options))
    integers, floats = np.array([1, 2, 3]), np.array([[1.5], [2.5]], dtype=np.float32)  # of 24 and 8 bytes
    small = np.array([4, 5, 6, 7], dtype=np.int32)  # 16 bytes
    arrays: list[Any] = [integers, np.empty((2, 0), dtype=np.int32), floats, small, np.array([True])]
    tensors = Memory(pins=pins).place(arrays)
    assert [tensor.tolist() for tensor in tensors] == [array.tolist() for array in arrays]
    assert [tensor.numpy().dtype for tensor in tensors] == [array.dtype for array in arrays]
    if pins:  # each begins aligned
        starts = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
        assert starts == [0, 32, 32, 48, 64]
        assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {80}


def test_memory_is_pinned_or_on_a_gpu_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device is cuda, but PyTorch finds no CUDA device on this host; pass"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^pin_memory=True, but PyTorch finds no device on this host; leave pin_mem"):
        _loaded(pin_memory=True)
    again = pickle.loads(pickle.dumps(LoaderConfig(batch_size=2, device=torch.device("cuda", 1))))
    assert again.device == torch.device("cuda", 1)


class _InOneBuffer:
    """Batches that are all written to the same tensors, which a loop without a Balancer would not notice."""

    def __iter__(self) -> Iterator[Any]:
        batch: Any = COLLATE([{"item_id": [0] * 3, "sample_ids": 0}] * 4)
        for step in range(12):
            batch.sample_ids.numpy()[:] = step * 4 + np.arange(4)
            batch.features.values().numpy()[:] = batch.sample_ids.numpy().repeat(3)
            yield batch


def test_every_sample_comes_once_from_buffers_that_are_used_again() -> None:
    iterator = iter(_InOneBuffer())
    of_steps: Any = DataLoader(range(12), batch_size=1, collate_fn=lambda _: next(iterator))  # type: ignore[arg-type]
    for loader in (_InOneBuffer(), IterableWrapper(_InOneBuffer()), of_steps):
        with Balancer(loader, BalanceConfig(cost=item_tokens, lookahead=3)) as balancer:
            batches = list(balancer)
        assert sorted(all_ids(batches)) == list(range(48))
        for batch in batches:
            assert batch.features.values().tolist() == batch.sample_ids.repeat_interleave(3).tolist()
