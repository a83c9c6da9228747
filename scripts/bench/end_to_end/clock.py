"""`StepClock`: when the GPU of each rank reaches the points of a step, on a clock that all ranks share."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from evenrank.training.attention_timing import Clock


class StepClock:
    """Marks five points of each step, without waiting for the device; `Segment.marks` says which.

    Args:
        encoder: module whose first argument are the embeddings of a batch; its forward begins when these have arrived.
        dense: module whose forward ends with the loss.
        device: of both.

    """

    def __init__(self, encoder: nn.Module, dense: nn.Module, device: torch.device) -> None:
        self._device = device
        self._clock = Clock(device)
        self._reference: Any = None
        self._points: list[Any] = []  # of the current step
        self._steps: list[list[Any]] = []
        encoder.register_forward_pre_hook(self._begin_encoder)
        dense.register_forward_hook(self._end_forward)

    def start(self) -> None:
        """Begin a segment. Collective: every rank must call this."""
        self._clock.wait()
        # It ends on all ranks at the same moment, to within some microseconds.
        dist.all_reduce(torch.zeros(1, device=self._device))
        self._reference = self._clock.mark()
        self._points, self._steps = [self._reference], []

    def end_step(self) -> None:
        """Note that all work of a step has been launched."""
        end = self._clock.mark()
        self._steps.append([*self._points, end])
        self._points = [end]

    def read(self) -> NDArray[np.float64]:
        """Return the points of the steps since `start`: float64 [steps, 5], in milliseconds. Waits for the device."""
        self._clock.wait()
        return np.array([[self._clock.milliseconds(self._reference, point) for point in step] for step in self._steps])

    def _begin_encoder(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._points.append(self._clock.mark())
        embeddings: Tensor = arguments[0]
        # Its gradient is complete when the encoder's backward is.
        embeddings.register_hook(self._end_backward)

    def _end_forward(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self._points.append(self._clock.mark())

    def _end_backward(self, gradient: Tensor) -> None:
        self._points.append(self._clock.mark())
