import math
from collections.abc import Callable

import pytest
import torch
from attention_timing import (
    CudaTimer,
    Heads,
    Passes,
    Times,
    parse_dtype,
    planned_runs,
    require_cuda,
    time_passes,
    time_softmax,
)
from torch.nn.attention import SDPBackend

from evenrank.core.errors import ConfigError
from hstu.config import ATTENTIONS

HEADS = Heads(count=2, head_dim=8, dtype=torch.float32)


def test_flops_are_two_products_for_each_pair() -> None:
    # 3 tokens have 6 pairs, 1 has 1; two products of 8 dimensions, multiplied and added, in 2 heads.
    assert HEADS.forward_flops([3, 1]) == 2 * 2 * 8 * 2 * (6 + 1)
    # The largest cell of the sweep, 2.2 * 10^12 per product.
    largest = Heads(count=4, head_dim=256, dtype=torch.bfloat16).forward_flops([4096] * 128)
    assert largest == pytest.approx(2 * 1024 * 128 * 4096**2, rel=1e-3)


def test_runs_are_fewer_where_all_take_too_long() -> None:
    assert planned_runs(1.0, math.inf) == planned_runs(10.0, 0.6) == (10, 50)
    assert planned_runs(20.0, 0.6) == (5, 25)
    assert planned_runs(1000.0, 0.6) == planned_runs(1.0, 0.0) == (1, 3)


def test_both_passes_are_timed_on_the_lengths() -> None:
    counted: list[object] = []

    def timer(run: Callable[[], object]) -> Times:
        counted.append(run())
        return Times(ms=float(len(counted)), runs=50 - len(counted))

    passes = time_passes(ATTENTIONS["padded"], [3, 0, 5], HEADS, timer=timer, device="cpu")
    output, gradients = counted
    assert isinstance(output, torch.Tensor)
    assert output.shape == (8, 2, 8)
    assert isinstance(gradients, tuple)
    assert [gradient.shape for gradient in gradients] == [(8, 2, 8)] * 3
    assert passes == Passes(forward=Times(ms=1.0, runs=49), backward=Times(ms=2.0, runs=48))
    assert passes.both == Times(ms=3.0, runs=48)


def test_softmax_attention_is_causal_and_as_large() -> None:
    counted: list[object] = []

    def timer(run: Callable[[], object]) -> Times:
        counted.append(run())
        return Times(ms=1.0, runs=1)

    time_softmax(SDPBackend.MATH, 3, 5, HEADS, timer=timer, device="cpu")
    output, gradients = counted
    assert isinstance(output, torch.Tensor)
    assert isinstance(gradients, tuple)
    assert [tensor.shape for tensor in (output, *gradients)] == [(3, 2, 5, 8)] * 4
    d_query = gradients[0]
    assert [bool(d_query[:, :, token].abs().max() > 1e-6) for token in range(3)] == [False, True, True]  # one key alone
    with pytest.raises(RuntimeError, match=r"No (available|viable)"):
        time_softmax(SDPBackend.CUDNN_ATTENTION, 3, 5, HEADS, timer=timer, device="cpu")


def test_an_unknown_dtype_and_a_host_without_a_device_are_one_line() -> None:
    assert parse_dtype("float32") == torch.float32
    with pytest.raises(ConfigError, match="one of bfloat16, float32, got 'float16'"):
        parse_dtype("float16")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="run it on a host with a GPU"):
            require_cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "padded"])
def test_every_attention_is_timed_on_a_device(name: str) -> None:
    heads = Heads(count=2, head_dim=64, dtype=torch.bfloat16)
    passes = time_passes(ATTENTIONS[name], [100, 0, 300], heads, timer=CudaTimer())
    assert (passes.forward.runs, passes.backward.runs) == (50, 50)
    assert passes.forward.ms > 0
    assert passes.backward.ms > 0
    assert CudaTimer(seconds=0)(lambda: torch.randn(1024, device="cuda")).runs == 3
