"""`PreprocessConfig`: what to preprocess, how, and where to write it. Imports nothing heavy."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from evenrank.core.errors import ConfigError
from evenrank.core.rules import AllBut, AppliesTo, Bounds, Needs, OneOf, Option, Parsed, Where
from evenrank.core.settings import Settings
from evenrank.core.storage import is_url
from evenrank.preprocess.log_config import TabularConfig
from evenrank.preprocess.options import EngineName, Filters, OnError, RequestRule, SyntheticConfig
from evenrank.preprocess.read.public import CUSTOM, DATASETS, SYNTHETIC


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessConfig(Settings):
    """What to preprocess, how, and where to write it."""

    dataset: Annotated[str, OneOf(DATASETS), Option("NAME", panel="Dataset")]
    """One of `DATASETS`."""
    out: Annotated[Path | str, Option("FOLDER")]
    """Folder or URL of the new dataset, which replaces an existing one."""
    overwrite: bool = False
    """Replace a folder that contains something else than a dataset."""
    append: Annotated[bool, AppliesTo(dataset=(CUSTOM,)), AppliesTo(vocabulary=(None,))] = False
    """Add the events, which are later ones, to the dataset at `out`, which becomes as if all were preprocessed at once,
    with the rules of ids and the ids of features that it has; its log is not read again. Repeat the other options by
    which it was made. Files that it has already change nothing."""
    raw_dir: Annotated[
        Path, Option("FOLDER"), AppliesTo(dataset=AllBut((SYNTHETIC, CUSTOM)), expand=AllBut((None,)))
    ] = Path("raw")
    """Folder of the raw files of public datasets, laid out as their archives unpack (FOLDER/ml-20m/ratings.csv), or of
    the official archives. Missing files are downloaded into it."""
    on_error: Annotated[OnError, AppliesTo(dataset=AllBut((SYNTHETIC,)), expand=AllBut((None,)))] = "fail"
    """What to do about rows that cannot be read: `fail`, or `skip` and count them."""
    rejects: Annotated[bool, AppliesTo(on_error=("skip",))] = False
    """Also write these rows to rejects.csv, with file, line, reason and text."""
    engine: EngineName = "local"
    """Where the work is done: `local`, on threads of this process; `ray`, on the nodes of a Ray cluster. What is
    written is the same. A run that was killed goes on where it was when it is started again."""
    ray_address: Annotated[str | None, Option("ADDRESS"), AppliesTo(engine=("ray",))] = None
    """Of a running Ray cluster, such as `auto`. None: one of this machine is started and ended."""
    memory_limit: Annotated[
        float | None, Bounds(above=0, below=1_000_000), Option("GB"), AppliesTo(ray_address=(None,), engine=("local",))
    ] = None
    """Memory of all processes together, in GB, which is kept to by fewer threads or processes than there are cores; an
    error says what is needed at least. None: half of what is free, as far as that is possible."""
    split: Annotated[
        str,
        Parsed("evenrank.preprocess.build.splits:parse_split"),
        Option("RULE", panel="Splits and filters", paths="(?<=^file:).+"),
    ] = "user:0.3"
    """What goes to eval: `user:FRACTION`, that fraction of the users; `leave-last:N`, the last N events of each user;
    `time:2015`, `time:2015-01-06`, `time:1420070400` or ISO 8601, the events from that time on; `time:last:7d` (or h,
    w), those of the last 7 days; `file:PATH`, the users in a text file (.txt) or in a table with the log's column of
    users, or the events of a second log; or `none`."""
    seed: Annotated[
        int,
        Bounds(at_least=0, below=1 << 62),
        Option("NUMBER"),
        AppliesTo(split=Where("user:FRACTION", lambda split: split.startswith("user:")), dataset=(SYNTHETIC,)),
    ] = 0
    """Seed of the split by user and of synthetic data."""
    allow_empty: bool = False
    """Accept a log that begins or ends in 1970, and an empty train or eval with `time:` and `file:`."""
    filters: Filters = field(default_factory=Filters)
    requests: RequestRule | None = None
    """Rule for requests.parquet. None: do not write it."""
    ids: Annotated[
        str,
        Parsed("evenrank.preprocess.options:parse_ids"),
        AppliesTo(vocabulary=(None,)),
        Option("RULE", panel="Ids", completions=lambda: ("auto", "dense", "keep")),
    ] = ""
    """Ids of users and items: `dense`, numbered by first appearance, with a vocabulary; `keep`, the integers of the
    log; `hash:N`, a hash below N; `auto`, `dense` or `keep` by their range. For both, or `item=RULE,user=RULE`.
    Default: `dense` for public datasets, `auto` for custom ones, else `keep`."""
    vocabulary: Annotated[Path | None, Option("FOLDER")] = None
    """Earlier dataset, also at a URL, whose ids are kept, for a later log. None: ids begin anew."""
    unknown: Annotated[
        str,
        Parsed("evenrank.preprocess.options:parse_unknown"),
        Needs("vocabulary"),
        Option("RULE", completions=lambda: ("append", "oov", "drop", "fail")),
    ] = ""
    """What to do about values that `vocabulary` lacks: `append` them to it (the default); `oov`, give them the id 0;
    `drop` their events; or `fail`. For both, or `item=RULE,user=RULE`."""
    custom: Annotated[TabularConfig | None, AppliesTo(dataset=(CUSTOM,))] = None
    """Files and columns of dataset `custom`."""
    synthetic: Annotated[SyntheticConfig | None, AppliesTo(dataset=(SYNTHETIC,)), AppliesTo(expand=(None,))] = None
    """Size and distributions of dataset `synthetic`. None: the defaults."""
    expand: Annotated[
        str | None,
        Parsed("evenrank.preprocess.read.synthetic:parse_expansion"),
        Option("NAME:UxI[:RATE]"),
        AppliesTo(dataset=(SYNTHETIC,)),
    ] = None
    """In place of synthetic data, MovieLens with U times the users and I times the items, by fractal expansion."""

    def _check(self) -> None:
        if any("\ud800" <= character <= "\udfff" for character in str(self.out)):  # how Python keeps other bytes
            raise ConfigError(f"the name of the folder {self.out} is not UTF-8; choose another name")
        if is_url(self.raw_dir):
            raise ConfigError(f"raw_dir {self.raw_dir} is a URL; choose a folder of this host")
