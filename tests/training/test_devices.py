"""Peaks are dense, found by the names that torch returns, and agree with what a device's multiprocessors can do."""

from types import SimpleNamespace

import pytest
import torch

from evenrank.core.errors import ConfigError
from evenrank.training import computed_peaks, device_peaks, peaks_by_name


@pytest.mark.parametrize(
    ("name", "bf16", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 3.35e12),
        ("NVIDIA H100 PCIe", 756e12, 2e12),
        ("NVIDIA H100 NVL", 835.5e12, 3.9e12),
        ("NVIDIA H200", 989.4e12, 4.8e12),
        ("NVIDIA H200 NVL", 835.5e12, 4.8e12),
        ("NVIDIA H20", 148e12, 4e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 1.555e12),
        ("A100-SXM4-40GB", 312e12, 1.555e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 2.039e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 1.935e12),
        ("NVIDIA A100-PCIE-40GB", 312e12, 1.555e12),
        ("NVIDIA A10", 125e12, 0.6e12),
        ("NVIDIA A10G", 70e12, 0.6e12),
        ("NVIDIA L4", 121e12, 0.3e12),
        ("NVIDIA L40", 181.05e12, 0.864e12),
        ("NVIDIA L40S", 362.05e12, 0.864e12),
        ("NVIDIA B200", 2250e12, 7.7e12),
        ("NVIDIA GB200", 2500e12, 8e12),
        ("NVIDIA B300 SXM6 AC", 2250e12, 8e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 1.008e12),
        ("AMD Instinct MI300X", 1307.4e12, 5.3e12),
    ],
)
def test_devices_are_found_by_the_name_that_torch_returns(name: str, bf16: float, bandwidth: float) -> None:
    peaks = peaks_by_name(name)
    assert peaks is not None
    assert peaks.flops(torch.bfloat16) == peaks.flops(torch.float16) == pytest.approx(bf16)
    assert peaks.bandwidth == pytest.approx(bandwidth)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "GRID A100-10C",
        "NVIDIA H200 MIG 3g.71gb",
        "NVIDIA GeForce RTX 4090 D",
    ],
)
def test_parts_of_a_device_and_devices_with_similar_names_are_not_taken_for_it(name: str) -> None:
    assert peaks_by_name(name) is None


# Multiprocessors and the boost clock of the datasheet's figures.
@pytest.mark.parametrize(
    ("name", "capability", "multiprocessors", "clock"),
    [
        ("Tesla V100-SXM2-16GB", (7, 0), 80, 1.53e9),
        ("Tesla T4", (7, 5), 40, 1.59e9),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41e9),
        ("NVIDIA A30", (8, 0), 56, 1.44e9),
        ("NVIDIA A10", (8, 6), 72, 1.695e9),
        ("NVIDIA A40", (8, 6), 84, 1.74e9),
        ("NVIDIA L4", (8, 9), 58, 2.04e9),
        ("NVIDIA L40S", (8, 9), 142, 2.52e9),
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.83e9),
        ("NVIDIA H100 PCIe", (9, 0), 114, 1.62e9),
        ("NVIDIA H200", (9, 0), 132, 1.83e9),
        ("NVIDIA B200", (10, 0), 148, 1.85e9),
    ],
)
def test_the_table_agrees_with_multiprocessors_and_clocks(
    name: str, capability: tuple[int, int], multiprocessors: int, clock: float
) -> None:
    """A figure that counts sparsity would be twice the computed one."""
    known, computed = peaks_by_name(name), computed_peaks(capability, multiprocessors, clock)
    assert known is not None
    assert known.fp16 == pytest.approx(computed.fp16, rel=0.02)
    assert (known.bf16 is None, known.tf32 is None) == (computed.bf16 is None, computed.tf32 is None)
    assert known.fp32 == pytest.approx(computed.fp32, rel=0.15)  # its clock can be higher
    if known.fp8 is not None:
        assert known.fp8 == pytest.approx(computed.fp8, rel=0.02)
    if known.tf32 is not None:
        assert known.tf32 == pytest.approx(computed.tf32, rel=0.02)


def test_float32_has_two_peaks() -> None:
    peaks = peaks_by_name("NVIDIA H200")
    assert peaks is not None
    assert peaks.flops(torch.float32) == pytest.approx(66.9e12)
    assert peaks.flops(torch.float32, tf32=True) == pytest.approx(494.7e12)
    assert peaks.flops(torch.float8_e4m3fn) == pytest.approx(1978.9e12)


def test_a_dtype_without_tensor_cores_is_an_error_that_names_it() -> None:
    peaks = peaks_by_name("Tesla T4")
    assert peaks is not None
    for dtype, tf32, name in ((torch.bfloat16, False, "bfloat16"), (torch.float32, True, "TF32")):
        with pytest.raises(ConfigError, match=rf"no peak is known for {name} .*pass it in FLOP/s"):
            peaks.flops(dtype, tf32=tf32)


def _pretend(monkeypatch: pytest.MonkeyPatch, **properties: object) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))


def test_an_unknown_device_is_computed_from_its_multiprocessors_and_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(
        monkeypatch,
        name="NVIDIA H200 MIG 1g.18gb",
        major=9,
        minor=0,
        multi_processor_count=16,
        clock_rate=1_980_000,
        memory_clock_rate=3_201_000,
        memory_bus_width=6144,
    )
    peaks = device_peaks()
    assert peaks.flops(torch.bfloat16) == 4096 * 16 * 1.98e9
    assert peaks.bandwidth == pytest.approx(4.917e12, rel=1e-3)
    assert peaks.source == "computed from 16 multiprocessors at 1.98 GHz"


def test_an_unknown_device_whose_clock_torch_does_not_know_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, name="NVIDIA Z9", major=9, minor=0, multi_processor_count=16)
    with pytest.raises(ConfigError, match="the peaks of 'NVIDIA Z9' are not known; pass its peak in FLOP/s"):
        device_peaks()


def test_an_unknown_compute_capability_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"compute capability is 13\.7, .*pass the device's peak in FLOP/s"):
        computed_peaks((13, 7), 100, 2e9)


@pytest.mark.gpu
def test_this_device_has_a_peak() -> None:
    assert device_peaks(0).flops(torch.float16) > 1e13


def test_the_cpu_has_no_peak() -> None:
    with pytest.raises(ConfigError, match="no peaks are known of the device cpu; pass a CUDA device"):
        device_peaks("cpu")
