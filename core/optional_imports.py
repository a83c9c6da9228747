"""Packages that only parts of evenrank need: the extra that installs each, and whether their releases match.

PyTorch, fbgemm-gpu and TorchRec of releases that do not belong together fail late, with undefined symbols or missing
operators. So their versions are checked from their metadata, without importing them.
"""

import contextlib
import functools
import gc
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import lazy_loader
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from evenrank.core.errors import ConfigError, MissingPackageError

FBGEMM_CUDA, FBGEMM_CPU = "fbgemm-gpu", "fbgemm-gpu-cpu"

_WITHOUT_CUDA = " (without CUDA: docs/how-to/install.md)"


class TorchReleases(NamedTuple):
    """Releases that were tested together; patch releases, the third number, may be combined with each other.

    fbgemm-gpu is compiled against one release of PyTorch, and TorchRec calls operators of one release of fbgemm-gpu,
    but their metadata do not say so: pip combines any of them.
    """

    torch: str
    fbgemm: str  # of fbgemm-gpu and fbgemm-gpu-cpu
    torchrec: str


@functools.cache
def _requirements() -> dict[str, list[Requirement]]:
    """Return what each extra of pyproject.toml requires, by evenrank's own metadata; none where it has none."""
    found: dict[str, list[Requirement]] = {}
    with contextlib.suppress(metadata.PackageNotFoundError):
        for requirement in map(Requirement, metadata.requires("evenrank") or ()):
            if extra := re.search(r'extra == "(\w+)"', str(requirement.marker)):
                found.setdefault(extra[1], []).append(requirement)
    return found


def extras() -> dict[str, str]:
    """Return the extra that installs each package, by the name that is imported, of the extras for users."""
    of_users = sorted(set().union(*(requirement.extras for requirement in _requirements().get("all", ()))))
    packages = ((requirement.name, extra) for extra in of_users for requirement in _requirements()[extra])
    return {name.removesuffix("-cpu").replace("-", "_"): extra for name, extra in packages}  # faiss-cpu is faiss


@functools.cache
def torch_releases() -> dict[str, TorchReleases]:
    """Return the releases that were tested together, oldest first, by the extra that pins them, such as "torch213"."""
    pins = {
        extra: {requirement.name: str(requirement.specifier).removeprefix("==") for requirement in requirements}
        for extra, requirements in _requirements().items()
        if re.fullmatch(r"torch\d+", extra)
    }
    return {extra: TorchReleases(of["torch"], of["fbgemm-gpu"], of["torchrec"]) for extra, of in pins.items()}


@contextlib.contextmanager
def naming_extras() -> Iterator[None]:
    """Raise a MissingPackageError with the command to run where an import fails because an extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if (extra := extras().get(package)) is None:
            raise
        remedy = f"pip install 'evenrank[{extra}]'" + (_WITHOUT_CUDA if extra == "train" else "")
        raise MissingPackageError(f"the package {package} is not installed; run {remedy}") from error


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Collect no garbage: of what imports make, which stays, Python would search all over and over."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that imports its names at their first use.

    They are listed by a `.pyi` file next to `file`, the package's `__file__`.
    """
    get, names, exported = lazy_loader.attach_stub(package, file)

    def get_attribute(name: str) -> Any:
        with naming_extras(), garbage_kept():
            return get(name)

    return get_attribute, names, exported


class TorchReleaseWarning(UserWarning):
    """The releases of PyTorch, fbgemm-gpu or TorchRec are newer than those tested together, or custom builds."""


@functools.cache
def check_torch() -> None:
    """Check the installed PyTorch, fbgemm-gpu and TorchRec, once per process; see `check_releases`."""
    check_releases(installed_versions("torch", FBGEMM_CUDA, FBGEMM_CPU, "torchrec"))


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of those packages that are installed, by their metadata."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def check_releases(installed: Mapping[str, str | None]) -> None:
    """Check that versions of PyTorch, fbgemm-gpu and TorchRec, such as {"torch": "2.13.0+cpu"}, belong together.

    A combination known to fail is a ConfigError. Untested ones with a newer PyTorch, a pre-release or a vendor's build
    ("2.13.0a0+nv25.10") may work, so they are a TorchReleaseWarning. Nothing is checked where one of the three is
    missing or has no metadata: planning needs none, and imports name the missing one.
    """
    found: dict[str, Version] = {}
    for name, text in installed.items():
        with contextlib.suppress(InvalidVersion):
            found[name] = Version(text or "")
    if FBGEMM_CPU in found and FBGEMM_CUDA in found and found[FBGEMM_CUDA].local != "cpu":  # constraints/ has that name
        expected = _releases_of(found["torch"]) if "torch" in found else None
        pin = f"=={expected.fbgemm}" if expected else ""
        raise ConfigError(
            f"{FBGEMM_CUDA} {found[FBGEMM_CUDA]} and {FBGEMM_CPU} {found[FBGEMM_CPU]} are both installed, and "
            f"overwrite each other's files; run pip uninstall -y {FBGEMM_CUDA} {FBGEMM_CPU}, then pip install "
            f"--no-deps {FBGEMM_CUDA}{pin} (CUDA) or {FBGEMM_CPU}{pin} (CPU)"
        )
    fbgemm = FBGEMM_CPU if FBGEMM_CPU in found else FBGEMM_CUDA
    if not {"torch", fbgemm, "torchrec"} <= found.keys() or not torch_releases():
        return
    versions = found["torch"], found[fbgemm], found["torchrec"]
    if problem := _problem(fbgemm, *versions):
        if _minor(found["torch"]) <= _minor(_oldest_and_newest()[1].torch) and not any(map(_is_custom, versions)):
            raise ConfigError(problem)
        warnings.warn(f"{problem}; it was not tested and may fail", TorchReleaseWarning, stacklevel=2)


def _problem(fbgemm_name: str, torch: Version, fbgemm: Version, torchrec: Version) -> str | None:
    expected = _releases_of(torch)
    if expected is None:
        oldest, newest = _oldest_and_newest()
        where = " (CPU build: docs/how-to/install.md)" if torch.local == "cpu" else ""
        return (
            f"torch {torch} is installed, and evenrank works with torch {_minor(oldest.torch)} to "
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
    return next((tested for tested in torch_releases().values() if _minor(tested.torch) == _minor(torch)), None)


def _oldest_and_newest() -> tuple[TorchReleases, TorchReleases]:
    oldest, *_, newest = torch_releases().values()
    return oldest, newest


def _minor(version: Version | str) -> Version:
    """Return 2.13 of "2.13.0a0+nv25.10"."""
    return Version("{0.major}.{0.minor}".format(Version(str(version))))


def _is_custom(version: Version) -> bool:
    """Return whether it is not an official release such as "2.13.0", "2.13.0+cpu" or "2.13.0+cu130"."""
    is_official = version.local is None or version.local.startswith(("cpu", "cu", "rocm", "xpu"))
    is_dated = version.major > 1000  # fbgemm-gpu's builds from source, such as "2026.11.22"
    return version.is_prerelease or is_dated or not is_official
