"""The whole job: raw files -> interactions -> buckets -> sequences -> splits -> a folder of Parquet files."""

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import get_args

import numpy as np
import pyarrow.parquet as pq

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.storage import Remote, is_url, locate
from evenrank.datasets.event_statistics import Statistics
from evenrank.datasets.schema import (
    ACTION,
    EVENT_DTYPES,
    ITEM_ID,
    NUM_TARGETS,
    SCHEMA_VERSION,
    USER_ID,
    WINDOW,
    IdKind,
    Manifest,
    Split,
    content_hash,
)
from evenrank.preprocess.build.buckets import Buckets, Columns, OnError, fill_buckets
from evenrank.preprocess.build.count_events import EventCounter
from evenrank.preprocess.build.filters import Filters, cut_windows, k_core, keep_lengths
from evenrank.preprocess.build.ids import AUTO, DENSE, KEEP, Ids, parse_ids, parse_unknown
from evenrank.preprocess.build.inference_requests import REQUEST_SCHEMA, RequestRule, request_table
from evenrank.preprocess.build.key_table import TextValues
from evenrank.preprocess.build.sequences import Sequences, build_sequences
from evenrank.preprocess.build.splits import (
    EVAL,
    IN_EVAL,
    SplitFacts,
    SplitRule,
    by_second_log,
    parse_split,
    read_listed_users,
    second_log,
)
from evenrank.preprocess.build.vocabulary import EarlierIds, drop_unknown, number_ids, read_earlier
from evenrank.preprocess.files.fetch import Copies, copies_in
from evenrank.preprocess.files.raw_values import TextIdsError
from evenrank.preprocess.files.times import check_era, utc_text
from evenrank.preprocess.log_config import TabularConfig
from evenrank.preprocess.output.replace import REQUESTS_NAME, replace_folder, wrap_write_errors
from evenrank.preprocess.output.upload import replace_remote
from evenrank.preprocess.output.writer import SplitWriter, write_item_features
from evenrank.preprocess.sources.catalog import CATALOG, CUSTOM, DATASETS, SYNTHETIC
from evenrank.preprocess.sources.custom import read_tabular
from evenrank.preprocess.sources.download import ensure_raw_files, source_files
from evenrank.preprocess.sources.features import FeatureLookup, look_up_items
from evenrank.preprocess.sources.fractal import expand_interactions, parse_expansion
from evenrank.preprocess.sources.interactions import Interactions, number_features
from evenrank.preprocess.sources.synthetic import SyntheticConfig, draw_interactions


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessConfig:
    """What to preprocess, how, and where to write it."""

    dataset: str
    """One of `DATASETS`."""
    out: Path | str
    """Folder or URL of the new dataset, which replaces an existing one."""
    overwrite: bool = False
    """Whether to replace a folder that contains something else than a dataset."""
    raw_dir: Path = Path("raw")
    """Folder with a folder or an archive of raw files per public dataset. Missing ones are downloaded into it."""
    split: str = "user:0.3"
    """`user:FRACTION`, `leave-last:N`, `time:TIME`, `time:last:DURATION`, `file:PATH` or `none`; see
    `evenrank.preprocess.build.splits`."""
    allow_empty: bool = False
    """Whether a split by time or file may leave train or eval without rows, and a log may end in 1970."""
    seed: int = 0
    """Seed of the split by user and of synthetic data, 0 to 2^62 - 1."""
    ids: str = ""
    """Rules for the ids of users and items, such as `dense` or `item=dense,user=keep`; see
    `evenrank.preprocess.build.ids`. Default: `auto` for custom logs, `dense` for public datasets, else `keep`."""
    vocabulary: Path | None = None
    """An earlier dataset, whose ids are kept, also at a URL; None: ids begin anew."""
    unknown: str = ""
    """What to do about values that the vocabulary lacks, such as `drop` or `item=oov,user=append`: number them after
    the known ones (`append`, the default), give all of them the id 0 (`oov`), leave out their events, or `fail`."""
    filters: Filters = field(default_factory=Filters)
    on_error: OnError = "fail"
    """What to do about rows that cannot be read: raise an error, or skip and count them."""
    requests: RequestRule | None = None
    """Rule for requests.parquet; None: do not write it."""
    synthetic: SyntheticConfig | None = None
    """Size and distributions of dataset `synthetic`; None: the defaults."""
    expand: str | None = None
    """NAME:UxI or NAME:UxI:RATE: dataset `synthetic` is a fractal expansion; see `preprocess.sources.fractal`."""
    custom: TabularConfig | None = None
    """Files and columns of dataset `custom`."""

    def __post_init__(self) -> None:
        if self.dataset not in DATASETS:
            raise ConfigError(f"unknown dataset {self.dataset!r}; known: {', '.join(DATASETS)}")
        parse_split(self.split)
        if parse_ids(self.ids) and self.vocabulary is not None:
            raise ConfigError(
                f"ids {self.ids!r} and vocabulary {self.vocabulary} both define the ids; give one of them"
            )
        if parse_unknown(self.unknown) and self.vocabulary is None:
            raise ConfigError(f"unknown {self.unknown!r} has no effect without vocabulary; give both")
        if self.expand is not None:
            parse_expansion(self.expand)
        if not 0 <= self.seed < 2**62:
            raise ConfigError(f"seed must be between 0 and 2^62 - 1, got {self.seed}")
        if any("\ud800" <= character <= "\udfff" for character in str(self.out)):  # how Python keeps other bytes
            raise ConfigError(f"the name of the folder {self.out} is not UTF-8; choose another name")
        if is_url(self.raw_dir):
            raise ConfigError(f"raw_dir {self.raw_dir} is a URL; choose a folder of this host")
        if self.on_error not in get_args(OnError):
            raise ConfigError(f"on_error must be one of {', '.join(get_args(OnError))}, got {self.on_error!r}")


