"""The whole job: raw files -> interactions -> buckets -> sequences -> splits -> a folder of Parquet files."""

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow.parquet as pq

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.storage import Remote, is_url, locate
from evenrank.datasets.event_statistics import Statistics
from evenrank.datasets.schema import (
    ACTION,
    EVENT_DTYPES,
    ITEM_ID,
    SCHEMA_VERSION,
    USER_ID,
    IdKind,
    Manifest,
    Split,
    content_hash,
    summarize_lengths,
)
from evenrank.preprocess.build.buckets import EVENTS_PER_BUCKET, Buckets, Columns, check_space, num_range_bits
from evenrank.preprocess.build.count_events import EventCounter
from evenrank.preprocess.build.filters import Filters, k_core
from evenrank.preprocess.build.ids import AUTO, DENSE, KEEP, parse_ids, parse_unknown
from evenrank.preprocess.build.inference_requests import REQUEST_SCHEMA
from evenrank.preprocess.build.key_table import TextValues
from evenrank.preprocess.build.read_events import ReadPiece, ReadRules, join_pieces, read_piece
from evenrank.preprocess.build.splits import (
    IN_EVAL,
    SplitFacts,
    SplitRule,
    by_second_log,
    parse_split,
    read_listed_users,
    second_log,
)
from evenrank.preprocess.build.vocabulary import EarlierIds, drop_unknown, number_ids, read_earlier
from evenrank.preprocess.config import PreprocessConfig
from evenrank.preprocess.engine import Engine, num_workers
from evenrank.preprocess.files.fetch import Copies, copies_in
from evenrank.preprocess.files.raw_values import TextIdsError
from evenrank.preprocess.files.times import check_era, utc_text
from evenrank.preprocess.log_config import TabularConfig
from evenrank.preprocess.output.ranges import (
    EVENTS_PER_FILE,
    RangeRules,
    WrittenRange,
    schema_of,
    split_file,
    write_range,
)
from evenrank.preprocess.output.replace import REQUESTS_NAME, replace_folder, wrap_write_errors
from evenrank.preprocess.output.upload import replace_remote
from evenrank.preprocess.output.writer import write_item_features, write_no_rows
from evenrank.preprocess.sources.catalog import CATALOG, CUSTOM, SYNTHETIC
from evenrank.preprocess.sources.custom import read_tabular
from evenrank.preprocess.sources.download import ensure_raw_files, source_files
from evenrank.preprocess.sources.features import FeatureLookup, look_up_items
from evenrank.preprocess.sources.fractal import expand_interactions, parse_expansion
from evenrank.preprocess.sources.interactions import Interactions, number_features
from evenrank.preprocess.sources.synthetic import SyntheticConfig, draw_interactions


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
    out, workers = locate(config.out), num_workers(config.memory_limit)

    def write(folder: Path) -> Manifest:
        with copies_in(folder / ".inputs", on_stage) as copies:
            with_copies = _with_copies(config, copies)
            return _write(folder, with_copies, out, copies, workers=workers, show_progress=show_progress)

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
    folder: Path, config: PreprocessConfig, out: Path | Remote, copies: Copies, *, workers: int, show_progress: bool
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
                job = _Job(
                    folder=folder,
                    config=config,
                    source=source,
                    rules=rules,
                    earlier=earlier,
                    workers=workers,
                    on_stage=on_stage,
                )
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
    workers: int
    on_stage: Callable[[str], None]
    counts: dict[str, int] = field(default_factory=dict)  # of events and users, by what became of them

    def run(self) -> Manifest:
        """Write all files, and return the manifest."""
        config, source = self.config, self.source
        rule, eval_users, num_listed = parse_split(config.split), np.empty(0, dtype=np.int64), 0
        num_expected = sum(part.num_events for part in source.parts)
        num_bits = num_range_bits(num_expected, EVENTS_PER_BUCKET)
        dtypes = {USER_ID: "int64", **EVENT_DTYPES, **source.extra_events}
        if source.has_eval_log:
            rule, dtypes[IN_EVAL] = by_second_log(rule), "int32"
        elif rule.file is not None:
            column = str(source.options.get("user_column", USER_ID))
            eval_users, num_listed = read_listed_users(rule.file, column, source.id_kinds[USER_ID])
        check_space(self.folder, num_expected, dtypes)
        work = self.folder / ".work"
        texts = {
            name: TextValues(work / f"texts of {name}", num_bits)
            for name, kind in source.id_kinds.items()
            if kind == "text"
        }
        for folder in (work, work / "buckets", *(work / f"texts of {name}" for name in texts)):
            folder.mkdir()
        # The raw files are read a second time for their checksums, concurrently with the pass that parses them.
        with ThreadPoolExecutor(1) as background, contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, work, ignore_errors=True)
            engine = stack.enter_context(Engine(self.workers))
            pending_sources = background.submit(source.sources)
            has_times = source.time_unit != "row"
            reading = ReadRules(folder=work / "buckets", num_bits=num_bits, texts=texts, has_times=has_times)
            pieces = [(part, piece) for part in source.parts for piece in part.pieces]
            tasks = [ReadPiece(number, *piece) for number, piece in enumerate(pieces)]
            read = engine.map(partial(read_piece, reading), tasks)
            log = join_pieces(source.parts, read, has_times=has_times, on_error=config.on_error, on_stage=self.on_stage)
            self.counts, first_ms, ends = log.num_skipped, log.first_ms, log.last_ms
            buckets = Buckets(folder=work / "buckets", runs=log.runs, dtypes=dtypes, num_bits=num_bits)
            if not config.allow_empty:
                check_era(ends, source.time_unit)
            self.counts["events of unknown users or items (dropped)"] = num_dropped = drop_unknown(
                buckets, self.earlier
            )
            self.counts["events left out by the k-core"] = num_left_out = k_core(buckets, config.filters)
            num_left = sum(run.num_events for run in log.runs) - num_dropped - num_left_out
            self.on_stage("numbering users and items")
            number = partial(number_ids, buckets=buckets, engine=engine, folder=self.folder, work=work)
            raw_ids = [
                (name, self.rules[name], kind, texts.get(name), self.earlier.get(name))
                for name, kind in source.id_kinds.items()
            ]
            with ThreadPoolExecutor(2) as both:
                ids = dict(zip(source.id_kinds, both.map(number, *zip(*raw_ids, strict=True)), strict=True))
            items = look_up_items(source.item_features, ids[ITEM_ID], as_table=source.has_item_table)
            facts = SplitFacts(seed=config.seed, last_ms=max(ends.values()), eval_users=eval_users)
            rules = RangeRules(
                folder=self.folder,
                buckets=buckets,
                num_bits=num_range_bits(num_left, EVENTS_PER_FILE),
                split=config.split,
                has_eval_log=source.has_eval_log,
                facts=facts,
                filters=config.filters,
                requests=config.requests,
                user_ids=ids[USER_ID],
                item_ids=ids[ITEM_ID],
                context=FeatureLookup(source.context, of="users"),
                items=items,
                extra_events=source.extra_events,
            )
            splits, largest, statistics = self._write_splits(rules, engine)
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

    def _write_splits(self, rules: RangeRules, engine: Engine) -> tuple[dict[str, Split], dict[str, int], Statistics]:
        """Write all splits, and the requests if there is a rule for them.

        Return the splits, the largest user_id, item_id and action in them, and the statistics of their events.
        """
        config, num_ranges = self.config, 1 << rules.num_bits
        statistics = EventCounter(
            _shown_split(config.split, rules.rule), rules.rule.by, rules.item_ids.size, config.filters.overlap
        )
        written: list[WrittenRange] = []
        with contextlib.ExitStack() as stack:
            if config.requests is not None:
                path = self.folder / REQUESTS_NAME
                requests = stack.enter_context(pq.ParquetWriter(path, REQUEST_SCHEMA, compression="zstd"))
            for index, part in engine.map(partial(write_range, rules), range(num_ranges)):
                self.on_stage(f"writing sequences, part {index + 1} of {num_ranges}")
                if part.requests is not None:
                    requests.write_table(part.requests)
                statistics.add(part.events)
                rules.context.record(part.users)
                rules.items.record(part.items)
                written.append(replace(part, requests=None))
        splits = {name: self._split(name, rules, written) for name in written[0].lengths}
        self.counts |= {
            "duplicate events (kept)": sum(part.num_duplicates for part in written),
            "users left out by filters": sum(part.num_left_out for part in written),
        }
        if not any(split.rows for split in splits.values()):
            raise DataError(f"no users are left{self._losses()}; relax the filters, or the rule for unknown values")
        self.counts |= rules.context.audit() | rules.items.audit()
        names = (USER_ID, ITEM_ID, ACTION)
        largest = {name: max(part.largest[name] for part in written) for name in names}
        return splits, largest, statistics.report(self.folder)

    def _split(self, name: str, rules: RangeRules, written: Sequence[WrittenRange]) -> Split:
        files = [part.files[name] for part in written if name in part.files]
        files = files or [write_no_rows(self.folder, split_file(name, 0), schema_of(rules, name))]
        lengths = np.concatenate([part.lengths[name] for part in written])
        summary = summarize_lengths(lengths)
        return Split(files=tuple(files), rows=len(lengths), interactions=int(lengths.sum()), lengths=summary)

    def _losses(self) -> str:
        return "".join(f"; {count:,} {what}" for what, count in self.counts.items() if count and "(kept)" not in what)


def _shown_split(split: str, rule: SplitRule) -> str:
    """Return the rule of a split for the manifest, which is the same wherever a file is."""
    return split if rule.file is None else f"file:{rule.file.name}"
