"""The whole job: raw files -> interactions -> buckets -> sequences -> splits -> a folder of Parquet."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.schema import (
    ACTION,
    EVENT_DTYPES,
    ITEM_ID,
    NUM_TARGETS,
    SCHEMA_VERSION,
    USER_ID,
    Manifest,
    SourceFile,
    Split,
    content_hash,
)
from evenrank.preprocess.build.audit import Audit
from evenrank.preprocess.build.buckets import Buckets
from evenrank.preprocess.build.filters import Filters, cut_windows, k_core, keep_lengths
from evenrank.preprocess.build.reading import FAIL, SKIP, fill_buckets
from evenrank.preprocess.build.requests import RequestRule, RequestWriter
from evenrank.preprocess.build.sequences import Sequences, build_sequences
from evenrank.preprocess.build.splits import EVAL, parse_split
from evenrank.preprocess.output.atomic_folder import REQUESTS_NAME, os_errors, replacing_folder
from evenrank.preprocess.output.writer import WINDOW, SplitWriter
from evenrank.preprocess.sources.context import ContextLookup
from evenrank.preprocess.sources.interactions import Interactions
from evenrank.preprocess.sources.registry import DATASETS, read_source
from evenrank.preprocess.sources.synthetic import SyntheticConfig
from evenrank.preprocess.sources.tabular_config import TabularConfig
from evenrank.preprocess.sources.vocabulary import write_vocabularies

# A row of the densest log that we know of, MovieLens, has 27 bytes; a few buckets too many cost little.
_BYTES_PER_EVENT = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessConfig:
    """What to make, from where, into which folder."""

    dataset: str  # one of DATASETS
    out: Path  # becomes the dataset's folder; an older dataset there is replaced
    raw_dir: Path = Path("raw")  # holds a folder or an archive per public dataset; downloads go there
    split: str = "user:0.3"  # see `evenrank.preprocess.build.splits`
    seed: int = 0  # of the split, and of synthetic data
    filters: Filters = field(default_factory=Filters)
    on_error: str = FAIL  # or `skip`: rows that cannot be read are left out, and counted
    requests: RequestRule | None = None  # also write requests.parquet
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    custom: TabularConfig | None = None  # the files and columns of dataset `custom`

    def __post_init__(self) -> None:
        if self.dataset not in DATASETS:
            raise ConfigError(f"no dataset is called {self.dataset!r}; there are {', '.join(DATASETS)}")
        parse_split(self.split)
        if not 0 <= self.seed < 2**62:
            raise ConfigError(f"seed must lie in 0..2^62-1, got {self.seed}")
        if self.on_error not in (FAIL, SKIP):
            raise ConfigError(f"on_error must be {FAIL} or {SKIP}, got {self.on_error!r}")


def preprocess(
    config: PreprocessConfig, *, on_stage: Callable[[str], None] = lambda stage: None, show_progress: bool = False
) -> Manifest:
    """Make the dataset's folder and return its manifest.

    Args:
        config: what to make.
        on_stage: called with a few words as the work goes on.
        show_progress: show a bar for a download on standard error.

    Raises:
        ConfigError, DataError: with one line that says what is wrong and what to do; `config.out` is as it was before.

    """
    with replacing_folder(config.out) as folder:
        on_stage(f"opening {config.dataset}")
        interactions = read_source(
            config.dataset,
            raw_dir=config.raw_dir,
            synthetic=config.synthetic,
            custom=config.custom,
            seed=config.seed,
            show_progress=show_progress,
        )
        with os_errors(config.out):
            manifest = _make(folder, config, interactions, on_stage)
    return manifest


def _make(
    folder: Path, config: PreprocessConfig, interactions: Interactions, on_stage: Callable[[str], None]
) -> Manifest:
    """Fill a new folder."""
    write_vocabularies(interactions.vocabularies, folder)
    size = sum(part.size for part in interactions.parts)
    dtypes = {USER_ID: "int64", **EVENT_DTYPES, **interactions.extra_events}
    buckets = Buckets(folder / ".buckets", size // _BYTES_PER_EVENT, dtypes)
    # The checksums of raw files are another pass over them, beside the one that reads them.
    with ThreadPoolExecutor(1) as beside, contextlib.closing(buckets):
        sources = beside.submit(interactions.sources)
        left_out = fill_buckets(buckets, interactions, on_error=config.on_error, on_stage=on_stage)
        manifest = _Building(folder, config, interactions, left_out).run(buckets, sources.result, on_stage)
    manifest.write(folder)
    return manifest


class _Building:
    """Buckets -> the files of the folder, and what there is to say of them."""

    def __init__(
        self, folder: Path, config: PreprocessConfig, interactions: Interactions, left_out: Mapping[str, int]
    ) -> None:
        self._folder = folder
        self._config = config
        self._interactions = interactions
        self._context = ContextLookup(interactions.context)
        self._rule = parse_split(config.split)
        self._writers: dict[str, SplitWriter] = {}
        self._audit = Audit()
        self._counts = {**left_out, "duplicate events (kept)": 0, "users left out by filters": 0}

    def run(
        self, buckets: Buckets, sources: Callable[[], tuple[SourceFile, ...]], on_stage: Callable[[str], None]
    ) -> Manifest:
        """Write all splits, and the requests if they are asked for; return the manifest."""
        requests = None
        try:
            if self._config.requests is not None:
                requests = RequestWriter(self._folder / REQUESTS_NAME, self._config.requests)
            kept = k_core(buckets, self._config.filters)
            if kept is not None:
                self._counts["events left out by the k-core"] = sum(int(np.count_nonzero(~mask)) for mask in kept)
            # The next bucket is built while this one is written.
            with ThreadPoolExecutor(1) as ahead:
                waiting = ahead.submit(_build, buckets, 0, kept)
                for number in range(len(buckets)):
                    on_stage(f"building sequences, part {number + 1} of {len(buckets)}")
                    built = waiting.result()
                    if number + 1 < len(buckets):
                        waiting = ahead.submit(_build, buckets, number + 1, kept)
                    self._add(*built, requests)
            splits = {name: writer.close() for name, writer in self._writers.items()}
        finally:
            for writer in self._writers.values():
                writer.abandon()
            if requests is not None:
                requests.close()
        if not any(split.rows for split in splits.values()):
            raise DataError("the filters leave no user; relax them")
        if missing := self._context.count_unseen():
            self._counts["users with features but no event (left out)"] = missing
        self._counts |= self._audit.report(self._folder, splits)
        return self._manifest(splits, sources())

    def _add(self, everybody: Sequences, duplicates: int, requests: RequestWriter | None) -> None:
        sequences = keep_lengths(everybody, self._config.filters)
        self._counts["duplicate events (kept)"] += duplicates
        self._counts["users left out by filters"] += len(everybody) - len(sequences)
        if requests is not None:
            requests.append(sequences)
        for name, rows in self._rule.divide(sequences, self._config.seed).items():
            # A window would cut targets off from what comes before them, so rows that have targets stay whole.
            rows = rows if rows.num_targets.any() else cut_windows(rows, self._config.filters)
            self._audit.follow(name, rows)
            self._writer(name).append(rows, self._context.of(rows.user_ids))

    def _writer(self, name: str) -> SplitWriter:
        if name not in self._writers:
            self._writers[name] = SplitWriter(
                self._folder,
                name,
                contextual=self._context.names,
                extra_events=self._interactions.extra_events,
                row_columns=[
                    *([WINDOW] if self._config.filters.window is not None else []),
                    *([NUM_TARGETS] if name == EVAL and self._rule.has_targets else []),
                ],
            )
        return self._writers[name]

    def _manifest(self, splits: Mapping[str, Split], sources: tuple[SourceFile, ...]) -> Manifest:
        labels = {} if self._interactions.context is None else self._interactions.context.labels
        largest = {
            name: max(writer.largest(name) for writer in self._writers.values()) for name in (USER_ID, ITEM_ID, ACTION)
        }
        vocabulary_sizes = {
            USER_ID: largest[USER_ID] + 1,
            ITEM_ID: largest[ITEM_ID] + 1,
            ACTION: self._interactions.num_actions or largest[ACTION] + 1,
            **{name: len(labels[name]) for name in self._context.names},
        }
        config = self._config
        filters = {
            entry.name: value
            for entry in fields(config.filters)
            if (value := getattr(config.filters, entry.name)) != entry.default
        }
        requests = None if config.requests is None else asdict(config.requests)
        return Manifest(
            schema_version=SCHEMA_VERSION,
            dataset=config.dataset,
            sources=sources,
            options={
                **self._interactions.options,
                "split": config.split,
                "seed": config.seed,
                "on_error": config.on_error,
                "filters": filters,
                "requests": requests,
                "audit": {words: count for words, count in self._counts.items() if count},
            },
            splits=splits,
            contextual=self._context.names,
            extra_events=self._interactions.extra_events,
            vocabulary_sizes=vocabulary_sizes,
            context_labels=labels,
            content_hash=content_hash(
                splits=splits,
                contextual=self._context.names,
                extra_events=self._interactions.extra_events,
                vocabulary_sizes=vocabulary_sizes,
            ),
        )


def _build(buckets: Buckets, number: int, kept: Sequence[NDArray[np.bool_]] | None) -> tuple[Sequences, int]:
    columns = buckets.read(number, buckets.names)
    if kept is not None:
        columns = {name: values[kept[number]] for name, values in columns.items()}
    return build_sequences(columns)
