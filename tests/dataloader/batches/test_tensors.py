"""Batches are the same whatever modes of torch a program has set, and building them gives no warning of torch.fx."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx import _symbolic_trace

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
from tests.dataloader.balance.batch_bits import bits_of


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
VECTOR = dense(shape=(2,), dtype=torch.bfloat16)
OF_JAGGED = {"item_id": jagged(), "weight": jagged(torch.float32, field="weights")}
COLLATE = JaggedCollate({**OF_JAGGED, "score": dense(), "vector": VECTOR, "rest": dense()}, batch_size=4)
SAMPLES: list[dict[str, Any]] = [
    {"item_id": [7, 2], "weight": [0.1], "score": 0.1, "vector": [0.1, 2.0], "rest": np.float64(0.1)},
    {"item_id": [], "weight": [], "score": 1 / 3, "vector": [1, 0], "rest": np.float64(3)},
]
RANK: dict[str, Any] = {"rank": 0, "world_size": 1}
CONFIG = LoaderConfig(batch_size=32, max_num_candidates=2, num_tasks=2, user_id=True)
OF_CODES = LoaderConfig(batch_size=32, codes=random_codes(501, levels=2, codebook_size=8))
KINDS: dict[str, Callable[[Path], Any]] = {
    "loader": lambda path: build_loader(path, CONFIG, **RANK),
    "semantic ids": lambda path: build_loader(path, OF_CODES, **RANK),
    "stream": lambda path: build_stream_loader(path, CONFIG, StreamConfig(window_rows=16), **RANK),
    "distinct random batches": lambda path: RandomBatches(CONFIG, num_batches=3, num_distinct=2, **RANK),
    "padded batches": lambda path: PaddedBatches(SAMPLES, batch_size=5, collate=COLLATE),
    "padded tokens": lambda path: [
        *build_loader(path, dataclasses.replace(CONFIG, pad_tokens_to=64), **RANK),
        *PaddedBatches(SAMPLES, batch_size=5, collate=JaggedCollate(OF_JAGGED, pad_tokens_to=8), num_batches=2),
    ],
    "padded": lambda path: [COLLATE(SAMPLES), pad_batch(COLLATE(SAMPLES), 9)],
    "empty": lambda path: [empty_batch(schema_of(COLLATE(SAMPLES)))],
    "source of a list": lambda path: LoaderAdapter([COLLATE(SAMPLES)], **RANK),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_change_no_batch(small_dataset: Path, mode: str) -> None:
    for kind, make in KINDS.items():
        expected = [bits_of(batch) for batch in make(small_dataset)]
        with MODES[mode]():
            batches = list(make(small_dataset))
            assert torch.is_grad_enabled() == (mode not in ("inference", "no grad"))
            assert torch.is_inference_mode_enabled() == (mode == "inference")
        assert [bits_of(batch) for batch in batches] == expected != [], kind
        for name, value in (pair for batch in batches for pair in batch.tensors()):
            for tensor in () if value is None else (value.values(),) if hasattr(value, "keys") else (value,):
                assert not tensor.is_inference(), (kind, name)  # so it can be trained
                assert not tensor.requires_grad, (kind, name)
    labels = torch.tensor([5, 2])
    with MODES[mode]():
        bits = label_bits(labels, 3)
    assert (bits.tolist(), bits.dtype) == ([[1, 0, 1], [0, 1, 0]], torch.float32)


LOG = logging.getLogger("torch.fx._symbolic_trace")


def test_building_a_batch_warns_of_nothing_but_others_are_still_warned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_warning = _symbolic_trace.is_fx_tracing_warning

    def is_fx_tracing_warning() -> None:
        LOG.warning("of this thread")
        with ThreadPoolExecutor(1) as threads:  # the same warning, of a user who calls the function
            threads.submit(give_warning).result()

    give_warning.cache_clear()  # as in a process that has not given the warning yet
    suppress_fx_tracing_warning.cache_clear()
    keyed_jagged_tensor(["item_id"], torch.arange(3), np.array([[1, 2]]))["item_id"]
    assert caplog.messages == []
    give_warning.cache_clear()
    suppress_fx_tracing_warning.cache_clear()
    monkeypatch.setattr(_symbolic_trace, "is_fx_tracing_warning", is_fx_tracing_warning)
    suppress_fx_tracing_warning()
    LOG.warning("afterwards")
    assert [message.split(" will ")[0] for message in caplog.messages] == ["is_fx_tracing", "afterwards"]
    assert LOG.filters == []
    suppress_fx_tracing_warning.cache_clear()
    monkeypatch.delattr(_symbolic_trace, "is_fx_tracing_warning")  # versions of PyTorch without the warning
    suppress_fx_tracing_warning()