def preprocess(
    config: PreprocessConfig, *, on_stage: Callable[[str], None] = lambda stage: None, show_progress: bool = False
) -> Manifest:
    """Write a dataset to a folder or URL and return its manifest.

    Args:
        config: the dataset, its options and its folder.
        on_stage: called with a short description of the progress.
        show_progress: whether to show a progress bar of downloads on standard error.

    Raises:
        ConfigError, DataError: the message is one line with the cause and the remedy; `config.out` is unchanged.
    """
    out = locate(config.out)

    def write(folder: Path) -> Manifest:
        with copies_in(folder / ".inputs", on_stage) as copies:
            return _write(folder, _with_copies(config, copies), out, copies, show_progress=show_progress)

    if isinstance(out, Remote):
        return replace_remote(out, write, overwrite=config.overwrite, on_stage=on_stage)
    return replace_folder(out, write, overwrite=config.overwrite)


def _with_copies(config: PreprocessConfig, copies: Copies) -> PreprocessConfig:
    """Return the settings with paths of copies in place of URLs of input."""
    custom, listed = config.custom, parse_split(config.split).file
    if custom is not None:
        custom = replace(
            custom,
            events=tuple(map(copies.path_of, custom.events)),
            context=custom.context and copies.path_of(custom.context),
            item_features=custom.item_features and copies.path_of(custom.item_features),
        )
    return replace(
        config,
        custom=custom,
        split=f"file:{copies.path_of(listed)}" if listed is not None and is_url(listed) else config.split,
        vocabulary=config.vocabulary and copies.vocabularies_of(config.vocabulary),
    )


def _write(
    folder: Path, config: PreprocessConfig, out: Path | Remote, copies: Copies, *, show_progress: bool
) -> Manifest:
    earlier = {} if config.vocabulary is None else read_earlier(config.vocabulary, parse_unknown(config.unknown))
    known: dict[str, IdKind] = {name: ids.summary.kind for name, ids in earlier.items()}
    rules = _id_rules(config) | {name: ids.summary.rule for name, ids in earlier.items()}
    on_stage = copies.show_stage
    while True:
        on_stage(f"opening {config.dataset}")
        opened = open_source(config, rules=rules, known=known, show_progress=show_progress)
        source = number_features(opened, config.vocabulary)
        _check_out(config, source, out, copies.fetched)
        try:
            with wrap_write_errors(out if isinstance(out, Path) else folder):
                job = _Job(folder=folder, config=config, source=source, rules=rules, earlier=earlier, on_stage=on_stage)
                return job.run()
        except TextIdsError as error:  # columns that began with integers
            known |= dict.fromkeys(error.args, "text")


