"""Items as tuples of codes (semantic ids): `CodeTable`, and the files that it is read from."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from evenrank.codebooks.bundle import CODES, Bundle, read_bundle
from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.files import check_regular

SEMANTIC_ID, CANDIDATE_ID = "semantic_id", "candidate_id"
_NO_CODE = -1
_MAX_LEVELS = 64  # more than any model uses: a table with more is probably transposed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CodeTable:
    """The codes of every item.

    levels = 2, codebook_sizes = (3, 4)     item     0    1    2
                                            codes   0 3  2 1  - -     (item 2 has no code)
                                            tokens  0 6  2 4          (tokens of the second level start at 3)
    """

    codes: NDArray[np.int32]
    """[items, levels]; -1 in every level of an item without a code."""
    codebook_sizes: tuple[int, ...]
    """[levels]: the codes of a level are in 0..size-1."""
    alternatives: NDArray[np.int32] | None = None
    """[items, A, levels]: further codes of each item, as of other tokenizers; then -1. None: each item has one code."""
    bundle: Bundle | None = None
    """What the codes were made of, by which datasets and states are checked. None: it is not known."""

    def __post_init__(self) -> None:
        codes, sizes = self.codes, self.codebook_sizes
        if codes.ndim != 2 or codes.dtype.kind not in "iu" or codes.shape[1] != len(sizes):
            raise ConfigError(
                f"codes must be integers [items, levels] with one of codebook_sizes, {list(sizes)}, per level, got "
                f"{codes.dtype} {list(codes.shape)}; transpose a table [levels, items], or pass other sizes"
            )
        if self.alternatives is not None:
            codes = self._check_alternatives(self.alternatives)
        if ((codes < _NO_CODE) | (codes >= np.array(sizes))).any():
            raise ConfigError(
                f"codes must be -1 (no code) or below codebook_sizes, {list(sizes)}, got {codes.min()} to "
                f"{codes.reshape(-1, len(sizes)).max(axis=0).tolist()} in the levels; give each level a size above its "
                "largest code"
            )
        partly_missing = (codes == _NO_CODE).any(axis=-1) & (codes != _NO_CODE).any(axis=-1)
        if partly_missing.any():
            raise ConfigError(
                f"item {np.argwhere(partly_missing)[0, 0]} has codes in some levels only; set all of its levels to -1, "
                "or none"
            )

    def _check_alternatives(self, alternatives: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return all codes, [items, 1 + A, levels]."""
        items, levels = self.codes.shape
        if alternatives.ndim != 3 or alternatives.shape[::2] != (items, levels) or alternatives.dtype.kind not in "iu":
            raise ConfigError(
                f"alternatives must be integers [items, A, levels] of {items} items with {levels} levels, got "
                f"{alternatives.dtype} {list(alternatives.shape)}"
            )
        codes = np.concatenate([self.codes[:, None], alternatives], axis=1)
        is_missing = codes[..., 0] == _NO_CODE
        if (after := is_missing[:, :-1] & ~is_missing[:, 1:]).any():
            raise ConfigError(f"item {np.argwhere(after)[0, 0]} has a code after a missing one; put -1 last")
        for first in range(codes.shape[1]):
            same = (codes[:, first, None] == codes[:, first + 1 :]).all(axis=-1) & ~is_missing[:, first, None]
            if same.any():
                raise ConfigError(f"item {np.argwhere(same)[0, 0]} has the same code twice; set the second to -1")
        return codes

    def all_codes(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the items and codes of all pairs, those of alternatives too: int64 [n], ascending, and [n, levels]."""
        more = [] if self.alternatives is None else [self.alternatives]
        codes = np.concatenate([self.codes[:, None], *more], axis=1)
        items, numbers = np.nonzero(codes[..., 0] != _NO_CODE)
        return items, codes[items, numbers]

    @property
    def level_offsets(self) -> NDArray[np.int64]:
        """First token of each level: int64 [levels]."""
        return np.cumsum([0, *self.codebook_sizes])[:-1]

    def has_code(self, items: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return whether each item has a code: bool, of the same shape. Items beyond the table have none."""
        in_table = (items >= 0) & (items < len(self.codes))
        has_code: NDArray[np.bool_] = in_table & (self.codes[np.where(in_table, items, 0), 0] != _NO_CODE)
        return has_code

    def describe(self) -> str:
        """Return the sizes of the table and a hash of its contents; equal for equal tables."""
        items, levels = self.codes.shape
        digest, more = hashlib.sha256(np.ascontiguousarray(self.codes, dtype="<i4").tobytes()), ""
        if self.alternatives is not None:
            digest.update(np.ascontiguousarray(self.alternatives, dtype="<i4").tobytes())
            more = f" with {self.alternatives.shape[1]} alternatives"
        sizes = list(self.codebook_sizes)
        return f"{levels} levels of {items} items{more}, codebook_sizes {sizes}, {digest.hexdigest()[:16]}"


def read_codes(path: Path | str, codebook_sizes: Sequence[int] | None = None) -> CodeTable:
    """Read a table of codes from a folder of semantic ids, or a `.pt` or `.npy` file, without running code from it.

    Args:
        path: of the folder, or a file of integers [levels, items] or [levels, items, codes of an item]; -1: no code.
        codebook_sizes: per level; None: those of the folder, or the largest code of the level + 1.

    Raises:
        DataError: the file cannot be read, or is not such a table.
    """
    path, bundle = Path(path), None
    if path.is_dir():
        bundle = read_bundle(path)
        path, codebook_sizes = path / CODES, codebook_sizes or bundle.codebook_sizes
    table = _read_tensor(path)
    if table.ndim not in (2, 3) or table.dtype.kind not in "iu" or not table.size:
        shapes = "[levels, items] or [levels, items, codes of an item]"
        raise DataError(f"{path} must contain an integer tensor {shapes}, got {table.dtype} {table.shape}")
    if len(table) > _MAX_LEVELS:
        raise DataError(
            f"{path} has {len(table):,} levels of {table.shape[1]:,} items, more than {_MAX_LEVELS} levels; transpose "
            "the table if its first dimension is the items"
        )
    low, high = int(table.min()), int(table.max())
    if low < _NO_CODE or high > np.iinfo(np.int32).max:
        raise DataError(f"{path} has codes from {low} to {high}; they must be -1 (no code) or 0 to 2^31-1")
    codes = np.atleast_3d(table).transpose(1, 2, 0).astype(np.int32, order="C")  # [items, codes of an item, levels]
    sizes = codes.max(axis=(0, 1)).astype(np.int64) + 1 if codebook_sizes is None else codebook_sizes
    if len(sizes) != len(table):
        raise DataError(
            f"{path} has {len(table)} levels of {table.shape[1]:,} items, but codebook_sizes are {list(sizes)}; pass "
            "one size per level"
        )
    more = np.ascontiguousarray(codes[:, 1:]) if codes.shape[1] > 1 else None
    try:
        own = np.ascontiguousarray(codes[:, 0])
        return CodeTable(codes=own, codebook_sizes=tuple(map(int, sizes)), alternatives=more, bundle=bundle)
    except ConfigError as error:
        raise DataError(f"{path}: {error}") from error


def _read_tensor(path: Path) -> NDArray[np.integer]:
    if path.suffix not in (".pt", ".npy"):
        raise DataError(f"{path} must be a .pt file from torch.save or a .npy file from numpy.save")
    check_regular(path)
    try:
        if path.suffix == ".npy":
            # Mapped, a file that is shorter than its header says takes no memory.
            return np.array(np.load(path, mmap_mode="r", allow_pickle=False))
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(loaded, torch.Tensor) or loaded.layout != torch.strided or loaded.is_quantized:
            raise DataError(f"{path} must contain one tensor [levels, items], got {type(loaded).__name__}")
        if loaded.numel() * loaded.element_size() > path.stat().st_size:  # an expanded tensor repeats its elements
            raise DataError(f"{path} has fewer bytes than a tensor {list(loaded.shape)}; save it after contiguous()")
        return loaded.detach().numpy()
    except DataError:
        raise
    except Exception as error:  # a malformed file can raise anything
        raise DataError(
            f"{path} cannot be read as a tensor without running code from it ({first_line(error)}); save a single "
            "tensor [levels, items]"
        ) from error
