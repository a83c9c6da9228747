"""The tested releases of PyTorch, each with the releases of fbgemm-gpu and TorchRec that belong to it.

fbgemm-gpu is compiled against one release of PyTorch, and TorchRec calls operators of one release of fbgemm-gpu, but
their metadata do not say so: pip combines any of them. A new release of PyTorch is one line here, and what
scripts/lock.py writes from it. Only the standard library is imported: scripts/install.py runs this file before evenrank
is installed.
"""

from typing import NamedTuple


class TorchReleases(NamedTuple):
    """Releases that were tested together; patch releases, the third number, may be combined with each other."""

    torch: str
    fbgemm: str  # of fbgemm-gpu and fbgemm-gpu-cpu
    torchrec: str

    @property
    def name(self) -> str:
        """Of the extra and of the constraints, such as "torch213"."""
        return "torch" + "".join(self.torch.split(".")[:2])


# Oldest first.
TESTED = (
    TorchReleases("2.11.0", "1.6.0", "1.6.1"),
    TorchReleases("2.12.1", "1.7.0", "1.7.0"),
    TorchReleases("2.13.0", "1.8.0", "1.8.0"),
    TorchReleases("2.14.1", "1.9.0", "1.9.2"),
)
DEFAULT = TESTED[2]  # installed by scripts/install.py where there is no PyTorch yet
