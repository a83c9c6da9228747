"""Install evenrank, its dependencies and its development tools into the environment of the running Python.

PyTorch comes first, because only an installed PyTorch can tell whether it was built for CUDA, and fbgemm-gpu and
TorchRec have to match its build and its release. A PyTorch that is there already is kept if evenrank works with its
release. Run it with the interpreter of the environment (`make install` does):

    .venv/bin/python scripts/install.py [WHEEL]

Without WHEEL it installs the checkout in editable mode with the development tools, in the versions of
requirements-dev.lock; with it, that wheel alone.
"""

import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evenrank.core.torch_releases import TorchReleases

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements-dev.lock"


def choose_releases(installed_torch: str | None) -> tuple["TorchReleases", bool]:
    """Return the releases to install, and whether the installed PyTorch is kept.

    Args:
        installed_torch: its version, such as "2.14.1+cpu"; None if it is not installed.
    """
    table = runpy.run_path(str(ROOT / "core" / "torch_releases.py"))
    for releases in table["TESTED"]:
        if installed_torch is not None and installed_torch.split(".")[:2] == releases.torch.split(".")[:2]:
            return releases, True
    return table["DEFAULT"], False


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def pip_install(*arguments: str) -> None:
    """Install with pip, showing its progress on a terminal only; exit if it fails."""
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *quiet, *arguments]
    if (code := subprocess.run(command).returncode) != 0:
        sys.exit(f"install: pip could not install {' '.join(arguments)} (exit code {code}); its message is above")


def torch_has_cuda() -> bool:
    """Return whether the installed PyTorch was built for CUDA."""
    code = "import torch; print(torch.version.cuda is not None)"
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True).stdout.strip() == "True"


def main() -> None:
    """Install PyTorch first, then the packages that match it."""
    releases, keeps_torch = choose_releases(installed_version("torch"))
    if not keeps_torch:
        print(f"install: PyTorch {releases.torch}", flush=True)
        pip_install(f"torch=={releases.torch}")
    has_cuda = torch_has_cuda()
    build = "CUDA" if has_cuda else "CPU"
    fbgemm = f"fbgemm-gpu=={releases.fbgemm}" if has_cuda else str(ROOT / "constraints" / f"{releases.name}-cpu")
    # Without the exact releases pip would take the newest ones in the ranges of pyproject.toml.
    matching = (fbgemm, f"torchrec=={releases.torchrec}")
    if len(sys.argv) > 1:
        print(f"install: {sys.argv[1]} ({build} build of PyTorch)", flush=True)
        pip_install(f"{sys.argv[1]}[train]", *matching)
    else:
        print(f"install: evenrank, its dependencies and its tools ({build} build of PyTorch)", flush=True)
        pip_install("--constraint", str(LOCK), "--editable", f"{ROOT}[train,dev]", *matching)
    print("install: done", flush=True)


if __name__ == "__main__":
    main()