def _check_out(
    config: PreprocessConfig, interactions: Interactions, out: Path | Remote, fetched: Sequence[Remote]
) -> None:
    """Raise a ConfigError if replacing the output would remove what is read."""
    inputs = [Path(part.name) for part in interactions.parts if config.dataset != SYNTHETIC]
    inputs += [config.raw_dir] if config.expand is not None else []
    inputs += filter(None, [parse_split(config.split).file])
    inputs += [file.path for file in config.custom.feature_files.values()] if config.custom is not None else []
    replaced: Sequence[Path | Remote] = [file for file in fetched if f"{file}".startswith(f"{out}/")]
    if isinstance(out, Path):
        replaced = [path for path in inputs if path.resolve().is_relative_to(out.resolve())]
    if replaced:
        raise ConfigError(f"{replaced[0]} is read, and is in {out}, which would be replaced; choose another folder")


def _id_rules(config: PreprocessConfig) -> dict[str, str]:
    default = AUTO if config.dataset == CUSTOM else DENSE if config.dataset in CATALOG or config.expand else KEEP
    return {USER_ID: default, ITEM_ID: default} | parse_ids(config.ids)


def open_source(
    config: PreprocessConfig,
    *,
    rules: Mapping[str, str],
    known: Mapping[str, IdKind] = MappingProxyType({}),
    show_progress: bool = False,
) -> Interactions:
    """Open the raw files of a dataset, which are downloaded if they are missing; events are read lazily.

    `rules` are those of the ids; `known` are types of ids of a custom log that its first rows do not decide.
    """
    if config.dataset == SYNTHETIC and config.expand is not None:
        expansion = parse_expansion(config.expand)
        base = replace(config, dataset=expansion.base, split="none")
        return expand_interactions(
            open_source(base, rules=rules, show_progress=show_progress), expansion, seed=config.seed
        )
    if config.dataset == SYNTHETIC:
        return draw_interactions(config.synthetic or SyntheticConfig(), seed=config.seed)
    log = config.custom
    if config.dataset in CATALOG:
        public = CATALOG[config.dataset]
        log = public.log_in(ensure_raw_files(public, config.raw_dir, show_progress=show_progress))
        known = {USER_ID: "int64", ITEM_ID: "int64"}
    if log is None:
        raise ConfigError("dataset 'custom' has no description; set `custom` to a TabularConfig")
    return _read_logs(log, parse_split(config.split).file, rules, known)


def _read_logs(
    log: TabularConfig, second: Path | None, rules: Mapping[str, str], known: Mapping[str, IdKind]
) -> Interactions:
    """Open a log and, if the file of the split is a log too, that one, whose events have a mark."""
    if second is None or not (files := second_log(second, log)):
        return read_tabular(log, rules, known)
    interactions = read_tabular(replace(log, events=(*log.events, second)), rules, known)
    num_first = len(interactions.parts) - len(files)
    parts = [
        replace(part, expand=partial(_mark_log, in_eval=index >= num_first))
        for index, part in enumerate(interactions.parts)
    ]
    return replace(interactions, parts=parts, has_eval_log=True)


def _mark_log(events: Columns, in_eval: bool) -> list[Columns]:
    return [events | {IN_EVAL: np.full(len(events[USER_ID]), in_eval, dtype=np.int32)}]


