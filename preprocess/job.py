"""The stages of preprocessing, each of which is functions on files that an engine runs."""

import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.core.files import check_space
from evenrank.datasets.event_statistics import Statistics
from evenrank.datasets.schema import (
    ACTION,
    EVENT_DTYPES,
    ITEM_ID,
    REQUESTS_NAME,
    USER_ID,
    DataFile,
    Manifest,
    Split,
    content_hash,
    summarize_lengths,
)
from evenrank.preprocess.append import Base
from evenrank.preprocess.build.count_events import EventCounter
from evenrank.preprocess.build.distinct import Column
from evenrank.preprocess.build.events import (
    EVENTS_PER_BUCKET,
    Buckets,
    ReadPiece,
    ReadRules,
    bytes_on_disk,
    join_pieces,
    num_range_bits,
    read_piece,
)
from evenrank.preprocess.build.features import FeatureLookup, look_up_items
from evenrank.preprocess.build.filters import drop_unknown, k_core, keep_lengths
from evenrank.preprocess.build.inference_requests import REQUEST_SCHEMA
from evenrank.preprocess.build.splits import IN_EVAL, SplitFacts, SplitRule, parse_split, read_listed_users
from evenrank.preprocess.build.vocabulary import EarlierIds, Ids, number_ids
from evenrank.preprocess.config import PreprocessConfig
from evenrank.preprocess.engine import Engine, Workers
from evenrank.preprocess.options import Filters
from evenrank.preprocess.read.download import source_files
from evenrank.preprocess.read.features import Interactions
from evenrank.preprocess.read.keys import KeyTable, TextValues
from evenrank.preprocess.read.times import check_era, utc_text
from evenrank.preprocess.replace import DATASET_NAME, REJECTS_NAME
from evenrank.preprocess.writer import (
    EVENTS_PER_FILE,
    RangeRules,
    schema_of,
    split_file,
    write_item_features,
    write_no_rows,
    write_range,
)

WORK_NAME = "work"  # folder of what is needed until the dataset is complete, and of results by stage
_LOGGER = logging.getLogger("evenrank.preprocess")


