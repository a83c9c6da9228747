"""Layers as a whole have the bits of layers by parts, and are chosen where no part differs or has hooks."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from hstu.attention import Sequences
from hstu.layer import HSTULayer
from tests.examples.hstu.interpreter import interpret, needs_triton
from tests.examples.hstu.samples import CONFIG


@needs_triton
def test_interpreted_layers_have_the_bits_of_layers_by_parts() -> None:
    interpret("interpreted_layer.py")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
def test_layers_have_the_bits_of_layers_by_parts(mode: str) -> None:
    from tests.examples.hstu.whole_layers import check_layers

    check_layers(mode=mode, device="cuda")


def _watch(layer: HSTULayer) -> None:
    layer.attention.register_forward_hook(lambda *_: None)


def _watch_gradients(layer: HSTULayer) -> None:
    layer.output.register_full_backward_hook(lambda *_: None)


def _replace(layer: HSTULayer) -> None:
    layer.output = nn.Sequential(layer.output)  # type: ignore[assignment]


def _drop(layer: HSTULayer) -> None:
    layer.dropout.p = 0.1


def _evaluate(layer: HSTULayer) -> None:
    layer.dropout.p = 0.1
    layer.eval()


def _pad(layer: HSTULayer) -> None:
    layer.attention.name = "padded"


def _unfuse(layer: HSTULayer) -> None:
    layer.fused_norms = False


def _keep(layer: HSTULayer) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "is_plain"),
    [(_keep, True), (_evaluate, True), (_drop, False), (_watch, False), (_watch_gradients, False), (_replace, False)],
)
def test_a_layer_that_computes_something_else_or_is_watched_is_not_plain(
    change: Callable[[HSTULayer], None], is_plain: bool
) -> None:
    layer = HSTULayer(CONFIG)
    change(layer)
    assert layer.is_plain(torch.zeros(1, CONFIG.hidden)) is is_plain


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "is_whole"), [(_keep, True), (_watch, False), (_drop, False), (_pad, False), (_unfuse, False)]
)
def test_plain_layers_are_computed_as_a_whole_if_there_are_kernels(
    change: Callable[[HSTULayer], None], is_whole: bool
) -> None:
    layer = HSTULayer(replace(CONFIG, hidden=64, heads=1, head_dim=64, attention="triton")).cuda()
    change(layer)
    none = torch.zeros(1, dtype=torch.int64, device="cuda")
    sequences = Sequences(
        offsets=torch.tensor([0, 5], device="cuda"),
        num_contextual=none,
        num_candidates=none,
        num_tokens=5,
        max_length=5,
    )
    tokens = torch.randn(5, 64, device="cuda")
    _, update = layer(tokens, tokens, sequences)
    assert (type(update.grad_fn).__name__ == "_LayerBackward") is is_whole
