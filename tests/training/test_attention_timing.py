from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenrank.training import AttentionTracker, Flops
from tests.training.test_step_timer import Time, slow_time, timed

FORWARD, BACKWARD = 2.0, 3.0  # milliseconds of the layers below


@pytest.fixture(autouse=True)
def _slow_time() -> Iterator[None]:
    with slow_time():
        yield


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, query: Tensor, *, lengths: Tensor | None = None, scale: float = 1.0) -> Tensor:
        return timed(FORWARD / 1e3, BACKWARD / 1e3, query * self.weight) ** 2 * scale


class Model(nn.Module):
    """Two layers; what is between them takes time too, which is not theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()
        self.between = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        Time.now += 0.1
        return x + self.second(query=self.between(y), scale=2.0)  # type: ignore[no-any-return]


def _train(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    (model(torch.arange(6.0).view(2, 3).requires_grad_()) ** 2).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_times_are_those_of_each_layer_alone_within_the_interval_and_there_are_no_hooks_outside() -> None:
    model = Model()
    plain = _train(model)
    tracker = AttentionTracker(model, (Attention, nn.Linear), device="cpu", start=1, stop=3)

    def count_hooks() -> int:
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())

    hooks, rows = [count_hooks()], list[Any]()
    for _ in range(4):
        assert all(torch.equal(*pair) for pair in zip(plain, _train(model), strict=True))  # the same bits
        model.first(torch.ones(2, 3)).sum().backward()  # its inputs need no gradient
        timings = tracker.step()
        rows.append([(one.layer, one.calls, pytest.approx((one.forward_ms, one.backward_ms))) for one in timings])
        hooks.append(count_hooks())
    assert hooks == [0, 6, 6, 0, 0]
    layers = [("first", 4, (FORWARD, BACKWARD)), ("second", 2, (FORWARD, BACKWARD)), ("between", 2, (0, 0))]
    assert rows == [[], [], layers, []]
    for start in (0, 1):
        detached = AttentionTracker(model, Attention, device="cpu", start=start, stop=2)
        assert count_hooks() == (0 if start else 4)
        detached.detach()
        assert (detached.step(), count_hooks()) == ([], 0)


def test_speeds_are_total_flops_of_arguments_by_name_over_total_time() -> None:
    layer = Attention()

    def flops(module: nn.Module, arguments: Mapping[str, Any]) -> Flops:
        rows = arguments["query"].sum().long() * int(arguments["scale"])  # a scalar tensor, as counts on a device are
        return Flops(linear_forward=rows, linear_backward=3 * rows, attention_forward=0, attention_backward=0)

    tracker = AttentionTracker(layer, Attention, device="cpu", start=0, stop=1, flops=flops, peak_flops=1e6)
    first, second = (torch.tensor(rows, requires_grad=True) for rows in (10.0, 25.0))
    (layer(first) + layer(query=second, scale=2.0)).backward()  # a scale of 1 by default
    (timing,) = tracker.step()
    assert timing.forward_tflops == pytest.approx(60 / (2 * FORWARD * 1e-3) / 1e12)
    assert timing.backward_tflops == pytest.approx(180 / (2 * BACKWARD * 1e-3) / 1e12)
    assert timing.mfu == pytest.approx(240 / (2 * (FORWARD + BACKWARD) * 1e-3) / 1e6)
    assert timing.line() == (
        "rank 0 |  | 2 calls | forward 2.000 ms, 0.0 TFLOP/s | backward 3.000 ms, 0.0 TFLOP/s | MFU 2.4%"
    )


@pytest.mark.gpu
def test_on_a_gpu_nothing_within_the_interval_waits_and_times_are_those_of_the_device() -> None:
    model = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 4096)).cuda()
    tracker, results = AttentionTracker(model, nn.Linear, device="cuda", start=1, stop=3), list[Any]()
    try:
        for step in range(3):
            torch.cuda.set_sync_debug_mode("error" if step < 2 else "default")
            model(torch.ones(4096, 64, device="cuda", requires_grad=True)).sum().backward()
            results.append(tracker.step())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    none, also_none, (short, long) = results
    assert (none, also_none, short.calls, long.calls) == ([], [], 2, 2)
    assert 0 < short.forward_ms < long.forward_ms
    assert 0 < short.backward_ms < long.backward_ms
