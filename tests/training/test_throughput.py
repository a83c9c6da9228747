"""Rates are exact sums over steps and ranks, divided by the time from the start of an interval to its end."""

import pytest
import torch
import torch.distributed as dist

from evenrank.core.errors import ConfigError
from evenrank.training import ModelFlops, Throughput, ThroughputMeter, Work
from tests.ranks import RankPool

MODEL = ModelFlops(per_token=10, per_pair=4, per_prediction=2)


class _Clock:
    """Seconds that pass as the test says."""

    def __init__(self) -> None:
        self.now = 50.0

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
    assert results[::2] == [None, None]
    # 3 x (10 x 201 + 4 x 14 + 2 x 6) operations in 2 s, and with 205 tokens in 6 s.
    assert results[1] == Throughput(
        step=2, steps=2, step_ms=1000, tokens=201, tokens_per_second=100.5, tflops=3117e-12, mfu=3.117
    )
    assert results[3] == Throughput(
        step=4, steps=2, step_ms=3000, tokens=205, tokens_per_second=205 / 6, tflops=1059e-12, mfu=1.059
    )


def test_a_restart_leaves_out_what_was_before() -> None:
    clock = _Clock()
    meter = ThroughputMeter(MODEL, every=3, clock=clock)
    meter.step(_work(1000, 0, 0))
    clock.now += 60  # an evaluation
    meter.restart()
    for _ in range(2):
        clock.now += 1
        throughput = meter.step(_work(5, 0, 0))
    assert throughput is not None
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
    throughput = Throughput(
        step=300, steps=100, step_ms=14.26, tokens=1234567, tokens_per_second=8.6e5, tflops=212.34, mfu=0.2146
    )
    assert throughput.line(loss=0.69315) == (
        "step 300 | loss 0.6932 | tokens 1,234,567 | 14.3 ms | 212.3 TFLOP/s | MFU 21.5 %"
    )


def test_without_a_peak_the_line_says_that_mfu_is_unknown() -> None:
    throughput = Throughput(step=1, steps=1, step_ms=1, tokens=1, tokens_per_second=1, tflops=1, mfu=None)
    assert throughput.line(loss=1).endswith("| MFU unknown")


def _measure(rank: int, world_size: int) -> tuple[int, float, float]:
    clock = _Clock()
    meter = ThroughputMeter(MODEL, every=1, peak_flops=1e3, clock=clock)
    clock.now += 2
    throughput = meter.step(_work(10 * (rank + 1), rank, 0))
    assert throughput is not None
    return throughput.tokens, throughput.tokens_per_second, throughput.tflops


def test_ranks_are_summed_and_speeds_are_those_of_one(ranks: RankPool) -> None:
    # 30 tokens and 1 pair: 3 x (300 + 4) operations of two ranks in 2 s.
    assert ranks.run(2, _measure) == [(30, 15, pytest.approx(228e-12))] * 2


def _measure_apart(rank: int, world_size: int) -> int:
    groups = [dist.new_group([number]) for number in range(world_size)]
    throughput = ThroughputMeter(MODEL, every=1, group=groups[rank]).step(_work(10 + rank, 0, 0))
    assert throughput is not None
    return throughput.tokens


def test_only_ranks_of_the_group_count(ranks: RankPool) -> None:
    assert ranks.run(2, _measure_apart) == [10, 11]


def _differ(rank: int, world_size: int) -> None:
    ThroughputMeter(MODEL, every=5 + rank)


def test_different_intervals_are_an_error_on_every_rank(ranks: RankPool) -> None:
    for failure in ranks.try_run(2, _differ):
        assert (failure.type_name, failure.message) == (
            "RankError",
            "every differs between ranks: 5 on rank 0, 6 on rank 1",
        )


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="every must be at least 1, got 0"):
        ThroughputMeter(MODEL, every=0)
    with pytest.raises(ConfigError, match="peak_flops must be positive, got 0"):
        ThroughputMeter(MODEL, every=1, peak_flops=0)


@pytest.mark.gpu
def test_on_a_gpu_only_the_end_of_an_interval_waits() -> None:
    device = torch.device("cuda")
    meter = ThroughputMeter(MODEL, every=3, device=device)
    lengths = torch.arange(1, 9, device=device)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(2):
            assert meter.step(Work(tokens=lengths.sum(), pairs=(lengths * lengths).sum(), predictions=8)) is None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    throughput = meter.step(Work(tokens=lengths.sum(), pairs=(lengths * lengths).sum(), predictions=8))
    assert throughput is not None
    assert throughput.tokens == 3 * 36
