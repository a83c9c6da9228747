"""`AttentionTracker`: times, speed and utilization of each attention layer, forward and backward."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.ranks.agree import gather_checked
from evenrank.dataloader.balance.ranks.process_group import Group, process_group_of
from evenrank.training.flops import Flops
from evenrank.training.step_timer import Clock

LayerFlops = Callable[[nn.Module, Mapping[str, Any]], Flops]
"""From a layer, and the arguments of a call of its forward by name, to the call's FLOPs."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Call:
    """Marks of one call of a layer; None where nothing has happened."""

    is_forward: bool  # False if activation checkpointing repeats a forward pass
    forward_start: Any = None
    forward_stop: Any = None
    backward_start: Any = None
    backward_stop: Any = None
    flops: Flops | None = None


def _attach_hooks(
    layer: nn.Module, clock: Clock, flops: LayerFlops | None, calls: list[_Call]
) -> tuple[RemovableHandle, RemovableHandle]:
    """Attach forward hooks to a layer, which append the marks of each call to `calls`."""
    signature = inspect.signature(layer.forward)
    unfinished: _Call | None = None  # checkpointing may end a forward pass that it repeats half way

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal unfinished
        unfinished = None
        if not module.training:
            return None
        # Not -1 while this thread is in a backward pass: the forward pass is being repeated there.
        call = _Call(is_forward=torch._C._current_graph_task_id() == -1)
        args, kwargs = _observe((args, kwargs), lambda: setattr(call, "backward_stop", clock.mark()))
        unfinished = call
        call.forward_start = clock.mark()
        return args, kwargs

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        nonlocal unfinished
        call, unfinished = unfinished, None
        if call is None:
            return None
        call.forward_stop = clock.mark()
        calls.append(call)
        if flops is not None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            with torch.no_grad():
                call.flops = flops(module, bound.arguments)
        return _observe(output, lambda: setattr(call, "backward_start", clock.mark()))

    return (
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after, with_kwargs=True),
    )


class _Observed(torch.autograd.Function):
    """The identity; calls a function when all gradients have arrived in the backward pass."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.function = function
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.function()
        return (None, *gradients)


def _observe(value: Any, function: Callable[[], None]) -> Any:
    """Return the value with all tensors that require a gradient observed together, also in tuples, lists and dicts."""
    leaves, structure = tree_flatten(value, is_leaf=lambda item: type(item) not in (tuple, list, dict))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not places or not torch.is_grad_enabled():
        return value
    observed = _Observed.apply(function, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
    for place, tensor in zip(places, observed, strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, structure)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTiming:
    """Mean times and speeds of a layer on a rank; None of passes that did not happen, or without a FLOPs function."""

    rank: int
    """In the default process group."""
    layer: str
    """Name of the module in the model."""
    calls: int
    """Forward passes in the interval."""
    forward_ms: float
    backward_ms: float | None
    forward_tflops: float | None
    """TFLOP/s."""
    backward_tflops: float | None
    mfu: float | None
    """FLOP/s of all passes over the device's peak, 0 to 1; None if either is unknown."""

    def line(self) -> str:
        """Return it as a line of a table."""
        parts = [f"rank {self.rank}", self.layer, f"{self.calls} calls"]
        for name in ("forward", "backward"):
            ms, tflops = getattr(self, f"{name}_ms"), getattr(self, f"{name}_tflops")
            if ms is not None:
                parts.append(f"{name} {ms:.3f} ms" + ("" if tflops is None else f", {tflops:.1f} TFLOP/s"))
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        return " | ".join(parts)


