"""Packages that only some parts of evenrank need, and the extra of evenrank that installs each."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import lazy_loader

from evenrank.core.errors import MissingPackageError

# By the name that is imported.
EXTRAS = {
    "jinja2": "reports",
    "markupsafe": "reports",
    "matplotlib": "reports",
    "polars": "preprocess",
    "pooch": "preprocess",
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
