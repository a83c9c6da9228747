"""Hooks that mark when the forward and backward pass of a layer begin and end, without waiting for the device."""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from evenrank.training.flops import Flops

LayerFlops = Callable[[nn.Module, Mapping[str, Any]], Flops]
"""From a layer, and the arguments of a call of its forward by name, to the call's FLOPs."""


class Clock(Protocol):
    """Marks points in time on a device."""

    def mark(self) -> Any:
        """Return the point that the device reaches after all work so far."""
        ...

    def milliseconds(self, start: Any, stop: Any) -> float:
        """Return the time between two marks that have been passed."""
        ...

    def wait(self) -> None:
        """Wait until all marks have been passed."""
        ...


class HostClock:
    """Of layers on the CPU, whose work is done when a call returns."""

    def mark(self) -> float:
        """Return the time."""
        return time.perf_counter()

    def milliseconds(self, start: float, stop: float) -> float:
        """Return the time between two marks."""
        return 1e3 * (stop - start)

    def wait(self) -> None:
        """Return at once."""


class CudaClock:
    """Of layers on a GPU: CUDA events in the current stream, which in a backward pass is that of the forward pass."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)

    def mark(self) -> torch.cuda.Event:
        """Return an event that is recorded behind all work so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def milliseconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """Return the time between two events that have been recorded."""
        elapsed: float = start.elapsed_time(stop)
        return elapsed

    def wait(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """Marks of one call of a layer; None where nothing has happened."""

    is_forward: bool  # and not activation checkpointing, which computes a forward pass again
    forward_start: Any
    forward_stop: Any = None
    backward_start: Any = None
    backward_stop: Any = None
    flops: Flops | None = None


class LayerHooks:
    """The hooks of one layer.

    Args:
        module: the layer.
        clock: of its device.
        flops: FLOPs of a call; None: unknown.
        calls: where the marks of each call go.

    """

    def __init__(self, module: nn.Module, clock: Clock, flops: LayerFlops | None, calls: list[Call]) -> None:
        self._clock = clock
        self._flops = flops
        self._signature = inspect.signature(module.forward)
        self._calls = calls
        self._open: Call | None = None  # checkpointing may end a forward pass that it repeats half way

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Mark the start of a forward pass; a forward pre-hook."""
        self._open = None
        if not module.training:
            return None
        # Not -1 while this thread is in a backward pass: the forward pass is being repeated there.
        call = Call(is_forward=torch._C._current_graph_task_id() == -1, forward_start=None)
        args, kwargs = _observe((args, kwargs), partial(self._end_backward, call))
        self._open = call
        call.forward_start = self._clock.mark()
        return args, kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Mark the end of a forward pass; a forward hook."""
        call, self._open = self._open, None
        if call is None:
            return None
        call.forward_stop = self._clock.mark()
        self._calls.append(call)
        if self._flops is not None:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            with torch.no_grad():
                call.flops = self._flops(module, bound.arguments)
        return _observe(output, partial(self._start_backward, call))

    def _start_backward(self, call: Call) -> None:
        call.backward_start = self._clock.mark()

    def _end_backward(self, call: Call) -> None:
        call.backward_stop = self._clock.mark()


class _Observed(torch.autograd.Function):
    """The identity, which calls a function when all gradients have arrived in the backward pass."""

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
    """Return the value with all tensors that have a gradient observed together; the others are passed on."""
    tensors = [tensor for tensor in _tensors(value) if tensor.requires_grad]
    if not tensors or not torch.is_grad_enabled():
        return value
    return _replaced(value, iter(_Observed.apply(function, *tensors)))  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (tuple, list, dict):
        for item in value.values() if type(value) is dict else value:
            yield from _tensors(item)


def _replaced(value: Any, observed: Iterator[Tensor]) -> Any:
    """Return the value with its tensors that have a gradient replaced, in the order of `_tensors`."""
    if isinstance(value, Tensor):
        return next(observed) if value.requires_grad else value
    if type(value) is dict:
        return {key: _replaced(item, observed) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_replaced(item, observed) for item in value)
    return value
