from collections.abc import Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evenrank.core.errors import ConfigError
from evenrank.training import AttentionTracker, Flops, LayerTiming, gather_timings
from tests.ranks import RankPool

FORWARD, BACKWARD = 2.0, 3.0  # milliseconds of the layers below


class _Time:
    """A clock that only layers advance."""

    now = 0.0  # seconds

    @classmethod
    def pass_by(cls, milliseconds: float) -> None:
        cls.now += milliseconds / 1e3


def _milliseconds(timing: LayerTiming) -> Any:
    return pytest.approx((timing.forward_ms, timing.backward_ms))


@pytest.fixture(autouse=True)
def _slow_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("evenrank.training.step_timer.time", SimpleNamespace(perf_counter=lambda: _Time.now))
    yield
    _Time.now = 0.0


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        _Time.pass_by(FORWARD)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Time.pass_by(BACKWARD)
        return 2 * ctx.saved_tensors[0] * gradient  # type: ignore[no-any-return]


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, query: Tensor, *, lengths: Tensor | None = None, scale: float = 1.0) -> Tensor:
        squared: Tensor = _Square.apply(query * self.weight)  # type: ignore[no-untyped-call]
        return squared * scale


class _Model(nn.Module):
    """Two layers; what is between them takes time too, which is not theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Attention(), _Attention()
        self.between = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        _Time.pass_by(100)
        return x + self.second(query=self.between(y), scale=2.0)  # type: ignore[no-any-return]


def _train(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    (model(x) ** 2).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _inputs() -> Tensor:
    return torch.arange(6.0).view(2, 3).requires_grad_()


def test_times_are_those_of_each_layer_alone_within_the_interval_and_there_are_no_hooks_outside() -> None:
    model = _Model()
    tracker = AttentionTracker(model, _Attention, device="cpu", start=1, stop=3)

    def count_hooks() -> int:
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())

    hooks, rows = [count_hooks()], []
    for _ in range(4):
        _train(model, _inputs())
        rows.append(tracker.step())
        hooks.append(count_hooks())
    assert hooks == [0, 4, 4, 0, 0]
    assert [len(timings) for timings in rows] == [0, 0, 2, 0]
    for timing, layer in zip(rows[2], ("first", "second"), strict=True):
        assert (timing.rank, timing.layer, timing.calls) == (0, layer, 2)
        assert _milliseconds(timing) == (FORWARD, BACKWARD)
        assert (timing.forward_tflops, timing.backward_tflops, timing.mfu) == (None, None, None)
    for start in (0, 1):
        detached = AttentionTracker(model, _Attention, device="cpu", start=start, stop=2)
        assert count_hooks() == (0 if start else 4)
        detached.detach()
        assert detached.step() == detached.step() == []
        assert count_hooks() == 0


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_tracked_layers_compute_the_same_bits(reentrant: bool | None) -> None:
    class Checkpointed(_Model):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    model = _Model() if reentrant is None else Checkpointed()
    plain = _train(model, _inputs())
    AttentionTracker(model, _Attention, device="cpu", start=0, stop=1)
    tracked = _train(model, _inputs())
    assert len(tracked) == 4
    assert all(torch.equal(*pair) for pair in zip(plain, tracked, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_is_no_forward_pass_but_backward_time(reentrant: bool) -> None:
    class Checkpointed(_Attention):
        def forward(self, query: Tensor, **others: Any) -> Tensor:
            inner = super().forward
            return checkpoint(lambda x: inner(x, **others), query, use_reentrant=reentrant)  # type: ignore[no-any-return]

    around, within = Checkpointed(), _Attention()
    for layer, output, backward in (
        (around, around, FORWARD + BACKWARD),
        # Without reentrancy, the forward pass is repeated after the gradient has arrived.
        (within, partial(checkpoint, within, use_reentrant=reentrant), BACKWARD + (0 if reentrant else FORWARD)),
    ):
        tracker = AttentionTracker(layer, _Attention, device="cpu", start=0, stop=1)
        (output(_inputs()) ** 2).sum().backward()
        (timing,) = tracker.step()
        assert timing.calls == 1
        assert _milliseconds(timing) == (FORWARD, backward)


def test_speeds_are_total_flops_of_arguments_by_name_over_total_time() -> None:
    layer = _Attention()

    def flops(module: nn.Module, arguments: Mapping[str, Any]) -> Flops:
        rows = arguments["query"].sum().long() * int(arguments["scale"])  # a scalar tensor, as counts on a device are
        return Flops(linear_forward=rows, linear_backward=3 * rows, attention_forward=0, attention_backward=0)

    tracker = AttentionTracker(layer, _Attention, device="cpu", start=0, stop=1, flops=flops, peak_flops=1e6)
    first, second = (torch.tensor(rows, requires_grad=True) for rows in (10.0, 25.0))
    (layer(first) + layer(query=second, scale=2.0)).backward()  # a scale of 1 by default
    (timing,) = tracker.step()
    assert timing.calls == 2
    assert _milliseconds(timing) == (FORWARD, BACKWARD)
    assert timing.forward_tflops == pytest.approx(60 / (2 * FORWARD * 1e-3) / 1e12)
    assert timing.backward_tflops == pytest.approx(180 / (2 * BACKWARD * 1e-3) / 1e12)
    assert timing.mfu == pytest.approx(240 / (2 * (FORWARD + BACKWARD) * 1e-3) / 1e6)


def test_calls_that_fail_evaluation_and_layers_that_were_not_called_do_not_count() -> None:
    model = _Model()
    tracker = AttentionTracker(model, _Attention, device="cpu", start=0, stop=1)
    with pytest.raises(TypeError):
        model.first(None)
    model.first(torch.ones(2, 3)).sum().backward()  # its inputs need no gradient
    model.eval()
    with torch.no_grad():
        model(_inputs())
    (timing,) = tracker.step()
    assert (timing.layer, timing.calls, timing.backward_ms) == ("first", 1, None)
    assert timing.forward_ms == pytest.approx(FORWARD)


def test_tensors_in_containers_are_followed() -> None:
    class Nested(nn.Module):
        def forward(self, pair: tuple[Tensor, list[Tensor]], *, other: dict[str, Any]) -> dict[str, Any]:
            a, (b,) = pair
            squared: Tensor = _Square.apply(a + b * other["c"])  # type: ignore[no-untyped-call]
            return {"out": (squared, other["name"]), "number": 3}

    layer = Nested()
    tracker = AttentionTracker(layer, Nested, device="cpu", start=0, stop=1)
    a, b, c = (torch.tensor(value, requires_grad=True) for value in (1.0, 2.0, 3.0))
    result = layer((a, [b]), other={"c": c, "name": "x"})
    assert (result["out"][1], result["number"]) == ("x", 3)
    result["out"][0].backward()
    assert [tensor.grad for tensor in (a, b, c)] == [14, 42, 28]
    (timing,) = tracker.step()
    assert timing.backward_ms == pytest.approx(BACKWARD)


def test_layers_are_found_by_type_or_by_name() -> None:
    model = nn.ModuleDict({"a": _Model(), "b": _Model()})

    def found(layers: Any) -> list[str]:
        tracker = AttentionTracker(model, layers, device="cpu", start=0, stop=1)
        for part in model.values():
            _train(part, _inputs())
        return [timing.layer for timing in tracker.step()]

    assert found("*.first") == ["a.first", "b.first"]
    assert found("a.second") == ["a.second"]
    assert found((_Attention, nn.Linear)) == ["a.first", "a.second", "a.between", "b.first", "b.second", "b.between"]


def test_a_tracker_without_layers_or_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no module .* 'x\.\*'; .* types Linear, _Attention, _Model"):
        AttentionTracker(_Model(), "x.*", device="cpu", start=0, stop=1)
    for start, stop in ((3, 3), (-1, 2), (4, 2)):
        with pytest.raises(ConfigError, match=rf"the interval of steps is \[{start}, {stop}\)"):
            AttentionTracker(_Model(), _Attention, device="cpu", start=start, stop=stop)


def test_a_row_says_what_is_known() -> None:
    forward: dict[str, Any] = {"rank": 1, "layer": "a", "calls": 4, "forward_ms": 1.5, "forward_tflops": 310.04}
    timing = LayerTiming(**forward, backward_ms=3.25, backward_tflops=250, mfu=0.27)
    speeds = "forward 1.500 ms, 310.0 TFLOP/s | backward 3.250 ms, 250.0 TFLOP/s | MFU 27.0%"
    assert timing.line() == f"rank 1 | a | 4 calls | {speeds}"


def _timings_of_ranks(rank: int, world_size: int) -> list[tuple[int, str]]:
    model = _Model()
    tracker = AttentionTracker(model, "first" if rank else _Attention, device="cpu", start=0, stop=1)
    _train(model, _inputs())
    return [(timing.rank, timing.layer) for timing in gather_timings(tracker.step())]


def test_rows_of_all_ranks_are_gathered(ranks: RankPool) -> None:
    assert ranks.run(2, _timings_of_ranks) == [[(0, "first"), (0, "second"), (1, "first")]] * 2
    assert gather_timings([]) == []


@pytest.mark.gpu
def test_on_a_gpu_nothing_within_the_interval_waits_and_times_are_those_of_the_device() -> None:
    class Products(nn.Module):
        def forward(self, x: Tensor, *, times: int) -> Tensor:
            for _ in range(times):
                x = x @ x.T / len(x)
            return x

    def flops(module: nn.Module, arguments: Mapping[str, Any]) -> Flops:
        forward = arguments["times"] * 2 * len(arguments["x"]) ** 3
        return Flops(linear_forward=forward, linear_backward=2 * forward, attention_forward=0, attention_backward=0)

    device = torch.device("cuda")
    model = nn.ModuleDict({"short": Products(), "long": Products()})
    tracker = AttentionTracker(model, Products, device=device, start=1, stop=3, flops=flops, peak_flops=1e15)
    x = torch.randn(2048, 2048, device=device, requires_grad=True)
    results: list[Any] = []
    try:
        for step in range(3):
            torch.cuda.set_sync_debug_mode("error" if step < 2 else "default")
            (model["short"](x, times=2).sum() + model["long"](x, times=20).sum()).backward()
            results.append(tracker.step())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert results[:2] == [[], []]
    short, long = results[2]
    assert (short.calls, long.calls) == (2, 2)
    assert 0 < short.forward_ms < long.forward_ms
    assert 0 < short.backward_ms < long.backward_ms
    assert 0 < long.mfu < 1
