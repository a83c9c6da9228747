"""`ThroughputMeter`: step time, tokens, TFLOP/s and MFU of training."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist

from evenrank.core.rules import Bounds, Count
from evenrank.core.settings import check_types
from evenrank.dataloader.balance.ranks.agree import compare_settings
from evenrank.dataloader.balance.ranks.process_group import Group, process_group_of
from evenrank.training.flops import ModelFlops, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """An interval of steps, over all ranks of the meter's group."""

    step: int
    """Steps at its end, since the meter was created."""
    steps: int
    """Steps in it."""
    step_ms: float
    """Mean, including loading and exchange."""
    tokens: int
    """Of all steps and ranks."""
    tokens_per_second: float
    """Of all ranks together."""
    tflops: float
    """TFLOP/s of a GPU, on average over the ranks."""
    mfu: float | None
    """`tflops` over the device's peak, 0 to 1; None if that is unknown."""
    rank_mfu: list[float] | None
    """The same of each rank."""

    def line(self, *, loss: float) -> str:
        """Return it as a line of a log."""
        mfu = "unknown" if self.mfu is None else f"{100 * self.mfu:.1f} %"
        return (
            f"step {self.step} | loss {loss:.4f} | tokens {self.tokens:,} | {self.step_ms:.1f} ms | "
            f"{self.tflops:.1f} TFLOP/s | MFU {mfu}"
        )


class ThroughputMeter:
    """Measures intervals that end after each `every` steps.

        meter = ThroughputMeter(model_flops, every=100, device=device, peak_flops=peaks.flops(torch.bfloat16))
        for batch in balancer:
            train(batch)
            throughput = meter.step(batch_work(batch, interleave_actions=True))
            if throughput is not None:
                print(throughput.line(loss=average.compute()[0]))

    The counts of a step are summed on the device. Once per interval, those of all ranks are read, which waits
    for the device, so the interval includes all kernels that its steps have launched.

    Collective: every rank of the group must call the constructor.

    Args:
        flops: of the model, on one rank.
        every: the same on all ranks.
        device: where the counts of `step` are or are copied to, and the group reduces them.
        peak_flops: FLOP/s of one GPU in the model's dtype; see `device_peaks`. None: there is no MFU.
        group: the data-parallel ranks; None: the default process group or, without one, this process alone.
    """

    def __init__(
        self,
        flops: ModelFlops,
        *,
        every: Count,
        device: torch.device | str = "cpu",
        peak_flops: Annotated[float, Bounds(above=0)] | None = None,
        group: Group | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        def check() -> dict[str, object]:
            check_types(ThroughputMeter, {"peak_flops": peak_flops})
            return check_types(ThroughputMeter, {"every": every})

        self._flops, self._every, self._peak_flops = flops, every, peak_flops
        self._group = process_group_of(group)
        compare_settings(check, self._group)
        self._clock = clock
        self._sums = torch.zeros(3, dtype=torch.int64, device=device)  # tokens, pairs, predictions
        self._num_steps = 0
        self.restart()

    def restart(self) -> None:
        """Begin the interval now, to leave out the time of an evaluation or a checkpoint. Its end stays the same."""
        self._sums.zero_()
        self._in_interval = 0
        self._started = self._clock()

    def step(self, work: Work) -> Throughput | None:
        """Record a step, given the work of this rank's batch, and return the interval if the step is its last.

        Collective: every rank must call this.
        """
        self._num_steps += 1
        self._in_interval += 1
        # One at a time: copying counts that are on the host to the device in one tensor would wait for it.
        for index, count in enumerate((work.tokens, work.pairs, work.predictions)):
            self._sums[index].add_(count)
        if self._num_steps % self._every:
            return None
        sums = [self._sums]
        if self._group is not None:
            sums = [torch.empty_like(self._sums) for _ in range(self._group.size())]
            dist.all_gather(sums, self._sums, group=self._group)
        counts = torch.stack(sums).tolist()  # waits for the device
        seconds = max(self._clock() - self._started, 1e-9)
        flops = [int(self._flops.of(Work(tokens=t, pairs=p, predictions=n)).total) for t, p, n in counts]
        tokens, peak = sum(of_rank[0] for of_rank in counts), self._peak_flops
        per_second = sum(flops) / len(flops) / seconds
        steps = self._in_interval
        self.restart()
        return Throughput(
            step=self._num_steps,
            steps=steps,
            step_ms=1e3 * seconds / steps,
            tokens=tokens,
            tokens_per_second=tokens / seconds,
            tflops=per_second / 1e12,
            mfu=None if peak is None else per_second / peak,
            rank_mfu=None if peak is None else [one / seconds / peak for one in flops],
        )
