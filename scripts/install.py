"""Install evenrank, with what one target of the Makefile needs, into the environment of the running Python.

PyTorch comes first, because only an installed PyTorch can tell whether it was built for CUDA, and fbgemm-gpu and
TorchRec have to match its build and its release. A PyTorch that is there already is kept if evenrank works with its
release. Run it with the interpreter of the environment (`make install` does):

    .venv/bin/python scripts/install.py [demo | test | check | docs | package | WHEEL]

It installs the checkout in editable mode, by default with what the demo needs, in the versions of
requirements-dev.lock; a wheel with what loaders need alone.
"""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements-dev.lock"
# The extras of pyproject.toml that the targets of the Makefile need. The documentation and the package need no PyTorch.
EXTRAS = {
    "demo": "preprocess,reports,train",
    "test": "test,train",
    "check": "check,train",
    "docs": "docs",
    "package": "package",
}
DEFAULT = "torch213"  # the extra with the releases that are installed where there is no PyTorch yet


def releases() -> dict[str, dict[str, str]]:
    """Return the releases that belong together, by package, of each extra of pyproject.toml that is for one PyTorch."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {
        name: dict(requirement.split("==") for requirement in requirements if "==" in requirement)
        for name, requirements in extras.items()
        if name.startswith("torch")
    }


def choose_releases(installed_torch: str | None) -> tuple[str, bool]:
    """Return the extra with the releases to install, and whether the installed PyTorch is kept.

    Args:
        installed_torch: its version, such as "2.14.1+cpu"; None if it is not installed.
    """
    for name, pins in releases().items():
        if installed_torch is not None and installed_torch.split(".")[:2] == pins["torch"].split(".")[:2]:
            return name, True
    return DEFAULT, False


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


def install_torch() -> tuple[str, str]:
    """Install PyTorch unless there is one to keep, and return the requirements of what belongs to it."""
    name, keeps_torch = choose_releases(installed_version("torch"))
    pins = releases()[name]
    if not keeps_torch:
        print(f"install: PyTorch {pins['torch']}", flush=True)
        pip_install(f"torch=={pins['torch']}")
    cpu_build = str(ROOT / "constraints" / f"{name}-cpu")
    fbgemm = f"fbgemm-gpu=={pins['fbgemm-gpu']}" if torch_has_cuda() else cpu_build
    # Without the exact releases pip would take the newest ones in the ranges of pyproject.toml.
    return fbgemm, f"torchrec=={pins['torchrec']}"


def main() -> None:
    """Install PyTorch first, where it is needed, then the packages that match it."""
    target = sys.argv[1] if len(sys.argv) > 1 else "demo"
    is_wheel = target.endswith(".whl")
    if not is_wheel and target not in EXTRAS:
        sys.exit(f"install: {target!r} is neither a wheel nor one of {', '.join(EXTRAS)}")
    extras = "train" if is_wheel else EXTRAS[target]
    matching = install_torch() if "train" in extras.split(",") else ()
    print(f"install: {target if is_wheel else f'evenrank, with what make {target} needs'}", flush=True)
    what = (target,) if is_wheel else ("--constraint", str(LOCK), "--editable", str(ROOT))
    pip_install(*what[:-1], f"{what[-1]}[{extras}]", *matching)
    print("install: done", flush=True)


if __name__ == "__main__":
    main()
