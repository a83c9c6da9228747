from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evenrank.core.errors import ConfigError
from evenrank.training import ModelFlops, Throughput, ThroughputMeter, Work, computed_peaks, device_peaks, peaks_by_name
from tests.ranks import RankPool

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


def test_intervals_that_differ_or_have_no_steps_are_errors(ranks: RankPool) -> None:
    message = "every differs between ranks: 5 on rank 0, 6 on rank 1"
    assert [(f.type_name, f.message) for f in ranks.try_run(2, _differ)] == [("RankError", message)] * 2
    with pytest.raises(ConfigError, match="every must be at least 1, got 0"):
        ThroughputMeter(MODEL, every=0)
    with pytest.raises(ConfigError, match="peak_flops must be positive, got 0"):
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


@pytest.mark.parametrize(
    ("name", "bf16", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 3.35),
        ("NVIDIA H100 PCIe", 756, 2),
        ("NVIDIA H200", 989.4, 4.8),
        ("NVIDIA H20", 148, 4),
        ("NVIDIA A100-SXM4-40GB", 312, 1.555),
        ("A100-SXM4-40GB", 312, 1.555),
        ("NVIDIA A100 80GB PCIe", 312, 1.935),
        ("NVIDIA A10", 125, 0.6),
        ("NVIDIA A10G", 70, 0.6),
        ("NVIDIA L4", 121, 0.3),
        ("NVIDIA L40", 181.05, 0.864),
        ("NVIDIA L40S", 362.05, 0.864),
        ("NVIDIA B300 SXM6 AC", 2250, 8),
        ("NVIDIA GeForce RTX 4090", 165.2, 1.008),
        ("AMD Instinct MI300X", 1307.4, 5.3),
    ],
)
def test_devices_are_found_by_the_name_that_torch_returns(name: str, bf16: float, bandwidth: float) -> None:
    peaks = peaks_by_name(name)
    assert peaks is not None
    assert peaks.flops(torch.bfloat16) == peaks.flops(torch.float16) == pytest.approx(bf16 * 1e12)
    assert peaks.bandwidth == pytest.approx(bandwidth * 1e12)


@pytest.mark.parametrize("name", ["GRID A100-10C", "NVIDIA H200 MIG 3g.71gb", "NVIDIA GeForce RTX 4090 D"])
def test_parts_of_a_device_and_devices_with_similar_names_are_not_taken_for_it(name: str) -> None:
    assert peaks_by_name(name) is None


# Multiprocessors and the boost clock of the datasheet's figures. One that counts sparsity would be twice the computed.
@pytest.mark.parametrize(
    ("name", "capability", "count", "clock"),
    [
        ("Tesla V100-SXM2-16GB", (7, 0), 80, 1.53e9),
        ("Tesla T4", (7, 5), 40, 1.59e9),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41e9),
        ("NVIDIA A10", (8, 6), 72, 1.695e9),
        ("NVIDIA L40S", (8, 9), 142, 2.52e9),
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.83e9),
        ("NVIDIA H200", (9, 0), 132, 1.83e9),
        ("NVIDIA B200", (10, 0), 148, 1.85e9),
    ],
)
def test_the_table_agrees_with_clocks(name: str, capability: tuple[int, int], count: int, clock: float) -> None:
    known, computed = peaks_by_name(name), computed_peaks(capability, count, clock)
    assert known is not None
    assert (known.bf16 is None, known.tf32 is None) == (computed.bf16 is None, computed.tf32 is None)
    assert known.fp32 == pytest.approx(computed.fp32, rel=0.15)  # its clock can be higher
    for peak in ("fp16", "fp8", "tf32"):
        if getattr(known, peak) is not None:
            assert getattr(known, peak) == pytest.approx(getattr(computed, peak), rel=0.02)


def test_each_dtype_has_its_peak_or_an_error() -> None:
    h200, t4 = peaks_by_name("NVIDIA H200"), peaks_by_name("Tesla T4")
    assert h200 is not None
    assert t4 is not None
    peaks = [h200.flops(torch.float32), h200.flops(torch.float32, tf32=True), h200.flops(torch.float8_e4m3fn)]
    assert peaks == pytest.approx([66.9e12, 494.7e12, 1978.9e12])
    for dtype, tf32, name in ((torch.bfloat16, False, "bfloat16"), (torch.float32, True, "TF32")):
        with pytest.raises(ConfigError, match=rf"no peak is known for {name} .*pass it in FLOP/s"):
            t4.flops(dtype, tf32=tf32)
    with pytest.raises(ConfigError, match=r"compute capability is 13\.7, .*pass the device's peak in FLOP/s"):
        computed_peaks((13, 7), 100, 2e9)
    with pytest.raises(ConfigError, match="no peaks are known of the device cpu; pass a CUDA device"):
        device_peaks("cpu")


def test_an_unknown_device_is_computed_from_its_multiprocessors_and_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200 MIG 1g.18gb", major=9, minor=0, multi_processor_count=16)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with pytest.raises(ConfigError, match=r"the peaks of 'NVIDIA H200 MIG 1g\.18gb' are not known; pass its peak"):
        device_peaks()  # without its clock
    properties.clock_rate, properties.memory_clock_rate, properties.memory_bus_width = 1_980_000, 3_201_000, 6144
    peaks = device_peaks()
    assert peaks.flops(torch.bfloat16) == 4096 * 16 * 1.98e9
    assert peaks.bandwidth == pytest.approx(4.917e12, rel=1e-3)
    assert peaks.source == "computed from 16 multiprocessors at 1.98 GHz"
