from types import SimpleNamespace

import pytest
import torch

from evenrank.core.errors import ConfigError
from evenrank.training import device_peaks, peaks_by_name

MIG = "NVIDIA H200 MIG 1g.18gb"


@pytest.mark.parametrize(
    ("name", "bf16", "bandwidth"),
    [
        *(("NVIDIA H100 80GB HBM3", 989.4, 3.35), ("NVIDIA H200", 989.4, 4.8), ("A100-SXM4-40GB", 312, 1.555)),
        *(("NVIDIA A10G", 70, 0.6), ("NVIDIA L4", 121, 0.3), ("NVIDIA L40S", 362.05, 0.864)),
        # Parts of a device, and devices with similar names, are not taken for it.
        *((name, None, None) for name in ("GRID A100-10C", MIG, "NVIDIA GeForce RTX 4090 D")),
    ],
)
def test_devices_are_found_by_the_name_that_torch_returns(name: str, bf16: float | None, bandwidth: float) -> None:
    peaks = peaks_by_name(name)
    assert (peaks is None) == (bf16 is None)
    if peaks is not None and bf16 is not None:
        of_dtypes = [peaks.flops(torch.bfloat16), peaks.flops(torch.float16), peaks.bandwidth]
        assert of_dtypes == pytest.approx([bf16 * 1e12, bf16 * 1e12, bandwidth * 1e12])
        if name == "NVIDIA H200":
            others = [peaks.flops(torch.float32), peaks.flops(torch.float32, tf32=True)]
            assert [*others, peaks.flops(torch.float8_e4m3fn)] == pytest.approx([66.9e12, 494.7e12, 1978.9e12])


def test_an_unknown_device_is_computed_from_its_multiprocessors_and_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name=MIG, major=9, minor=0, multi_processor_count=16)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with pytest.raises(ConfigError, match=r"the peaks of 'NVIDIA H200 MIG 1g\.18gb' are not known; pass its peak"):
        device_peaks()  # without its clock
    properties.clock_rate, properties.memory_clock_rate, properties.memory_bus_width = 1_980_000, 3_201_000, 6144
    peaks = device_peaks()
    assert peaks.flops(torch.bfloat16) == 4096 * 16 * 1.98e9
    assert peaks.bandwidth == pytest.approx(4.917e12, rel=1e-3)
    assert peaks.source == "computed from 16 multiprocessors at 1.98 GHz"
