"""Write requirements-dev.lock: the exact version of every package of the development environment.

    .venv/bin/python scripts/lock.py

`scripts/install.py` passes it to pip as constraints. It is valid for each supported version of Python. It has no
hashes, because pip accepts neither an editable install nor another build of PyTorch next to them. PyTorch, and what
belongs to one of its releases, are in core/torch_releases.py.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# The versions that `make install` installs, for each supported version of Python; `make lock` renews them.
# PyTorch, fbgemm-gpu and TorchRec are in core/torch_releases.py.
"""
# Of a release or build of PyTorch. Triton comes with CUDA builds, which need an exact version of it.
LEFT_OUT = ("torch", "fbgemm-gpu-cpu", "triton")


def main() -> None:
    """Resolve the extras `cpu` and `dev` to their newest versions."""
    with tempfile.TemporaryDirectory() as folder:
        # What a build of PyTorch needs itself, such as libraries of CUDA, is not resolved.
        overrides = Path(folder) / "overrides.txt"
        overrides.write_text('torch; sys_platform == "none"\n')
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
        command += ["--no-header", "--no-annotate", "--overrides", str(overrides), "--extra", "cpu", "--extra", "dev"]
        command += [word for package in LEFT_OUT for word in ("--no-emit-package", package)]
        run = subprocess.run([*command, "pyproject.toml"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if run.returncode != 0:
        sys.exit(f"lock: uv failed with exit code {run.returncode}; its message is above")
    (ROOT / "requirements-dev.lock").write_text(HEADER + run.stdout)
    print(f"lock: requirements-dev.lock has {len(run.stdout.splitlines())} packages")


if __name__ == "__main__":
    main()
