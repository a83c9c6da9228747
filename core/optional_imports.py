"""Packages that only some parts of evenrank need, and the extra of evenrank that installs each."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

import lazy_loader
from packaging.version import InvalidVersion, Version

from evenrank.core.errors import ConfigError, MissingPackageError
from evenrank.core.torch_releases import TESTED, TorchReleases

# By the name that is imported.
EXTRAS = {
    "jinja2": "reports",
    "markupsafe": "reports",
    "matplotlib": "reports",
    "polars": "preprocess",
    "requests": "preprocess",
    "tensorboard": "tensorboard",
    "fbgemm_gpu": "train",
    "torch": "train",
    "torchdata": "train",
    "torchrec": "train",
}
# Not `evenrank[train]`: it is for CUDA.
_WITHOUT_CUDA = "; without CUDA: pip install 'evenrank[cpu]', then torchrec with --no-deps (docs/how-to/install.md)"


@contextlib.contextmanager
def naming_extras() -> Iterator[None]:
    """Raise a MissingPackageError, which says what to install, where an import fails because an extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        extra = EXTRAS[package]
        remedy = f"pip install 'evenrank[{extra}]'" + (_WITHOUT_CUDA if extra == "train" else "")
        raise MissingPackageError(f"the package {package} is not installed; run {remedy}") from error


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package: names of its `.pyi` are imported at their first use.

    Args:
        package: its `__name__`.
        file: its `__file__`.

    """
    get, names, exported = lazy_loader.attach_stub(package, file)

    def get_attribute(name: str) -> Any:
        with naming_extras():
            return get(name)

    return get_attribute, names, exported


# Whether the installed PyTorch, fbgemm-gpu and TorchRec belong together, from their metadata, without importing them.
#
# Combined wrongly they fail late, and with undefined symbols or missing operators instead of a reason.


FBGEMM_CUDA, FBGEMM_CPU = "fbgemm-gpu", "fbgemm-gpu-cpu"


class TorchReleaseWarning(UserWarning):
    """PyTorch, fbgemm-gpu or TorchRec are builds of a vendor or nightly builds, in releases not tested together."""


@functools.cache
def check_torch() -> None:
    """Check the installed PyTorch, fbgemm-gpu and TorchRec, once per process.

    Does nothing where one of them is missing, or was installed without metadata: planning needs none, and imports tell
    which one is missing.

    Raises:
        ConfigError: PyTorch is not of a tested release, fbgemm-gpu or TorchRec do not belong to it, or both builds of
            fbgemm-gpu are installed.

    """
    check_releases({name: _installed(name) for name in ("torch", FBGEMM_CUDA, FBGEMM_CPU, "torchrec")})


def check_releases(installed: Mapping[str, str | None]) -> None:
    """Check versions by name of the package, such as {"torch": "2.13.0+cpu"}; None or no entry: not installed.

    Builds of vendors ("2.13.0a0+nv25.10"), nightly builds and release candidates may have been made to work together,
    so a difference between these is a TorchReleaseWarning.

    Raises:
        ConfigError: as `check_torch`.

    """
    found = {name: version for name, text in installed.items() if (version := _parse(text)) is not None}
    if FBGEMM_CUDA in found and FBGEMM_CPU in found:
        expected = _releases_of(found["torch"]) if "torch" in found else None
        pin = f"=={expected.fbgemm}" if expected else ""
        raise ConfigError(
            f"{FBGEMM_CUDA} {found[FBGEMM_CUDA]} and {FBGEMM_CPU} {found[FBGEMM_CPU]} are both installed, and "
            f"overwrite each other's files; run pip uninstall -y {FBGEMM_CUDA} {FBGEMM_CPU}, then pip install "
            f"--no-deps {FBGEMM_CUDA}{pin} (CUDA) or {FBGEMM_CPU}{pin} (CPU)"
        )
    fbgemm = FBGEMM_CPU if FBGEMM_CPU in found else FBGEMM_CUDA
    if not {"torch", fbgemm, "torchrec"} <= found.keys():
        return
    problem = _problem(found["torch"], fbgemm, found[fbgemm], found["torchrec"])
    if problem is None:
        return
    if all(map(_is_release, found.values())):
        raise ConfigError(problem)
    warnings.warn(problem, TorchReleaseWarning, stacklevel=2)


def _problem(torch: Version, fbgemm_name: str, fbgemm: Version, torchrec: Version) -> str | None:
    expected = _releases_of(torch)
    if expected is None:
        newest = TESTED[-1]
        where = " (CPU build: docs/how-to/install.md)" if torch.local == "cpu" else ""
        return (
            f"torch {torch} is installed, and evenrank works with torch {_minor(TESTED[0].torch)} to "
            f"{_minor(newest.torch)}; run pip install torch=={newest.torch}{where}, then pip install --no-deps "
            f"{fbgemm_name}=={newest.fbgemm} torchrec=={newest.torchrec}"
        )
    if (_minor(fbgemm), _minor(torchrec)) != (_minor(expected.fbgemm), _minor(expected.torchrec)):
        return (
            f"torch {torch} needs {fbgemm_name} {_minor(expected.fbgemm)} and torchrec {_minor(expected.torchrec)}, "
            f"found {fbgemm} and {torchrec}; run pip install --no-deps {fbgemm_name}=={expected.fbgemm} "
            f"torchrec=={expected.torchrec}"
        )
    if torch.local == "cpu" and fbgemm_name == FBGEMM_CUDA and fbgemm.local != "cpu":
        return (
            f"torch {torch} was built for the CPU, and {FBGEMM_CUDA} {fbgemm} for CUDA; run pip uninstall -y "
            f"{FBGEMM_CUDA}, then pip install --no-deps {FBGEMM_CPU}=={expected.fbgemm}"
        )
    return None


def _releases_of(torch: Version) -> TorchReleases | None:
    return next((tested for tested in TESTED if _minor(tested.torch) == _minor(torch)), None)


def _minor(version: Version | str) -> str:
    """Return "2.13" of "2.13.0a0+nv25.10"."""
    parsed = Version(version) if isinstance(version, str) else version
    return f"{parsed.major}.{parsed.minor}"


def _is_release(version: Version) -> bool:
    """Return whether it is one of the project itself: "2.13.0", "2.13.0+cpu", "2.13.0+cu130" or "2.13.0+rocm7.1"."""
    is_own_build = version.local is None or version.local.startswith(("cpu", "cu", "rocm", "xpu"))
    is_dated = version.major > 1000  # fbgemm-gpu's builds from source, such as "2026.11.22"
    return is_own_build and not version.is_prerelease and not is_dated


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _parse(text: str | None) -> Version | None:
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None
