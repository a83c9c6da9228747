"""Hashes of evenrank's own source files, by which processes with different code are told apart."""

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

PACKAGE_FOLDER = Path(__file__).resolve().parent.parent
# Tests, scripts and virtual environments may be in the same folder.
_SUBPACKAGES = ("core", "datasets", "dataloader", "preprocess", "training")
_DECORATOR = b"\n@compiled\n"


@functools.cache
def code_hash() -> str:
    """Return a hash of all source files that decide on samples, plans and exchanges: 16 hexadecimal digits."""
    return _hash(_sources())


@functools.cache
def compiled_code_hash() -> str:
    """Return a hash of the source files with compiled functions, whose machine code contains that of others."""
    return _hash((path, source) for path, source in _sources() if _DECORATOR in source)


def _sources() -> Iterable[tuple[Path, bytes]]:
    for name in _SUBPACKAGES:
        for path in sorted((PACKAGE_FOLDER / name).rglob("*.py")):
            yield path, path.read_bytes()


def _hash(sources: Iterable[tuple[Path, bytes]]) -> str:
    digest = hashlib.sha256()
    for path, source in sources:
        digest.update(f"{path.relative_to(PACKAGE_FOLDER).as_posix()} {len(source)}\n".encode())
        digest.update(source)
    return digest.hexdigest()[:16]
