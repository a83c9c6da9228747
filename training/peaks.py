"""Peaks of devices, by which utilization is defined.

They are dense, with fp32 accumulation: datasheets often print twice as much, which needs weights with 2:4 sparsity.
Devices under load may not reach the boost clock at which they hold. Peaks of a device that is not in the table, or of
part of one (MIG), are computed from its multiprocessors and maximum clock.
"""

import re
from dataclasses import dataclass

import torch

from evenrank.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePeaks:
    """Peak FLOP/s by dtype, None where tensor cores do not support it, and memory bandwidth of a device."""

    fp32: float
    """Without tensor cores."""
    tf32: float | None = None
    """Of float32 on tensor cores (`torch.set_float32_matmul_precision("high")`)."""
    fp16: float
    bf16: float | None = None
    fp8: float | None = None
    bandwidth: float | None
    """Bytes per second; None: unknown."""
    source: str
    """The source of the figures."""

    def flops(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Return the FLOP/s of matrix products of a dtype; `tf32`: products of float32 use TF32.

        Raises:
            ConfigError: the device has no peak for it.
        """
        peaks = {
            torch.float32: self.tf32 if tf32 else self.fp32,
            torch.float16: self.fp16,
            torch.bfloat16: self.bf16,
            torch.float8_e4m3fn: self.fp8,
            torch.float8_e5m2: self.fp8,
        }
        if (peak := peaks.get(dtype)) is None:
            kind = "TF32" if dtype == torch.float32 else str(dtype).removeprefix("torch.")
            raise ConfigError(f"no peak is known for {kind} on this device ({self.source}); pass it in FLOP/s")
        return peak


_VOLTA = "NVIDIA V100 datasheet, January 2020"
_A100 = "NVIDIA A100 datasheet, June 2021"
_H100 = "NVIDIA H100 datasheet, 2023, and H100 whitepaper, table 2"
_H200 = "NVIDIA H200 datasheet, 2024"
_BLACKWELL = "NVIDIA Blackwell architecture technical brief, 2024, table 3, and HGX B200 datasheet"
_ULTRA = "NVIDIA HGX B300 and GB300 NVL72 datasheets, 2025"
_GEFORCE = "NVIDIA Ada and RTX Blackwell whitepapers, appendix A"
_CDNA3 = "AMD Instinct MI300X and MI325X data sheets, 2023 and 2024"

# The whole name without "NVIDIA", "Tesla" or "AMD" in front: "L4" must not match an L40, nor "H200" a MIG slice of it.
# TFLOP/s in fp32, tf32, fp16 and fp8, and GB/s.
_TABLE: tuple[tuple[str, float, float | None, float, float | None, float, str], ...] = (
    (r"V100-SXM\d-\d+GB(-LS)?", 15.7, None, 125, None, 900, _VOLTA),
    (r"V100-PCIE-\d+GB", 14, None, 112, None, 900, _VOLTA),
    (r"V100S-PCIE-\d+GB", 16.4, None, 130, None, 1134, _VOLTA),
    (r"T4", 8.1, None, 65, None, 320, "NVIDIA T4 datasheet, 2019"),
    (r"A[18]00-SXM\d?-80GB", 19.5, 156, 312, None, 2039, _A100),
    (r"A[18]00-SXM\d?-\d+GB", 19.5, 156, 312, None, 1555, _A100),
    (r"A[18]00 80GB PCIe", 19.5, 156, 312, None, 1935, _A100),
    (r"A[18]00-PCI[Ee]-40GB", 19.5, 156, 312, None, 1555, _A100),
    (r"A30", 10.3, 82, 165, None, 933, "NVIDIA A30 datasheet, 2021"),
    (r"A10", 31.2, 62.5, 125, None, 600, "NVIDIA A10 datasheet, 2021"),
    # Another chip than the A10, with half its tensor cores' rate.
    (r"A10G", 35, 35, 70, None, 600, "NVIDIA A10G datasheet, 2021"),
    (r"A40", 37.4, 74.8, 149.7, None, 696, "NVIDIA A40 datasheet, 2021"),
    (r"L4", 30.3, 60, 121, 242.5, 300, "NVIDIA L4 datasheet, 2023"),
    (r"L40", 90.5, 90.5, 181.05, 362, 864, "NVIDIA L40 datasheet, 2022"),
    (r"L40S", 91.6, 183, 362.05, 733, 864, "NVIDIA L40S datasheet, 2023"),
    (r"GeForce RTX 4090", 82.6, 82.6, 165.2, 330.3, 1008, _GEFORCE),
    (r"GeForce RTX 5090", 104.8, 104.8, 209.5, 419, 1792, _GEFORCE),
    (r"H100 80GB HBM3|H800", 66.9, 494.7, 989.4, 1978.9, 3350, _H100),
    (r"H[18]00 PCIe", 51.2, 378, 756, 1513, 2000, _H100),
    (r"H100 NVL", 60, 417.5, 835.5, 1670.5, 3900, _H100),
    (r"GH200 (120|480)GB", 66.9, 494.7, 989.4, 1978.9, 4000, "NVIDIA GH200 datasheet, 2023"),
    (r"GH200 144G HBM3e", 66.9, 494.7, 989.4, 1978.9, 4900, "NVIDIA GH200 datasheet, 2023"),
    (r"H200", 66.9, 494.7, 989.4, 1978.9, 4800, _H200),
    (r"H200 NVL", 60, 417.5, 835.5, 1670.5, 4800, _H200),
    (r"H20", 44, 74, 148, 296, 4000, "NVIDIA H20 product brief, 2024"),
    (r"H20-3e", 44, 74, 148, 296, 4800, "NVIDIA H20 product brief, 2024, with the memory of the H200"),
    (r"B100", 60, 900, 1750, 3500, 8000, _BLACKWELL),
    (r"B200", 75, 1125, 2250, 4500, 7700, _BLACKWELL),
    (r"GB200", 80, 1250, 2500, 5000, 8000, _BLACKWELL),
    (r"B300( SXM6( AC)?)?", 75, 1125, 2250, 4500, 8000, _ULTRA),
    (r"GB300", 80, 1250, 2500, 5000, 8000, _ULTRA),
    (r"Instinct MI300X( OAM)?( VF)?", 163.4, 653.7, 1307.4, 2614.9, 5300, _CDNA3),
    (r"Instinct MI325X( OAM)?( VF)?", 163.4, 653.7, 1307.4, 2614.9, 6000, _CDNA3),
)

# Operations per clock and multiprocessor, by compute capability: without tensor cores, and on tensor cores in 16 bits
# (NVIDIA's whitepapers of V100, T4, A100, GA102, AD102, H100 and Blackwell). GeForce chips of 8.6, 8.9 and 12.0 reach
# half of that on tensor cores, so that their utilization is computed too low.
_PER_CLOCK = {
    (7, 0): (128, 1024),
    (7, 5): (128, 1024),
    (8, 0): (128, 2048),
    (8, 6): (256, 1024),
    (8, 9): (256, 1024),
    (9, 0): (256, 4096),
    (10, 0): (256, 8192),
    (10, 3): (256, 8192),
    (12, 0): (256, 1024),
}


def peaks_by_name(name: str) -> DevicePeaks | None:
    """Return the peaks of a device by its name in `torch.cuda.get_device_name`; None if it is not in the table."""
    bare = re.sub(r"^(NVIDIA|Tesla|AMD) ", "", name.strip())
    for pattern, fp32, tf32, fp16, fp8, gigabytes, source in _TABLE:
        if re.fullmatch(pattern, bare):
            return DevicePeaks(
                fp32=fp32 * 1e12,
                tf32=tf32 and tf32 * 1e12,
                fp16=fp16 * 1e12,
                bf16=tf32 and fp16 * 1e12,  # the same devices have both
                fp8=fp8 and fp8 * 1e12,
                bandwidth=gigabytes * 1e9,
                source=source,
            )
    return None


def computed_peaks(
    capability: tuple[int, int], multiprocessors: int, clock: float, *, bandwidth: float | None = None
) -> DevicePeaks:
    """Compute the peaks of an NVIDIA device: operations per clock and multiprocessor, times both.

    `capability` is such as (9, 0), the `clock` in Hz, and the `bandwidth` of the memory in bytes per second.

    Raises:
        ConfigError: nothing is known of this capability.
    """
    if capability not in _PER_CLOCK:
        known = ", ".join(f"{major}.{minor}" for major, minor in _PER_CLOCK)
        raise ConfigError(
            f"the compute capability is {capability[0]}.{capability[1]}, whose operations per clock are not "
            f"known, only those of {known}; pass the device's peak in FLOP/s"
        )
    plain, tensor = (operations * multiprocessors * clock for operations in _PER_CLOCK[capability])
    return DevicePeaks(
        fp32=plain,
        tf32=tensor / 2 if capability >= (8, 0) else None,
        fp16=tensor,
        bf16=tensor if capability >= (8, 0) else None,
        fp8=2 * tensor if capability >= (8, 9) else None,
        bandwidth=bandwidth,
        source=f"computed from {multiprocessors} multiprocessors at {clock / 1e9:.2f} GHz",
    )


def device_peaks(device: torch.device | str | int | None = None) -> DevicePeaks:
    """Return the peaks of a CUDA device, by default the current one, from the table or computed at its maximum clock.

    Raises:
        ConfigError: the peaks are not known.
    """
    if isinstance(device, str | torch.device) and torch.device(device).type != "cuda":
        raise ConfigError(f"no peaks are known of the device {device}; pass a CUDA device, or its peak in FLOP/s")
    properties = torch.cuda.get_device_properties(device)
    if (known := peaks_by_name(properties.name)) is not None:
        return known
    clock = getattr(properties, "clock_rate", None)  # kHz; not in all versions of PyTorch, nor on all platforms
    if torch.version.hip or not clock:
        raise ConfigError(f"the peaks of {properties.name!r} are not known; pass its peak in FLOP/s")
    memory_clock = getattr(properties, "memory_clock_rate", 0)  # kHz, with two transfers per clock
    return computed_peaks(
        (properties.major, properties.minor),
        properties.multi_processor_count,
        clock * 1e3,
        bandwidth=2 * memory_clock * 1e3 * getattr(properties, "memory_bus_width", 0) / 8 or None,
    )
