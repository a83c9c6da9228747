"""Install evenrank, its dependencies and its development tools into the environment of the running Python.

There are two steps, because only an installed PyTorch can tell whether it was built for CUDA, and TorchRec needs the
build of fbgemm-gpu that matches. Run it with the interpreter of the environment (`make install` does):

    .venv/bin/python scripts/install.py [WHEEL]

Without WHEEL it installs the checkout in editable mode with the development tools; with it, that wheel alone.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def pip_install(*arguments: str) -> None:
    """Install with pip, showing its progress on a terminal only; exit if it fails."""
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *quiet, *arguments]
    if (code := subprocess.run(command).returncode) != 0:
        sys.exit(f"install: pip could not install {' '.join(arguments)} (exit code {code}); its message is above")


def torch_has_cuda() -> bool:
    """Return whether the installed PyTorch was built for CUDA."""
    code = "import torch; print(torch.version.cuda is not None)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "True"


def main() -> None:
    """Install PyTorch first, then the packages that match its build."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = {requirement.split("==")[0]: requirement for requirement in extras["cuda"]}

    print("install: PyTorch", flush=True)
    pip_install(pins["torch"])
    build = "cuda" if torch_has_cuda() else "cpu"
    if len(sys.argv) > 1:
        print(f"install: {sys.argv[1]} ({build} build of PyTorch)", flush=True)
        pip_install(f"{sys.argv[1]}[{build}]")
    else:
        print(f"install: evenrank, its dependencies and its tools ({build} build of PyTorch)", flush=True)
        pip_install("--editable", f"{ROOT}[{build},dev]")
    if build == "cpu":
        pip_install("--no-deps", pins["torchrec"])
    print("install: done", flush=True)


if __name__ == "__main__":
    main()
