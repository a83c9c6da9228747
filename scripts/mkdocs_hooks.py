"""Hooks of the documentation's build, named in mkdocs.yml."""

import tempfile
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority

ROOT = Path(__file__).resolve().parent.parent


@event_priority(100)  # before mkdocstrings reads its paths
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let mkdocstrings find the sources of `evenrank`, which it reads without importing them.

    The checkout itself is the package, and the link in `typings/` to it contains itself. So it gets a folder with links
    to the folders that are installed, and to nothing else.
    """
    folder = tempfile.TemporaryDirectory()
    package = Path(folder.name) / "evenrank"
    package.mkdir()
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    for name in {name.split(".")[1] for name in names if "." in name} | {"__init__.py"}:
        (package / name).symlink_to(ROOT / name)
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [folder.name]
    _folders.append(folder)
    return config


_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the build ends
