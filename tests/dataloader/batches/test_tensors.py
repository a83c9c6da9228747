"""Batches are the same whatever modes of torch a program has set, and building them gives no warning of torch.fx."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx import _symbolic_trace
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader import (
    JaggedCollate,
    LoaderConfig,
    PaddedBatches,
    RandomBatches,
    StreamConfig,
    build_loader,
    build_stream_loader,
    dense,
    jagged,
    random_codes,
)
from evenrank.dataloader.balance.source import LoaderAdapter
from evenrank.dataloader.batches.padding import empty_batch, pad_batch
from evenrank.dataloader.batches.schema import schema_of
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor, suppress_fx_tracing_warning
from evenrank.training import label_bits


@contextlib.contextmanager
def _set(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


MODES: dict[str, Callable[[], Any]] = {
    "meta device": lambda: _set(torch.set_default_device, "meta", None),
    "float64": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": lambda: _set(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
}
COLLATE = JaggedCollate(
    {
        "item_id": jagged(),
        "weight": jagged(torch.float32, field="weights"),
        "score": dense(),
        "vector": dense(shape=(2,), dtype=torch.bfloat16),
        "rest": dense(),
    },
    batch_size=4,
)
SAMPLES: list[dict[str, Any]] = [
    {"item_id": [7, 2], "weight": [0.1], "score": 0.1, "vector": [0.1, 2.0], "rest": np.float64(0.1)},
    {"item_id": [], "weight": [], "score": 1 / 3, "vector": [1, 0], "rest": np.float64(3)},
]
RANK: dict[str, Any] = {"rank": 0, "world_size": 1}
CODES = random_codes(501, levels=2, codebook_size=8)
CONFIG = LoaderConfig(batch_size=32, max_num_candidates=2, num_tasks=2, user_id=True)
KINDS: dict[str, Callable[[Path], Any]] = {
    "loader": lambda path: build_loader(path, CONFIG, **RANK),
    "semantic ids": lambda path: build_loader(path, LoaderConfig(batch_size=32, codes=CODES), **RANK),
    "stream": lambda path: build_stream_loader(path, CONFIG, StreamConfig(window_rows=16), **RANK),
    "random batches": lambda path: RandomBatches(CONFIG, num_batches=2, **RANK),
    "distinct random batches": lambda path: RandomBatches(CONFIG, num_batches=3, num_distinct=2, **RANK),
    "JaggedCollate": lambda path: [COLLATE(SAMPLES)],
    "padded batches": lambda path: PaddedBatches(SAMPLES, batch_size=5, collate=COLLATE),
    "padded": lambda path: [pad_batch(COLLATE(SAMPLES), 9)],
    "empty": lambda path: [empty_batch(schema_of(COLLATE(SAMPLES)))],
    "source of a list": lambda path: LoaderAdapter([COLLATE(SAMPLES)], **RANK),
}


def _tensors(batch: Any) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, value in batch.tensors():
        if isinstance(value, KeyedJaggedTensor):
            tensors |= {f"{name}.values": value.values(), f"{name}.lengths": value.lengths()}
        elif value is not None:
            tensors[name] = value
    return tensors


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_modes_change_no_batch(small_dataset: Path, kind: str, mode: str) -> None:
    labels = torch.tensor([5, 2])
    expected = [_tensors(batch) for batch in KINDS[kind](small_dataset)]
    assert expected
    with MODES[mode]():
        batches = [_tensors(batch) for batch in KINDS[kind](small_dataset)]
        bits = label_bits(labels, 3)
        assert torch.is_grad_enabled() == (mode not in ("inference", "no grad"))
        assert torch.is_inference_mode_enabled() == (mode == "inference")
    assert (bits.tolist(), bits.dtype) == ([[1, 0, 1], [0, 1, 0]], torch.float32)
    for batch, tensors in zip(batches, expected, strict=True):
        assert list(batch) == list(tensors)
        for name, tensor in batch.items():
            assert (tensor.device.type, tensor.dtype) == ("cpu", tensors[name].dtype), name
            assert torch.equal(tensor, tensors[name]), name
            assert not tensor.is_inference(), name  # so it can be trained
            assert not tensor.requires_grad, name


def test_dtypes_of_undeclared_values_are_those_that_torch_has_by_default() -> None:
    collate = JaggedCollate({"value": dense()})
    numbers: list[Any] = [1.5, 2, True, 1j, [1.5, 2], [2, 1.5], [[1], [2]]]
    for value in (*numbers, np.float64(1), [np.float64(1)], torch.ones(2).half()):
        assert collate([{"value": value}]).value.dtype == torch.as_tensor(value).dtype


def test_limits_of_a_batch_are_its_own(small_dataset: Path) -> None:
    for kind in ("loader", "semantic ids", "stream", "JaggedCollate"):
        first, *others = list(KINDS[kind](small_dataset))
        if first.length_limits is not None:
            limits = [dict(batch.length_limits) for batch in others]
            first.length_limits["item_id"] = 1
            assert [batch.length_limits for batch in others] == limits


LOG = logging.getLogger("torch.fx._symbolic_trace")


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """Yield the messages of the logger, in a process that has not given the warning yet."""
    _symbolic_trace.is_fx_tracing_warning.cache_clear()
    suppress_fx_tracing_warning.cache_clear()
    kept: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: kept.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(handler)
    yield kept
    LOG.removeHandler(handler)


def test_building_a_batch_warns_of_nothing(messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    keyed_jagged_tensor(["item_id"], torch.arange(3), np.array([[1, 2]]))["item_id"]
    suppress_fx_tracing_warning.cache_clear()
    monkeypatch.delattr(_symbolic_trace, "is_fx_tracing_warning")  # versions of PyTorch without the warning
    suppress_fx_tracing_warning()
    assert messages == []


def test_other_warnings_of_the_same_logger_are_shown(messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    give_warning = _symbolic_trace.is_fx_tracing_warning

    def is_fx_tracing_warning() -> None:
        LOG.warning("of this thread")
        # The same warning in another thread, of a user who calls the function.
        thread = threading.Thread(target=give_warning)
        thread.start()
        thread.join()
        other_function()

    def other_function() -> None:
        LOG.warning("of another function")

    monkeypatch.setattr(_symbolic_trace, "is_fx_tracing_warning", is_fx_tracing_warning)
    suppress_fx_tracing_warning()
    LOG.warning("afterwards")
    first_words = [message.split(" will ")[0] for message in messages]
    assert first_words == ["is_fx_tracing", "of another function", "afterwards"]
    assert LOG.filters == []
