"""`PreprocessConfig`: what to preprocess, how, and where to write it."""

from dataclasses import dataclass, field
from pathlib import Path

from evenrank.core.errors import ConfigError
from evenrank.core.settings import check_record
from evenrank.core.storage import is_url
from evenrank.preprocess.build.events import OnError
from evenrank.preprocess.build.filters import Filters
from evenrank.preprocess.build.inference_requests import RequestRule
from evenrank.preprocess.build.splits import parse_split
from evenrank.preprocess.build.vocabulary import parse_ids, parse_unknown
from evenrank.preprocess.engine import EngineName
from evenrank.preprocess.log_config import TabularConfig
from evenrank.preprocess.sources.catalog import CUSTOM, DATASETS
from evenrank.preprocess.sources.fractal import parse_expansion
from evenrank.preprocess.sources.synthetic import SyntheticConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessConfig:
    """What to preprocess, how, and where to write it."""

    dataset: str
    """One of `DATASETS`."""
    out: Path | str
    """Folder or URL of the new dataset, which replaces an existing one."""
    overwrite: bool = False
    """Whether to replace a folder that contains something else than a dataset."""
    append: bool = False
    """Whether the events are later ones for the dataset that is at `out`, which becomes as if all were preprocessed at
    once, with the ids that its features have; its log is not read again. All other options are those by which it was
    made. Files that it has already change nothing."""
    raw_dir: Path = Path("raw")
    """Folder with a folder or an archive of raw files per public dataset. Missing ones are downloaded into it."""
    split: str = "user:0.3"
    """`user:FRACTION`, `leave-last:N`, `time:TIME`, `time:last:DURATION`, `file:PATH` or `none`; see
    `evenrank.preprocess.build.splits`."""
    allow_empty: bool = False
    """Whether a split by time or file may leave train or eval without rows, and a log may begin or end in 1970."""
    seed: int = 0
    """Seed of the split by user and of synthetic data, 0 to 2^62 - 1."""
    ids: str = ""
    """Rules for the ids of users and items, such as `dense` or `item=dense,user=keep`; see
    `evenrank.preprocess.build.vocabulary`. Default: `auto` for custom logs, `dense` for public datasets, else `keep`.
    """
    vocabulary: Path | None = None
    """An earlier dataset, whose ids are kept, also at a URL; None: ids begin anew."""
    unknown: str = ""
    """What to do about values that the vocabulary lacks, such as `drop` or `item=oov,user=append`: number them after
    the known ones (`append`, the default), give all of them the id 0 (`oov`), leave out their events, or `fail`."""
    filters: Filters = field(default_factory=Filters)
    on_error: OnError = "fail"
    """What to do about rows that cannot be read: raise an error, or skip and count them."""
    engine: EngineName = "local"
    """Where the work is done: `local`, on threads of this process; `ray`, on processes of a Ray cluster."""
    ray_address: str | None = None
    """Of a running Ray cluster, such as `auto`; None: one of this machine is started and ended."""
    memory_limit: float | None = None
    """GB that decide, with the cores of this machine, how many threads or processes there are; None: half of the memory
    that is free."""
    requests: RequestRule | None = None
    """Rule for requests.parquet; None: do not write it."""
    synthetic: SyntheticConfig | None = None
    """Size and distributions of dataset `synthetic`; None: the defaults."""
    expand: str | None = None
    """NAME:UxI or NAME:UxI:RATE: dataset `synthetic` is a fractal expansion; see `preprocess.sources.fractal`."""
    custom: TabularConfig | None = None
    """Files and columns of dataset `custom`."""

    def __post_init__(self) -> None:
        check_record(self)
        if self.dataset not in DATASETS:
            raise ConfigError(f"unknown dataset {self.dataset!r}; known: {', '.join(DATASETS)}")
        parse_split(self.split)
        if parse_ids(self.ids) and self.vocabulary is not None:
            raise ConfigError(
                f"ids {self.ids!r} and vocabulary {self.vocabulary} both define the ids; give one of them"
            )
        if parse_unknown(self.unknown) and self.vocabulary is None:
            raise ConfigError(f"unknown {self.unknown!r} has no effect without vocabulary; give both")
        if self.append and (self.dataset != CUSTOM or self.vocabulary is not None):
            raise ConfigError(f"append is for dataset {CUSTOM!r} without vocabulary; leave it out")
        if self.expand is not None:
            parse_expansion(self.expand)
        if not 0 <= self.seed < 2**62:
            raise ConfigError(f"seed must be between 0 and 2^62 - 1, got {self.seed}")
        if any("\ud800" <= character <= "\udfff" for character in str(self.out)):  # how Python keeps other bytes
            raise ConfigError(f"the name of the folder {self.out} is not UTF-8; choose another name")
        if is_url(self.raw_dir):
            raise ConfigError(f"raw_dir {self.raw_dir} is a URL; choose a folder of this host")
        if self.ray_address is not None and self.engine != "ray":
            raise ConfigError(f"ray_address {self.ray_address!r} has no effect without engine='ray'; give both")
        if self.ray_address is not None and self.memory_limit is not None:
            raise ConfigError(
                f"memory_limit {self.memory_limit} is of this machine, not of a Ray cluster; leave it out"
            )
