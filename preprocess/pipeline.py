"""The whole job, stage by stage: raw files -> interactions -> sequences -> splits -> a folder of Parquet."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from evenrank.datasets.errors import ConfigError
from evenrank.datasets.schema import Manifest
from evenrank.preprocess.catalog import CATALOG
from evenrank.preprocess.download import ensure_raw_files
from evenrank.preprocess.interactions import Interactions
from evenrank.preprocess.movielens import read_movielens
from evenrank.preprocess.sequences import build_sequences
from evenrank.preprocess.splits import split_by_user
from evenrank.preprocess.synthetic import SyntheticConfig, draw_interactions
from evenrank.preprocess.writer import replacing_folder, write_dataset

SYNTHETIC = "synthetic"
DATASETS = (*CATALOG, SYNTHETIC)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessConfig:
    """What to make, from where, into which folder."""

    dataset: str  # one of DATASETS
    out: Path  # becomes the dataset's folder; an older dataset there is replaced
    raw_dir: Path = Path("raw")  # holds a folder or an archive per public dataset; downloads go there
    eval_fraction: float = 0.3  # of users, 0..1
    seed: int = 0  # of the split, and of synthetic data
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)

    def __post_init__(self) -> None:
        if self.dataset not in DATASETS:
            raise ConfigError(f"no dataset is called {self.dataset!r}; there are {', '.join(DATASETS)}")
        if not 0 <= self.eval_fraction <= 1:
            raise ConfigError(f"eval_fraction must lie in 0..1, got {self.eval_fraction}")
        if not 0 <= self.seed < 2**62:
            raise ConfigError(f"seed must lie in 0..2^62-1, got {self.seed}")


def preprocess(
    config: PreprocessConfig, *, on_stage: Callable[[str], None] = lambda stage: None, show_progress: bool = False
) -> Manifest:
    """Make the dataset's folder and return its manifest.

    Args:
        config: what to make.
        on_stage: called with a few words as each stage begins.
        show_progress: show a bar for a download on standard error.

    Raises:
        ConfigError, DataError: with one line that says what is wrong and what to do; `config.out` is as it was before.

    """
    with replacing_folder(config.out) as folder:
        on_stage(f"reading {config.dataset}")
        interactions = _read(config, show_progress=show_progress)
        on_stage("building sequences")
        sequences = build_sequences(interactions)
        on_stage(f"writing {len(sequences):,} users")
        splits = split_by_user(sequences, eval_fraction=config.eval_fraction, seed=config.seed)
        return write_dataset(
            folder,
            dataset=config.dataset,
            splits=splits,
            interactions=interactions,
            options={"eval_fraction": config.eval_fraction, "seed": config.seed},
        )


def _read(config: PreprocessConfig, *, show_progress: bool) -> Interactions:
    if config.dataset == SYNTHETIC:
        return draw_interactions(config.synthetic, seed=config.seed)
    dataset = CATALOG[config.dataset]
    return read_movielens(dataset, ensure_raw_files(dataset, config.raw_dir, show_progress=show_progress))
