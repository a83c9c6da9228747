"""`ThroughputMeter`: step time, tokens and TFLOP/s of training, and the share of the devices' peak that it uses."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.control.consistency import gather_checked
from evenrank.dataloader.balance.control.process_group import Group, process_group_of
from evenrank.training.flops import ModelFlops, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """An interval of steps, over all ranks of the meter's group."""

    step: int
    """Steps done at its end, since the meter was made."""

    steps: int
    """Steps in it."""

    step_ms: float
    """Milliseconds of a step, on average, from the end of one to the end of the next: loading, exchange and all."""

    tokens: int
    """Tokens of all steps and ranks."""

    tokens_per_second: float
    """Of all ranks together."""

    tflops: float
    """TFLOP/s of a GPU, on average over the ranks."""

    mfu: float | None
    """Model FLOPs utilization: `tflops` over the device's peak, 0 to 1; None if that is unknown."""

    def line(self, *, loss: float) -> str:
        """Return it as a line of a log.

        Args:
            loss: average over the interval.

        """
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

    The counts of a step are summed where they are. Once an interval, their sums over the ranks are read, which waits
    for the device, so that the interval includes all that its steps have launched.

    FLOPs are the model's: activations that are computed again in the backward pass do not count (Chowdhery et al.,
    2022, "PaLM", appendix B).

    Collective: every rank of the group must call the constructor.

    Args:
        flops: of the model, on one rank.
        every: steps from the end of an interval to that of the next, at least 1.
        device: where `step` gets its counts, and the group reduces them.
        peak_flops: FLOP/s of one GPU in the model's dtype; see `device_peaks`. None: there is no MFU.
        group: the data-parallel ranks; None: the default process group or, without one, this process alone.
        clock: returns seconds.

    Raises:
        ConfigError: `every` or `peak_flops` is not positive, or this process is not a rank of the group.
        RankError: `every` differs between ranks.

    """

    def __init__(
        self,
        flops: ModelFlops,
        *,
        every: int,
        device: torch.device | str = "cpu",
        peak_flops: float | None = None,
        group: Group | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if every < 1:
            raise ConfigError(f"every must be at least 1, got {every}")
        if peak_flops is not None and peak_flops <= 0:
            raise ConfigError(f"peak_flops must be positive, got {peak_flops}")
        self._flops, self._every, self._peak_flops = flops, every, peak_flops
        self._group = process_group_of(group)
        gather_checked({"every": every}, None, self._group)
        self._clock = clock
        self._sums = torch.zeros(3, dtype=torch.int64, device=device)  # tokens, pairs, predictions
        self._num_steps = 0
        self.restart()

    def restart(self) -> None:
        """Begin the interval now, as after an evaluation or a checkpoint, whose time is not training's.

        It ends where it would have ended otherwise, so that ranks which restart at different steps, or not at all,
        still add up their counts in the same step.
        """
        self._sums.zero_()
        self._in_interval = 0
        self._started = self._clock()

    def step(self, work: Work) -> Throughput | None:
        """Note that a step is done. Collective: every rank must call this after each of its steps.

        Args:
            work: of this rank's batch; its counts may be scalars on the meter's device.

        Returns:
            The interval, if this step is its last; else None.

        """
        self._num_steps += 1
        self._in_interval += 1
        # One count at a time: copying those on the host to the device in one tensor would wait for it.
        for index, count in enumerate((work.tokens, work.pairs, work.predictions)):
            self._sums[index].add_(count)
        if self._num_steps % self._every:
            return None
        if self._group is not None:
            dist.all_reduce(self._sums, group=self._group)
        tokens, pairs, predictions = self._sums.tolist()  # waits for the device
        seconds = max(self._clock() - self._started, 1e-9)
        ranks = 1 if self._group is None else self._group.size()
        flops = self._flops.of(Work(tokens=tokens, pairs=pairs, predictions=predictions)).total
        per_second = int(flops) / ranks / seconds
        throughput = Throughput(
            step=self._num_steps,
            steps=self._in_interval,
            step_ms=1e3 * seconds / self._in_interval,
            tokens=tokens,
            tokens_per_second=tokens / seconds,
            tflops=per_second / 1e12,
            mfu=None if self._peak_flops is None else per_second / self._peak_flops,
        )
        self.restart()
        return throughput
