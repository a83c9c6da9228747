"""The releases of PyTorch that evenrank works with, and those of fbgemm-gpu and TorchRec that belong to each.

fbgemm-gpu is compiled against one release of PyTorch, and TorchRec calls operators of one release of fbgemm-gpu, but
the metadata of neither says so: pip combines any of them. A new release of PyTorch is one line here, and the ranges in
pyproject.toml. This file imports nothing but the standard library, because scripts/install.py runs it before evenrank
is installed.
"""

from typing import NamedTuple


class TorchReleases(NamedTuple):
    """Releases that were tested together. Patch releases, the third number, may be combined with each other."""

    torch: str
    fbgemm: str
    """Of fbgemm-gpu, for CUDA builds of PyTorch, and of fbgemm-gpu-cpu, for CPU builds."""
    torchrec: str


# Oldest first.
TESTED = (
    TorchReleases("2.11.0", "1.6.0", "1.6.1"),
    TorchReleases("2.12.1", "1.7.0", "1.7.0"),
    TorchReleases("2.13.0", "1.8.0", "1.8.0"),
    TorchReleases("2.14.1", "1.9.0", "1.9.2"),
)

# What scripts/install.py installs where there is no PyTorch yet.
DEFAULT = TESTED[2]
