"""PyTorch's warning about TorchRec is not shown; everything else that its logger says is."""

import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.fx import _symbolic_trace

from evenrank.dataloader.batches.batch import keyed_jagged_tensor
from evenrank.dataloader.batches.torch_compat import suppress_fx_tracing_warning

LOG = logging.getLogger("torch.fx._symbolic_trace")


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What the logger says, in a process that has not given the warning yet."""
    _symbolic_trace.is_fx_tracing_warning.cache_clear()
    suppress_fx_tracing_warning.cache_clear()
    kept = _Kept()
    LOG.addHandler(kept)
    yield kept.messages
    LOG.removeHandler(kept)


def _build() -> None:
    keyed_jagged_tensor(["item_id"], torch.arange(3), np.array([[1, 2]]))["item_id"]


def test_building_a_batch_warns_of_nothing(messages: list[str]) -> None:
    _build()
    assert messages == []


def test_other_warnings_of_the_same_logger_are_shown(messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def is_fx_tracing_warning() -> None:
        LOG.warning("of this thread")
        # The same warning in another thread, of a user who calls the function.
        thread = threading.Thread(target=give_warning)
        thread.start()
        thread.join()
        other_function()

    give_warning = _symbolic_trace.is_fx_tracing_warning

    def other_function() -> None:
        LOG.warning("of another function")

    monkeypatch.setattr(_symbolic_trace, "is_fx_tracing_warning", is_fx_tracing_warning)
    suppress_fx_tracing_warning()
    LOG.warning("afterwards")
    first_words = [message.split(" will ")[0] for message in messages]
    assert first_words == [
        "is_fx_tracing",
        "of another function",
        "afterwards",
    ]
    assert LOG.filters == []


def test_versions_of_pytorch_without_the_warning_are_left_alone(
    messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(_symbolic_trace, "is_fx_tracing_warning")
    suppress_fx_tracing_warning()
    assert messages == []
