import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from end_to_end.measure import StepClock
from evenrank.training.attention_timing import Clock


class Times(Clock):
    """Stands for a clock of the device: each mark is one millisecond after the last."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        self.now += 1.0
        return self.now

    def milliseconds(self, start: float, stop: float) -> float:
        return stop - start

    def wait(self) -> None: ...


def test_five_points_of_each_step_in_the_order_in_which_they_are_reached() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    encoder = nn.Linear(2, 2)
    model = nn.Sequential(encoder)
    clock = StepClock(encoder, model, torch.device("cpu"))
    clock._clock = Times()
    for _ in range(2):  # each start forgets what was before
        clock.start()
        for _ in range(3):
            model(torch.ones(1, 2, requires_grad=True)).sum().backward()
            clock.end_step()
        np.testing.assert_array_equal(clock.read(), [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10, 11, 12]])
    dist.destroy_process_group()
