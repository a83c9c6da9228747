"""Write requirements-dev.lock, the exact version of every package of development, and constraints/.

    .venv/bin/python scripts/lock.py

`scripts/install.py` passes the lock to pip as constraints. It is valid for each supported version of Python. It has no
hashes, because pip accepts neither an editable install nor another build of PyTorch next to them. PyTorch, and what
belongs to one of its releases, are in extras of pyproject.toml. From these, `constraints/` has two things per
release: constraints for pip, and a package without files that makes TorchRec accept the CPU build of fbgemm-gpu.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from evenrank.core.optional_imports import TorchReleases, torch_releases

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# The versions that the Makefile installs, for each supported version of Python; `make lock` renews them.
# PyTorch, fbgemm-gpu and TorchRec are in pyproject.toml.
"""
EXTRAS = ("train", "check", "package")  # which contain those of all targets of the Makefile
# Of a release or build of PyTorch. Triton comes with CUDA builds, which need an exact version of it.
LEFT_OUT = ("torch", "fbgemm-gpu", "torchrec", "triton")

CONSTRAINTS = """\
# PyTorch {torch} and what belongs to it, for pip install --constraint.
torch=={torch}
fbgemm-gpu=={fbgemm}
fbgemm-gpu-cpu=={fbgemm}
torchrec=={torchrec}
"""
# TorchRec requires a package called fbgemm-gpu, and PyPI has the CPU build as fbgemm-gpu-cpu only.
CPU_BUILD = """\
# A package called fbgemm-gpu, which TorchRec requires, that has no files and installs the CPU build of fbgemm-gpu.
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fbgemm-gpu"
version = "{fbgemm}+cpu"
dependencies = ["fbgemm-gpu-cpu=={fbgemm}"]

[tool.hatch.build.targets.wheel]
bypass-selection = true
"""


def constraints(extra: str, releases: TorchReleases) -> dict[str, str]:
    """Return the files of a release of PyTorch in `constraints/`: their text by name."""
    values = releases._asdict()
    return {
        f"{extra}.txt": CONSTRAINTS.format_map(values),
        f"{extra}-cpu/pyproject.toml": CPU_BUILD.format_map(values),
    }


def main() -> None:
    """Write the constraints, and resolve the extras of all targets of the Makefile to their newest versions."""
    for extra, releases in torch_releases().items():
        for name, text in constraints(extra, releases).items():
            path = ROOT / "constraints" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    with tempfile.TemporaryDirectory() as folder:
        # What a build of PyTorch needs itself, such as libraries of CUDA, is not resolved.
        overrides = Path(folder) / "overrides.txt"
        overrides.write_text('torch; sys_platform == "none"\n')
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
        command += ["--no-header", "--no-annotate", "--overrides", str(overrides)]
        command += [word for extra in EXTRAS for word in ("--extra", extra)]
        command += [word for package in LEFT_OUT for word in ("--no-emit-package", package)]
        run = subprocess.run([*command, "pyproject.toml"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if run.returncode != 0:
        sys.exit(f"lock: uv failed with exit code {run.returncode}; its message is above")
    (ROOT / "requirements-dev.lock").write_text(HEADER + run.stdout)
    print(f"lock: requirements-dev.lock has {len(run.stdout.splitlines())} packages")


if __name__ == "__main__":
    main()