class AttentionTracker:
    """Times each attention layer of a model on `device` in the steps start..stop-1, counted from 0.

        tracker = AttentionTracker(model, HSTUAttention, device=device, start=10, stop=20, flops=attention_flops)
        for batch in balancer:
            train(batch)
            for timing in tracker.step():
                print(timing.line())

    Layers have hooks within the interval alone. On a GPU, times are measured with CUDA events, which are read after the
    interval: nothing within it waits for the device.

    The time of a backward pass is from the arrival of the last gradient of the outputs to that of the last gradient of
    the inputs, including forward passes that activation checkpointing repeats meanwhile. There is none if no tensor
    argument requires a gradient. Tensors may be in tuples, lists and dicts; other arguments and outputs are passed on.
    Calls of layers in evaluation mode (`model.eval()`) do not count. Within the interval, a layer must not modify its
    arguments in place, nor its caller the outputs. In a compiled model, track modules that are not compiled.

    Args:
        layers: a type of module, several of them, or a pattern of names in which * stands for anything, such as
            `encoder.layers.*.attention`.
        flops: FLOPs of a call, from the layer and its arguments by the names of the parameters of its `forward`,
            however they were passed; counts may be scalars on the device. None: there are only times.
        peak_flops: FLOP/s of the device; see `device_peaks`. None: there is no MFU.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: type[nn.Module] | tuple[type[nn.Module], ...] | str,
        *,
        device: torch.device | str,
        start: int,
        stop: int,
        flops: LayerFlops | None = None,
        peak_flops: float | None = None,
    ) -> None:
        if not 0 <= start < stop:
            raise ConfigError(
                f"the interval of steps is [{start}, {stop}); it must begin at 0 or later and not be empty"
            )
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if (fnmatchcase(name, layers) if isinstance(layers, str) else isinstance(module, layers))
        }
        if not self._layers:
            kinds = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            raise ConfigError(f"no module of the model matches {layers!r}; it has modules of the types {kinds}")
        self._clock = Clock(device)
        self._start, self._stop = start, stop
        self._flops, self._peak_flops = flops, peak_flops
        self._rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._handles: list[RemovableHandle] = []
        self._calls: dict[str, list[_Call]] = {name: [] for name in self._layers}
        self._num_steps = 0
        self._is_detached = False
        if start == 0:
            self._attach()

    def step(self) -> list[LayerTiming]:
        """Record the end of a step; call it after each one.

        After the interval's last step, it waits for the device and returns a row for each layer that was called, in the
        order of the model; after all others, nothing.
        """
        self._num_steps += 1
        if self._is_detached:
            return []
        if self._num_steps == self._start:
            self._attach()
        if self._num_steps != self._stop:
            return []
        self.detach()
        self._clock.wait()
        timings = [self._timing(name, calls) for name, calls in self._calls.items() if calls]
        self._calls.clear()
        return timings

    def detach(self) -> None:
        """Remove all hooks for good; there will be no rows."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._is_detached = True

    def _attach(self) -> None:
        for name, module in self._layers.items():
            self._handles += _attach_hooks(module, self._clock, self._flops, self._calls[name])

    def _timing(self, name: str, calls: Sequence[_Call]) -> LayerTiming:
        forward = [call for call in calls if call.is_forward]
        backward = [call for call in calls if call.backward_start is not None and call.backward_stop is not None]
        forward_ms = sum(self._clock.milliseconds(call.forward_start, call.forward_stop) for call in forward)
        backward_ms = sum(self._clock.milliseconds(call.backward_start, call.backward_stop) for call in backward)
        forward_flops = sum(int(call.flops.forward) for call in forward if call.flops)
        backward_flops = sum(int(call.flops.backward) for call in backward if call.flops)
        mfu = None
        if self._flops and self._peak_flops:
            mfu = 1e12 * _tflops(forward_flops + backward_flops, forward_ms + backward_ms) / self._peak_flops
        return LayerTiming(
            rank=self._rank,
            layer=name,
            calls=len(forward),
            forward_ms=forward_ms / max(len(forward), 1),
            backward_ms=backward_ms / len(backward) if backward else None,
            forward_tflops=_tflops(forward_flops, forward_ms) if self._flops else None,
            backward_tflops=_tflops(backward_flops, backward_ms) if self._flops and backward else None,
            mfu=mfu,
        )


def gather_timings(timings: Sequence[LayerTiming], *, group: Group | None = None) -> list[LayerTiming]:
    """Return the rows of all ranks of the group, in their order. Collective: every rank must call this."""
    return list(chain.from_iterable(gather_checked({}, list(timings), process_group_of(group))))


def _tflops(flops: int, milliseconds: float) -> float:
    return flops / milliseconds / 1e9 if milliseconds else 0.0
