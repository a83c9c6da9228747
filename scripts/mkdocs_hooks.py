"""Hooks of the documentation's build, named in mkdocs.yml."""

import os
import re
import tempfile
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/evenrank/evenrank"


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
    os.environ["COLUMNS"] = "60"  # of the help of commands, which the pages run: a phone has room for no more
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the repository that are not pages, such as ../../examples/, lead to GitHub."""
    folder = Path(config.docs_dir, page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / match[1]))
        if path.is_relative_to(config.docs_dir) or not path.exists():
            return match[0]  # mkdocs warns of links that lead nowhere
        kind = "tree" if path.is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{path.relative_to(ROOT)}{match[2] or ''})"

    return re.sub(r"\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)", replace, markdown)


_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the build ends