@dataclass(slots=True)
class Job:
    """Writes all files of a dataset to the folder of a run."""

    run_folder: Path
    config: PreprocessConfig
    source: Interactions
    rules: Mapping[str, str]  # of the ids
    earlier: Mapping[str, EarlierIds]
    on_stage: Callable[[str], None]
    base: Base | None  # to which events are appended
    counts: dict[str, int] = field(default_factory=dict)  # of events and users, by what became of them

    @property
    def folder(self) -> Path:
        """The folder of the dataset."""
        return self.run_folder / DATASET_NAME

    @property
    def options(self) -> dict[str, Any]:
        """The options of preprocessing, for the manifest."""
        config, default = self.config, asdict(Filters())
        return {
            **self.source.options,
            "split": _shown_split(config.split, self.rule),
            "seed": config.seed,
            "on_error": config.on_error,
            "unknown": config.unknown,
            "filters": {name: value for name, value in asdict(config.filters).items() if value != default[name]},
            "requests": None if config.requests is None else asdict(config.requests),
        }

    @property
    def rule(self) -> SplitRule:
        """The rule of the split."""
        return parse_split(self.config.split, has_eval_log=self.source.has_eval_log)

    def run(self, workers: Workers) -> Manifest:
        """Write all files, and return the manifest."""
        config, source = self.config, self.source
        if self.base is not None:
            self.base.check(source, self.options)
        rule, eval_users, num_listed = self.rule, np.empty(0, dtype=np.int64), 0
        parts = [] if self.base is None else [self.base.part(source.extra_events)]
        base_name = "".join(part.name for part in parts)
        parts += source.parts
        num_expected = sum(part.num_events for part in parts)
        num_bits = num_range_bits(num_expected, EVENTS_PER_BUCKET)
        dtypes = {USER_ID: "int64", **EVENT_DTYPES, **source.extra_events}
        if source.has_eval_log:
            dtypes[IN_EVAL] = "int32"
        elif rule.file is not None:
            column = str(source.options.get("user_column", USER_ID))
            eval_users, num_listed = read_listed_users(rule.file, column, source.id_kinds[USER_ID])
        work = self.run_folder / WORK_NAME
        check_space(work, bytes_on_disk(num_expected, dtypes), f"{num_expected:,} events")
        texts = {
            name: TextValues(work / f"texts of {name}", num_bits)
            for name, kind in source.id_kinds.items()
            if kind == "text"
        }
        for folder in ("buckets", "results", "values", *(f"texts of {name}" for name in texts)):
            (work / folder).mkdir(exist_ok=True)
        engine = Engine(workers, work / "results", self.on_stage)
        # The raw files are read a second time for their checksums, concurrently with the pass that parses them.
        with ThreadPoolExecutor(1) as background:
            pending_sources = background.submit(source.sources)
            if self.base is not None and {*pending_sources.result()} <= {*self.base.manifest.sources}:
                _LOGGER.warning("%s has these events already, and stays as it is", config.out)
                return self.base.copy_to(self.folder)
            has_times = source.time_unit != "row"
            reading = ReadRules(
                folder=work / "buckets", num_bits=num_bits, texts=texts, has_times=has_times, keeps_bad=config.rejects
            )
            pieces = [(part, piece) for part in parts for piece in part.pieces]
            tasks = [ReadPiece(number, *piece) for number, piece in enumerate(pieces)]
            read = engine.map(partial(read_piece, reading), tasks, stage="reading")
            with self._rejects() as rejects:
                log = join_pieces(
                    read, has_times=has_times, on_error=config.on_error, rejects=rejects, on_stage=self.on_stage
                )
            late = {} if self.base is None else self.base.first_ms
            new = {name: span for name, span in log.spans.items() if name != base_name}
            if not new and (self.base is None or any(of in text for of in late for text in log.num_skipped)):
                reasons = "; ".join(log.num_skipped) or ", ".join(part.name for part in source.parts)
                raise DataError(f"no events could be read: {reasons}; check the file, or unpack or download it again")
            self.counts = log.num_skipped
            if self.base is not None:
                if new:
                    self.base.check_options({"timestamp_unit": source.time_unit})
                self.counts = Counter(self.base.skipped) + log.num_skipped
            firsts, lasts = zip(*log.spans.values(), strict=True)
            buckets = Buckets(folder=work / "buckets", runs=log.runs, dtypes=dtypes, num_bits=num_bits)
            if new and not config.allow_empty:
                check_era(new, source.time_unit)
            known = {
                name: KeyTable(ids.keys)
                for name, ids in self.earlier.items()
                if ids.unknown == "drop" and ids.summary.versions
            }
            self.counts["events of unknown users or items (dropped)"] = num_dropped = drop_unknown(
                buckets, known, engine
            )
            self.counts["events left out by the k-core"] = num_left_out = k_core(buckets, config.filters, engine)
            self.counts["users left out by filters"] = keep_lengths(buckets, config.filters, engine)
            num_left = sum(run.num_events for run in log.runs) - num_dropped - num_left_out

            def number(name: str) -> Ids:
                column = Column(name, source.id_kinds[name], texts.get(name), buckets, work / "values")
                return number_ids(self.rules[name], column, self.earlier.get(name), engine=engine, folder=self.folder)

            with ThreadPoolExecutor(2) as both:
                ids = dict(zip(source.id_kinds, both.map(number, source.id_kinds), strict=True))
            items = look_up_items(source.item_features, ids[ITEM_ID], as_table=source.has_item_table)
            facts = SplitFacts(seed=config.seed, last_ms=max(lasts), eval_users=eval_users)
            rules = RangeRules(
                folder=self.folder,
                buckets=buckets,
                num_bits=num_range_bits(num_left, EVENTS_PER_FILE),
                split=rule,
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
        options = self.options if self.base is None else self.base.with_options(self.options)
        unit = options.get("timestamp_unit", source.time_unit)
        time = {"unit": unit, "first": utc_text(min(firsts)), "last": utc_text(max(lasts))}
        empty = [name for name, split in splits.items() if not split.rows]
        if empty and rule.remedy is not None and not config.allow_empty:
            raise DataError(
                f"--split {config.split} leaves {empty[0]} without rows, of events from {time['first']} to "
                f"{time['last']}{self._losses()}; {rule.remedy}, or pass --allow-empty"
            )
        if rule.file is not None and not source.has_eval_log:
            sources += source_files([(rule.file, rule.file.name)])
        if self.base is not None:
            sources = self.base.with_logs(sources)
        labels = {**source.context.values, **source.item_features.values}
        manifest = Manifest(
            dataset=config.dataset,
            sources=sources,
            options={
                **options,
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
                **{
                    name: of.summary if of.size is not None else replace(of.summary, largest=largest[name])
                    for name, of in ids.items()
                },
                **source.feature_ids,
            },
            item_features=item_table,
        )
        manifest = replace(manifest, content_hash=content_hash(manifest))
        manifest.write(self.folder)
        return manifest

    @contextlib.contextmanager
    def _rejects(self) -> Iterator[BinaryIO | None]:
        """Open the file of bad rows, if there is to be one, after those of the dataset to which events are appended."""
        if not self.config.rejects:
            yield None
            return
        with (self.folder / REJECTS_NAME).open("wb") as file:
            content = b"file,line,reason,text\n"
            if self.base is not None and (earlier := self.base.folder / REJECTS_NAME).exists():
                content = earlier.read_bytes()
            file.write(content)
            yield file

    def _write_splits(self, rules: RangeRules, engine: Engine) -> tuple[dict[str, Split], dict[str, int], Statistics]:
        """Write all splits, and the requests if there is a rule for them.

        Return the splits, the largest user_id, item_id and action in them, and the statistics of their events.
        """
        config, num_ranges = self.config, 1 << rules.num_bits
        num_items = None if rules.item_ids.table is None else rules.item_ids.size  # few of all hashes occur, perhaps
        statistics = EventCounter(
            _shown_split(config.split, rules.split), rules.split.by, num_items, config.filters.overlap
        )
        files: dict[str, list[DataFile]] = defaultdict(list)
        lengths: dict[str, list[NDArray[np.int64]]] = defaultdict(list)
        largest, num_duplicates = dict.fromkeys((USER_ID, ITEM_ID, ACTION), -1), 0
        with contextlib.ExitStack() as stack:
            if config.requests is not None:
                path = self.folder / REQUESTS_NAME
                requests = stack.enter_context(pq.ParquetWriter(path, REQUEST_SCHEMA, compression="zstd"))
            for _, part in engine.map(partial(write_range, rules), range(num_ranges), stage="writing sequences"):
                if part.requests is not None:
                    requests.write_table(part.requests)
                statistics.add(part.events)
                rules.context.record(part.users)
                rules.items.record(part.items)
                for name, of_rows in part.lengths.items():
                    lengths[name].append(of_rows)
                    files[name] += [part.files[name]] if name in part.files else []
                largest = {name: max(value, part.largest[name]) for name, value in largest.items()}
                num_duplicates += part.num_duplicates
        splits = {name: self._split(name, rules, files[name], np.concatenate(lengths[name])) for name in lengths}
        self.counts["duplicate events (kept)"] = num_duplicates
        if not any(split.rows for split in splits.values()):
            raise DataError(f"no users are left{self._losses()}; relax the filters, or the rule for unknown values")
        self.counts |= rules.context.audit() | rules.items.audit()
        return splits, largest, statistics.report(self.folder)

    def _split(self, name: str, rules: RangeRules, files: list[DataFile], lengths: NDArray[np.int64]) -> Split:
        files = files or [write_no_rows(self.folder, split_file(name, 0), schema_of(rules, name))]
        summary = summarize_lengths(lengths)
        return Split(files=tuple(files), rows=len(lengths), interactions=int(lengths.sum()), lengths=summary)

    def _losses(self) -> str:
        return "".join(f"; {count:,} {what}" for what, count in self.counts.items() if count and "(kept)" not in what)


def _shown_split(split: str, rule: SplitRule) -> str:
    """Return the rule of a split for the manifest, which is the same wherever a file is."""
    return split if rule.file is None else f"file:{rule.file.name}"
