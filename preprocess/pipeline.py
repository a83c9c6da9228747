"""The whole job: raw files -> interactions -> buckets -> sequences -> splits -> a folder of Parquet files."""

import contextlib
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from evenrank.core.errors import ConfigError, DataError
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
from evenrank.preprocess.build.buckets import Buckets, OnError, TextIdsError, fill_buckets
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
from evenrank.preprocess.build.vocabulary import EarlierIds, Masks, mask_unknown, number_ids, read_earlier
from evenrank.preprocess.files.times import check_era, utc_text
from evenrank.preprocess.log_config import TabularConfig
from evenrank.preprocess.output.replace import REQUESTS_NAME, replace_folder, wrap_write_errors
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
    out: Path
    """Folder of the new dataset, which replaces an existing one."""
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
    """An earlier dataset, whose ids are kept; None: ids begin anew."""
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
        if self.on_error not in get_args(OnError):
            raise ConfigError(f"on_error must be one of {', '.join(get_args(OnError))}, got {self.on_error!r}")


def preprocess(
    config: PreprocessConfig, *, on_stage: Callable[[str], None] = lambda stage: None, show_progress: bool = False
) -> Manifest:
    """Write the folder of a dataset and return its manifest.

    Args:
        config: the dataset, its options and its folder.
        on_stage: called with a short description of the progress.
        show_progress: whether to show a progress bar of downloads on standard error.

    Raises:
        ConfigError, DataError: the message is one line with the cause and the remedy; `config.out` is unchanged.
    """

    def write(folder: Path) -> Manifest:
        earlier = {} if config.vocabulary is None else read_earlier(config.vocabulary, parse_unknown(config.unknown))
        known: dict[str, IdKind] = {name: ids.summary.kind for name, ids in earlier.items()}
        rules = _id_rules(config) | {name: ids.summary.rule for name, ids in earlier.items()}
        while True:
            on_stage(f"opening {config.dataset}")
            opened = open_source(config, rules=rules, known=known, show_progress=show_progress)
            interactions = number_features(opened, config.vocabulary)
            _check_out(config, interactions)
            try:
                with wrap_write_errors(config.out):
                    return _write_dataset(folder, config, interactions, rules, earlier, on_stage)
            except TextIdsError as error:  # columns that began with integers
                known |= dict.fromkeys(error.columns, "text")

    return replace_folder(config.out, write, overwrite=config.overwrite)


def _check_out(config: PreprocessConfig, interactions: Interactions) -> None:
    """Raise a ConfigError if replacing the folder would remove what is read."""
    inputs = [Path(part.name) for part in interactions.parts if config.dataset != SYNTHETIC]
    inputs += [config.raw_dir] if config.expand is not None else []
    inputs += filter(None, [parse_split(config.split).file])
    inputs += [file.path for file in config.custom.feature_files.values()] if config.custom is not None else []
    for path in inputs:
        if path.resolve().is_relative_to(config.out.resolve()):
            raise ConfigError(f"{path} is read, and is in {config.out}, which would be replaced; choose another folder")


def _id_rules(config: PreprocessConfig) -> dict[str, str]:
    default = AUTO if config.dataset == CUSTOM else DENSE if config.dataset in CATALOG or config.expand else KEEP
    return {USER_ID: default, ITEM_ID: default} | parse_ids(config.ids)


