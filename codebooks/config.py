"""`SemanticIdsConfig`: the options of making semantic ids."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from evenrank.core.errors import ConfigError
from evenrank.core.rules import AppliesTo, Bounds, Option, Seed
from evenrank.core.settings import Settings
from evenrank.core.storage import is_url, local_path

_MOST_BALANCED = 1 << 14  # codes, whose distances to points take 17 to 34 GB
_NEW = AppliesTo(append=(None,))
Method = Literal["residual-kmeans", "balanced"]
Collisions = Literal["level", "nearest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SemanticIdsConfig(Settings):
    """Which codes are made of the item vectors of a dataset."""

    dataset: Annotated[Path | str, Option("PATH", is_argument=True)]
    """Folder or URL written by `evenrank preprocess` with --item-vectors."""
    levels: Annotated[int, Bounds(at_least=1, at_most=16), Option("COUNT", panel="Codes"), _NEW] = 3
    """Codebooks, each of what the levels before leave of a vector."""
    codes: Annotated[int, Bounds(at_least=2, at_most=1 << 16), Option("COUNT"), _NEW] = 256
    """Codes of a level."""
    method: Annotated[Method, _NEW] = "residual-kmeans"
    """`residual-kmeans`: the nearest code. `balanced`: codes have prices, so that each is used about equally often."""
    collisions: Annotated[Collisions, _NEW] = "level"
    """For items with the same codes. `level`: one more level numbers them. `nearest`: each but the first takes, level
    by level, the nearest code below which a tuple is free."""
    seed: Annotated[Seed, Option("NUMBER"), _NEW] = 0
    """Seed of the sample that codebooks are made of, and of k-means."""
    append: Annotated[Path | None, Option("FOLDER")] = None
    """Semantic ids of an earlier version of the dataset: keep its codebooks and codes, and add those of other items."""
    out: Annotated[Path | None, Option("FOLDER", panel="Output")] = None
    """New folder. None: NAME-semantic-ids, next to the dataset NAME."""

    def _check(self) -> None:
        if self.codes**self.levels >= 1 << 62:  # a tuple of codes is one int64
            raise ConfigError(f"{self.levels} levels of {self.codes} codes have over 2^62 tuples; choose fewer")
        if self.method == "balanced" and self.codes > _MOST_BALANCED:
            raise ConfigError(
                f"balanced levels have at most {_MOST_BALANCED:,} codes, got {self.codes:,}; choose fewer"
            )

    @property
    def folder(self) -> Path:
        """The folder to write; a ConfigError if something is there, or it would be at a URL."""
        place = self.dataset if self.out is None else self.out
        if is_url(place):
            raise ConfigError(
                f"{place} is a URL, and semantic ids are written to this host; choose a folder with --out"
            )
        folder = local_path(place)
        if folder.name in ("", ".."):
            folder = folder.resolve()
        if self.out is None:
            folder = folder.with_name(f"{folder.name}-semantic-ids")
        if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
            raise ConfigError(f"{folder} exists, and is never replaced; remove it, or choose another --out")
        return folder
