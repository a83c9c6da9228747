"""What is computed again is not kept, and changes no bit of a gradient."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hstu.config import HSTUConfig
from tests.examples.hstu.samples import CONFIG, make_batch, make_ranking, random_samples

WITH_DROPOUT = replace(CONFIG, dropout=0.3, layers=3)
SAMPLES = random_samples(12)


class _Allocations(TorchDispatchMode):
    """Notes what is allocated within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bytes: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._bytes[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def live_bytes(self, model: nn.Module) -> int:
        """Return how much is still allocated, besides the model's parameters and their gradients."""
        owned = [tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad)]
        storages = {tensor.untyped_storage()._cdata for tensor in owned if tensor is not None}
        noted = [entry for storage, entry in self._bytes.items() if storage not in storages]
        return sum(count for reference, count in noted if not reference.expired())


def _train(config: HSTUConfig, *, autocast: bool) -> tuple[Tensor, list[Tensor], int]:
    """Return the logits, all gradients, and the bytes kept for the backward pass."""
    model = make_ranking(config)
    if autocast:
        model.float()
    with _Allocations() as allocations, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss_sums, logits = model(make_batch(SAMPLES))
        kept = allocations.live_bytes(model)
    loss_sums.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return logits, gradients, kept


@pytest.mark.parametrize(("autocast", "itemsize"), [(False, 8), (True, 2)])
def test_norms_and_activations_are_not_kept_and_gradients_are_equal_bit_for_bit(autocast: bool, itemsize: int) -> None:
    logits, gradients, kept = _train(WITH_DROPOUT, autocast=autocast)
    again_logits, again_gradients, again_kept = _train(replace(WITH_DROPOUT, recompute=True), autocast=autocast)
    assert torch.equal(again_logits, logits)
    for again, gradient in zip(again_gradients, gradients, strict=True):
        assert torch.equal(again, gradient)
    num_tokens = sum(make_batch(SAMPLES).features.length_per_key())
    width = CONFIG.hidden + 4 * CONFIG.heads * CONFIG.head_dim  # of LayerNorm's output and SiLU's
    assert kept - again_kept >= WITH_DROPOUT.layers * num_tokens * width * itemsize


def test_what_is_computed_again_is_freed_by_the_backward_pass() -> None:
    model = make_ranking(replace(WITH_DROPOUT, recompute=True))
    with _Allocations() as allocations:
        model(make_batch(SAMPLES))[0].sum().backward()
    assert allocations.live_bytes(model) == 0


def test_a_graph_can_be_used_twice() -> None:
    model = make_ranking(replace(CONFIG, recompute=True))
    loss = model(make_batch(random_samples(4)))[0].sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