def open_source(
    config: PreprocessConfig,
    *,
    rules: Mapping[str, str],
    known: Mapping[str, IdKind] | None = None,
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
        known = None
    if log is None:
        raise ConfigError("dataset 'custom' has no description; set `custom` to a TabularConfig")
    return _read_logs(log, parse_split(config.split).file, rules, known)


def _read_logs(
    log: TabularConfig, second: Path | None, rules: Mapping[str, str], known: Mapping[str, IdKind] | None
) -> Interactions:
    """Open a log and, if the file of the split is a log too, that one, whose events have a mark."""
    if second is None or not (files := second_log(second, log)):
        return read_tabular(log, rules, known)
    interactions = read_tabular(replace(log, events=(*log.events, second)), rules, known)
    marks = [0] * (len(interactions.parts) - len(files)) + [1] * len(files)
    parts = (
        replace(part, events=part.events.with_columns(pl.lit(mark, pl.Int32).alias(IN_EVAL)))
        for part, mark in zip(interactions.parts, marks, strict=True)
    )
    return replace(interactions, parts=tuple(parts), has_eval_log=True)


def _write_dataset(
    folder: Path,
    config: PreprocessConfig,
    interactions: Interactions,
    rules: Mapping[str, str],
    earlier: Mapping[str, EarlierIds],
    on_stage: Callable[[str], None],
) -> Manifest:
    """Write all files of a dataset to an empty folder."""
    rule, eval_users, num_listed = parse_split(config.split), np.empty(0, dtype=np.int64), 0
    dtypes = {USER_ID: "int64", **EVENT_DTYPES, **interactions.extra_events}
    if interactions.has_eval_log:
        rule, dtypes[IN_EVAL] = by_second_log(rule), "int32"
    elif rule.file is not None:
        column = str(interactions.options.get("user_column", USER_ID))
        eval_users, num_listed = read_listed_users(rule.file, column, interactions.id_kinds[USER_ID])
    num_events = sum(part.num_events for part in interactions.parts)
    (work := folder / ".work").mkdir()
    buckets = Buckets(work / "buckets", num_events, dtypes)
    texts = {
        name: TextValues(work / f"texts of {name}", buckets.num_bits)
        for name, kind in interactions.id_kinds.items()
        if kind == "text"
    }
    # The raw files are read a second time for their checksums, concurrently with the pass that parses them.
    with ThreadPoolExecutor(1) as background, contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        pending_sources = background.submit(interactions.sources)
        counts, first_ms, last_ms = fill_buckets(
            buckets,
            interactions.parts,
            texts,
            has_times=interactions.time_unit != "row",
            on_error=config.on_error,
            on_stage=on_stage,
        )
        if not config.allow_empty:
            check_era(last_ms, interactions.time_unit)
        facts = SplitFacts(seed=config.seed, last_ms=last_ms, eval_users=eval_users)
        time = {"unit": interactions.time_unit, "first": utc_text(first_ms), "last": utc_text(last_ms)}
        if (masks := mask_unknown(buckets, earlier)) is not None:
            counts["events of unknown users or items (dropped)"] = _count_masked(masks)
        num_unknown = _count_masked(masks)
        masks = k_core(buckets, config.filters, masks)
        if masks is not None and config.filters.has_k_core:
            counts["events left out by the k-core"] = _count_masked(masks) - num_unknown
        on_stage("numbering users and items")
        number = partial(number_ids, buckets=buckets, masks=masks, folder=folder, work=work)
        with ThreadPoolExecutor(2) as both:
            pending_ids = {
                name: both.submit(number, name, rules[name], kind, texts=texts.get(name), earlier=earlier.get(name))
                for name, kind in interactions.id_kinds.items()
            }
            ids = {name: pending.result() for name, pending in pending_ids.items()}
        items = look_up_items(interactions.item_features, ids[ITEM_ID], as_table=interactions.has_item_table)
        splits, largest, statistics = _write_splits(
            folder, config, rule, facts, interactions, buckets, masks, ids, items, counts, on_stage
        )
        counts["listed users without events"] = max(0, num_listed - statistics.eval_users)
        item_table = write_item_features(folder, interactions, ids[ITEM_ID], items.requested)
        empty = [name for name, split in splits.items() if not split.rows]
        if empty and rule.remedy is not None and not config.allow_empty:
            raise DataError(
                f"--split {config.split} leaves {empty[0]} without rows, of events from {time['first']} to "
                f"{time['last']}{_losses(counts)}; {rule.remedy}, or pass --allow-empty"
            )
        sources = pending_sources.result()
        if rule.file is not None and not interactions.has_eval_log:
            sources += source_files(rule.file.parent, [rule.file])
    labels = {name: (None, *map(str, values)) for name, values in interactions.context.values.items()}
    content: dict[str, Any] = {
        "splits": splits,
        "contextual": interactions.context.dtypes,
        "extra_events": {**interactions.extra_events, **items.dtypes},
        "vocabulary_sizes": {
            **{name: of_column.size or largest[name] + 1 for name, of_column in ids.items()},
            ACTION: interactions.num_actions or largest[ACTION] + 1,
            **{name: len(values) for name, values in labels.items()},
            **{name: len(values) + 1 for name, values in interactions.item_features.values.items()},
        },
        "item_features": item_table,
        "ids": {
            name: replace(of_column.summary, largest=largest[name]) if of_column.size is None else of_column.summary
            for name, of_column in ids.items()
        },
    }
    default = asdict(Filters())
    options = {
        **interactions.options,
        "split": config.split if rule.file is None else f"file:{rule.file.name}",
        "seed": config.seed,
        "on_error": config.on_error,
        "unknown": config.unknown,
        "filters": {name: value for name, value in asdict(config.filters).items() if value != default[name]},
        "requests": None if config.requests is None else asdict(config.requests),
        "time": time,
        "audit": {description: count for description, count in counts.items() if count},
        "statistics": asdict(statistics),
    }
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        dataset=config.dataset,
        sources=sources,
        options=options,
        context_labels=labels,
        content_hash=content_hash(**content),
        **content,
    )
    manifest.write(folder)
    return manifest