@dataclass(kw_only=True, slots=True)
class _Job:
    """Writes all files of a dataset to an empty folder."""

    folder: Path
    config: PreprocessConfig
    source: Interactions
    rules: Mapping[str, str]  # of the ids
    earlier: Mapping[str, EarlierIds]
    on_stage: Callable[[str], None]
    counts: dict[str, int] = field(default_factory=dict)  # of events and users, by what became of them

    def run(self) -> Manifest:
        """Write all files, and return the manifest."""
        config, source = self.config, self.source
        rule, eval_users, num_listed = parse_split(config.split), np.empty(0, dtype=np.int64), 0
        dtypes = {USER_ID: "int64", **EVENT_DTYPES, **source.extra_events}
        if source.has_eval_log:
            rule, dtypes[IN_EVAL] = by_second_log(rule), "int32"
        elif rule.file is not None:
            column = str(source.options.get("user_column", USER_ID))
            eval_users, num_listed = read_listed_users(rule.file, column, source.id_kinds[USER_ID])
        (work := self.folder / ".work").mkdir()
        buckets = Buckets(work / "buckets", sum(part.num_events for part in source.parts), dtypes)
        texts = {
            name: TextValues(work / f"texts of {name}", buckets.num_bits)
            for name, kind in source.id_kinds.items()
            if kind == "text"
        }
        # The raw files are read a second time for their checksums, concurrently with the pass that parses them.
        with ThreadPoolExecutor(1) as background, contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, work, ignore_errors=True)
            pending_sources = background.submit(source.sources)
            has_times = source.time_unit != "row"
            self.counts, first_ms, ends = fill_buckets(
                buckets, source.parts, texts, has_times=has_times, on_error=config.on_error, on_stage=self.on_stage
            )
            if not config.allow_empty:
                check_era(ends, source.time_unit)
            self.counts["events of unknown users or items (dropped)"] = drop_unknown(buckets, self.earlier)
            self.counts["events left out by the k-core"] = k_core(buckets, config.filters)
            self.on_stage("numbering users and items")
            number = partial(number_ids, buckets=buckets, folder=self.folder, work=work)
            raw_ids = [
                (name, self.rules[name], kind, texts.get(name), self.earlier.get(name))
                for name, kind in source.id_kinds.items()
            ]
            with ThreadPoolExecutor(2) as both:
                ids = dict(zip(source.id_kinds, both.map(number, *zip(*raw_ids, strict=True)), strict=True))
            items = look_up_items(source.item_features, ids[ITEM_ID], as_table=source.has_item_table)
            facts = SplitFacts(seed=config.seed, last_ms=max(ends.values()), eval_users=eval_users)
            splits, largest, statistics = self._write_splits(rule, facts, buckets, ids, items)
            self.counts["listed users without events"] = max(0, num_listed - statistics.eval_users)
            item_table = write_item_features(self.folder, source, ids[ITEM_ID], items.requested)
            sources = pending_sources.result()
        time = {"unit": source.time_unit, "first": utc_text(first_ms), "last": utc_text(max(ends.values()))}
        empty = [name for name, split in splits.items() if not split.rows]
        if empty and rule.remedy is not None and not config.allow_empty:
            raise DataError(
                f"--split {config.split} leaves {empty[0]} without rows, of events from {time['first']} to "
                f"{time['last']}{self._losses()}; {rule.remedy}, or pass --allow-empty"
            )
        if rule.file is not None and not source.has_eval_log:
            sources += source_files(rule.file.parent, [rule.file])
        default = asdict(Filters())
        labels = {**source.context.values, **source.item_features.values}
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            dataset=config.dataset,
            sources=sources,
            options={
                **source.options,
                "split": _shown_split(config.split, rule),
                "seed": config.seed,
                "on_error": config.on_error,
                "unknown": config.unknown,
                "filters": {name: value for name, value in asdict(config.filters).items() if value != default[name]},
                "requests": None if config.requests is None else asdict(config.requests),
                "time": time,
                "audit": {description: count for description, count in self.counts.items() if count},
                "statistics": asdict(statistics),
            },
            splits=splits,
            contextual=source.context.dtypes,
            extra_events={**source.extra_events, **items.dtypes},
            vocabulary_sizes={
                **{name: of_column.size or largest[name] + 1 for name, of_column in ids.items()},
                ACTION: source.num_actions or largest[ACTION] + 1,
                **{name: len(values) + 1 for name, values in labels.items()},
            },
            context_labels={name: (None, *map(str, values)) for name, values in source.context.values.items()},
            ids={
                name: replace(of_column.summary, largest=largest[name]) if of_column.size is None else of_column.summary
                for name, of_column in ids.items()
            },
            content_hash="",
            item_features=item_table,
        )
        manifest = replace(manifest, content_hash=content_hash(manifest))
        manifest.write(self.folder)
        return manifest

    def _write_splits(
        self, rule: SplitRule, facts: SplitFacts, buckets: Buckets, ids: Mapping[str, Ids], items: FeatureLookup
    ) -> tuple[dict[str, Split], dict[str, int], Statistics]:
        """Write all splits, and the requests if there is a rule for them.

        Return the splits, the largest user_id, item_id and action in them, and the statistics of their events.
        """
        config, filters = self.config, self.config.filters
        context = FeatureLookup(self.source.context, of="users")
        event_types = {**self.source.extra_events, **items.dtypes}
        statistics = EventCounter(_shown_split(config.split, rule), rule.by, ids[ITEM_ID].size, filters.overlap)
        writers: dict[str, SplitWriter] = {}
        num_duplicates = num_left_out = 0
        with contextlib.ExitStack() as stack:
            if config.requests is not None:
                path = self.folder / REQUESTS_NAME
                requests = stack.enter_context(pq.ParquetWriter(path, REQUEST_SCHEMA, compression="zstd"))
            # The next bucket is built while the current one is written.
            background = stack.enter_context(ThreadPoolExecutor(1))
            next_bucket = background.submit(_build_bucket, buckets, 0, ids, items)
            for index in range(len(buckets)):
                self.on_stage(f"building sequences, part {index + 1} of {len(buckets)}")
                all_users, duplicates = next_bucket.result()
                if index + 1 < len(buckets):
                    next_bucket = background.submit(_build_bucket, buckets, index + 1, ids, items)
                sequences = keep_lengths(all_users, filters)
                num_duplicates += duplicates
                num_left_out += len(all_users) - len(sequences)
                if config.requests is not None:
                    requests.write_table(request_table(sequences, config.requests))
                divided = rule.divide(sequences, facts)
                statistics.follow(sequences, divided)
                for name, rows in divided.items():
                    if name not in writers:
                        counted = [WINDOW] * (filters.window is not None)
                        counted += [NUM_TARGETS] * (name == EVAL and rule.has_targets)
                        columns = {**dict.fromkeys(counted, "int32"), **context.dtypes}
                        writers[name] = SplitWriter(self.folder, name, columns, event_types)
                        stack.callback(writers[name].abandon)
                    # Windows would separate targets from the events before them, so rows with targets are not cut.
                    rows = rows if rows.num_targets.any() else cut_windows(rows, filters)
                    writers[name].append(rows, context.lookup(rows.user_keys))
            splits = {name: writer.close() for name, writer in writers.items()}
        self.counts |= {"duplicate events (kept)": num_duplicates, "users left out by filters": num_left_out}
        if not any(split.rows for split in splits.values()):
            raise DataError(f"no users are left{self._losses()}; relax the filters, or the rule for unknown values")
        self.counts |= context.audit() | items.audit()
        names = (USER_ID, ITEM_ID, ACTION)
        largest = {name: max(writer.largest[name] for writer in writers.values()) for name in names}
        return splits, largest, statistics.report(self.folder)

    def _losses(self) -> str:
        return "".join(f"; {count:,} {what}" for what, count in self.counts.items() if count and "(kept)" not in what)


def _shown_split(split: str, rule: SplitRule) -> str:
    """Return the rule of a split for the manifest, which is the same wherever a file is."""
    return split if rule.file is None else f"file:{rule.file.name}"


def _build_bucket(buckets: Buckets, index: int, ids: Mapping[str, Ids], items: FeatureLookup) -> tuple[Sequences, int]:
    columns = buckets.read(index)
    sequences, num_duplicates = build_sequences(columns, ids[USER_ID].encode)
    features = {column.name: column.to_numpy() for column in items.lookup(columns[ITEM_ID]).iter_columns()}
    events = {**sequences.events, ITEM_ID: ids[ITEM_ID].encode(columns[ITEM_ID]), **features}
    return replace(sequences, events=events), num_duplicates
