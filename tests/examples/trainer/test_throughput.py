from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evenrank.core.errors import ConfigError
from evenrank.training import ModelFlops, Work, device_peaks
from tests.ranks import RankPool
from trainer.throughput import Throughput, ThroughputMeter

MODEL = ModelFlops(per_token=10, per_pair=4, per_prediction=2)


class _Clock:
    now = 50.0  # seconds

    def __call__(self) -> float:
        return self.now


def _work(tokens: int, pairs: int, predictions: int) -> Work:
    """Return counts as a batch has them: on the device, but for what the host knows."""
    return Work(tokens=torch.tensor(tokens), pairs=torch.tensor(pairs), predictions=predictions)


def test_an_interval_has_the_sums_of_its_steps() -> None:
    clock = _Clock()
    meter = ThroughputMeter(MODEL, every=2, peak_flops=1000, clock=clock)
    results = []
    for step in range(4):
        clock.now += 0.5 + step
        results.append(meter.step(_work(100 + step, 7, 3)))
    # 3 x (10 x 201 + 4 x 14 + 2 x 6) operations in 2 s, and with 205 tokens in 6 s.
    first, last = (
        Throughput(
            step=step,
            steps=2,
            step_ms=500 * seconds,
            tokens=tokens,
            tokens_per_second=tokens / seconds,
            tflops=mfu / 1e9,
            mfu=mfu,
            rank_mfu=[mfu],
        )
        for step, seconds, tokens, mfu in ((2, 2, 201, 3.117), (4, 6, 205, 1.059))
    )
    assert results == [None, first, None, last]


def test_a_restart_leaves_out_what_was_before() -> None:
    clock = _Clock()
    meter = ThroughputMeter(MODEL, every=3, clock=clock)
    meter.step(_work(1000, 0, 0))
    clock.now += 60  # an evaluation
    meter.restart()
    for _ in range(2):
        clock.now += 1
        throughput: Any = meter.step(_work(5, 0, 0))
    assert (throughput.step, throughput.steps, throughput.tokens, throughput.step_ms) == (3, 2, 10, 1000)
    assert throughput.mfu is None


def _restart_alone(rank: int, world_size: int) -> list[int]:
    meter = ThroughputMeter(MODEL, every=2)
    gradients = []
    for step in range(4):
        if rank == step == 1:
            meter.restart()
        meter.step(_work(1, 1, 1))
        gradient = torch.tensor([100, 100, 100])  # as many numbers as the meter adds up
        dist.all_reduce(gradient)
        gradients += gradient.tolist()
    return gradients


def test_a_restart_on_one_rank_alone_does_not_mix_counts_with_what_others_reduce(ranks: RankPool) -> None:
    assert ranks.run(2, _restart_alone) == [[200] * 12] * 2


def test_a_line_of_the_log() -> None:
    tokens: dict[str, Any] = {"tokens": 1234567, "tokens_per_second": 8.6e5}
    throughput = Throughput(step=300, steps=100, step_ms=14.26, tflops=212.34, mfu=0.2146, rank_mfu=[0.2146], **tokens)
    line = "step 300 | loss 0.6932 | tokens 1,234,567 | 14.3 ms | 212.3 TFLOP/s | MFU"
    assert throughput.line(loss=0.69315) == f"{line} 21.5 %"
    assert replace(throughput, mfu=None).line(loss=0.69315) == f"{line} unknown"


def _measure(rank: int, world_size: int) -> Any:
    clock = _Clock()
    meter = ThroughputMeter(MODEL, every=1, peak_flops=1e3, clock=clock)
    groups = [dist.new_group([number]) for number in range(world_size)]
    alone = ThroughputMeter(MODEL, every=1, group=groups[rank]).step(_work(10 + rank, 0, 0))
    clock.now += 2
    return meter.step(_work(10 * (rank + 1), rank, 0)), alone


def test_ranks_of_the_group_are_summed_and_speeds_are_those_of_one_and_of_each(ranks: RankPool) -> None:
    for rank, (throughput, alone) in enumerate(ranks.run(2, _measure)):
        # 30 tokens and 1 pair: 3 x (300 + 4) operations of two ranks in 2 s.
        assert (throughput.tokens, throughput.tokens_per_second) == (30, 15)
        assert throughput.tflops == pytest.approx(228e-12) == 1e-9 * throughput.mfu
        assert throughput.rank_mfu == [3 * 10 * 10 / 2 / 1e3, 3 * (10 * 20 + 4) / 2 / 1e3]
        assert alone.tokens == 10 + rank


def _differ(rank: int, world_size: int) -> None:
    ThroughputMeter(MODEL, every=5 + rank)


def _mistake_of_one(rank: int, world_size: int) -> None:
    ThroughputMeter(MODEL, every=5, peak_flops=0 if rank else None)


def test_intervals_that_differ_or_have_no_steps_are_errors(ranks: RankPool) -> None:
    message = "every differs between ranks: 5 on rank 0, 6 on rank 1"
    assert [(f.type_name, f.message) for f in ranks.try_run(2, _differ)] == [("RankError", message)] * 2
    for number, failure in enumerate(ranks.try_run(2, _mistake_of_one)):
        assert failure.type_name == ("ConfigError" if number else "RankError")
        assert "ThroughputMeter: peak_flops must be above 0, got 0" in failure.message
    with pytest.raises(ConfigError, match="every must be at least 1, got 0"):
        ThroughputMeter(MODEL, every=0)
    with pytest.raises(ConfigError, match="ThroughputMeter: peak_flops must be above 0, got 0"):
        ThroughputMeter(MODEL, every=1, peak_flops=0)


@pytest.mark.gpu
def test_on_a_gpu_only_the_end_of_an_interval_waits() -> None:
    assert device_peaks(0).flops(torch.float16) > 1e13
    meter = ThroughputMeter(MODEL, every=3, device="cuda")
    lengths = torch.arange(1, 9, device="cuda")
    results: list[Any] = []
    try:
        for mode in ("error", "error", "default"):
            torch.cuda.set_sync_debug_mode(mode)
            results.append(meter.step(Work(tokens=lengths.sum(), pairs=(lengths * lengths).sum(), predictions=8)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert results[:2] == [None, None]
    assert results[2].tokens == 3 * 36