def _write_splits(
    folder: Path,
    config: PreprocessConfig,
    rule: SplitRule,
    facts: SplitFacts,
    interactions: Interactions,
    buckets: Buckets,
    masks: Masks | None,
    ids: Mapping[str, Ids],
    items: FeatureLookup,
    counts: dict[str, int],
    on_stage: Callable[[str], None],
) -> tuple[dict[str, Split], dict[str, int], Statistics]:
    """Write all splits, and the requests if there is a rule for them; add the effects of filters to `counts`.

    Return the splits, the largest user_id, item_id and action in them, and the statistics of their events.
    """
    context = FeatureLookup(interactions.context, of="users")
    statistics = EventCounter(config.split, rule.by, ids[ITEM_ID].size, config.filters.overlap)
    writers: dict[str, SplitWriter] = {}
    counts |= {"duplicate events (kept)": 0, "users left out by filters": 0}
    with contextlib.ExitStack() as stack:
        if config.requests is not None:
            requests = stack.enter_context(pq.ParquetWriter(folder / REQUESTS_NAME, REQUEST_SCHEMA, compression="zstd"))
        # The next bucket is built while the current one is written.
        background = stack.enter_context(ThreadPoolExecutor(1))
        build = partial(_build_bucket, buckets, masks=masks, ids=ids, items=items)
        next_bucket = background.submit(build, 0)
        for index in range(len(buckets)):
            on_stage(f"building sequences, part {index + 1} of {len(buckets)}")
            all_users, num_duplicates = next_bucket.result()
            if index + 1 < len(buckets):
                next_bucket = background.submit(build, index + 1)
            sequences = keep_lengths(all_users, config.filters)
            counts["duplicate events (kept)"] += num_duplicates
            counts["users left out by filters"] += len(all_users) - len(sequences)
            if config.requests is not None:
                requests.write_table(request_table(sequences, config.requests))
            divided = rule.divide(sequences, facts)
            statistics.follow(sequences, divided)
            for name, rows in divided.items():
                if name not in writers:
                    counted = [WINDOW] * (config.filters.window is not None)
                    counted += [NUM_TARGETS] * (name == EVAL and rule.has_targets)
                    columns = {**dict.fromkeys(counted, "int32"), **context.dtypes}
                    writers[name] = SplitWriter(folder, name, columns, {**interactions.extra_events, **items.dtypes})
                    stack.callback(writers[name].abandon)
                # Windows would separate targets from the events before them, so rows with targets are not cut.
                rows = rows if rows.num_targets.any() else cut_windows(rows, config.filters)
                writers[name].append(rows, context.lookup(rows.user_keys))
        splits = {name: writer.close() for name, writer in writers.items()}
    if not any(split.rows for split in splits.values()):
        raise DataError(f"no users are left{_losses(counts)}; relax the filters, or the rule for unknown values")
    counts |= context.audit() | items.audit()
    names = (USER_ID, ITEM_ID, ACTION)
    largest = {name: max(writer.largest[name] for writer in writers.values()) for name in names}
    return splits, largest, statistics.report(folder)


def _losses(counts: Mapping[str, int]) -> str:
    return "".join(f"; {count:,} {what}" for what, count in counts.items() if count and "(kept)" not in what)


def _count_masked(masks: Masks | None) -> int:
    return sum(int(np.count_nonzero(~mask)) for mask in masks or ())


def _build_bucket(
    buckets: Buckets, index: int, *, masks: Masks | None, ids: Mapping[str, Ids], items: FeatureLookup
) -> tuple[Sequences, int]:
    columns = buckets.read(index)
    if masks is not None:
        columns = {name: values[masks[index]] for name, values in columns.items()}
    sequences, num_duplicates = build_sequences(columns, ids[USER_ID].encode)
    features = {column.name: column.to_numpy() for column in items.lookup(columns[ITEM_ID]).iter_columns()}
    events = {**sequences.events, ITEM_ID: ids[ITEM_ID].encode(columns[ITEM_ID]), **features}
    return replace(sequences, events=events), num_duplicates
