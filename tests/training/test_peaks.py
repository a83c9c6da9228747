from types import SimpleNamespace

import pytest
import torch

from evenrank.core.errors import ConfigError
from evenrank.training import device_peaks, peaks_by_name


@pytest.mark.parametrize(
    ("name", "bf16", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 3.35),
        ("NVIDIA H200", 989.4, 4.8),
        ("A100-SXM4-40GB", 312, 1.555),
        ("NVIDIA A10G", 70, 0.6),
        ("NVIDIA L4", 121, 0.3),
        ("NVIDIA L40S", 362.05, 0.864),
        ("NVIDIA GeForce RTX 4090", 165.2, 1.008),
        # Parts of a device, and devices with similar names, are not taken for it.
        *((name, None, None) for name in ("GRID A100-10C", "NVIDIA H200 MIG 3g.71gb", "NVIDIA GeForce RTX 4090 D")),
    ],
)
def test_devices_are_found_by_the_name_that_torch_returns(name: str, bf16: float | None, bandwidth: float) -> None:
    peaks = peaks_by_name(name)
    assert (peaks is None) == (bf16 is None)
    if peaks is not None and bf16 is not None:
        assert peaks.flops(torch.bfloat16) == peaks.flops(torch.float16) == pytest.approx(bf16 * 1e12)
        assert peaks.bandwidth == pytest.approx(bandwidth * 1e12)


def test_each_dtype_has_its_peak() -> None:
    h200 = peaks_by_name("NVIDIA H200")
    assert h200 is not None
    peaks = [h200.flops(torch.float32), h200.flops(torch.float32, tf32=True), h200.flops(torch.float8_e4m3fn)]
    assert peaks == pytest.approx([66.9e12, 494.7e12, 1978.9e12])


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
