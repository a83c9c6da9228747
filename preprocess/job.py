"""The stages of preprocessing: read, filter, number, write; each is functions on files that an engine calls."""

import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenrank.core.errors import DataError
from evenrank.core.files import check_space
from evenrank.datasets.event_statistics import Statistics
from evenrank.datasets.schema import (
    ACTION,
    EVENTS,
    ITEM_ID,
    MAX_HISTORY_LENGTH,
    REQUESTS_NAME,
    USER_ID,
    USER_IDS,
    VECTOR_FILES,
    DataFile,
    Manifest,
    Split,
    VectorFile,
    content_hash,
    summarize_lengths,
)
from evenrank.preprocess.append import Base, label_ids
from evenrank.preprocess.build.buckets import EVENTS_PER_BUCKET, Buckets, bytes_on_disk, num_range_bits
from evenrank.preprocess.build.count_events import EventCounter
from evenrank.preprocess.build.events import Log, ReadPiece, ReadRules, join_pieces, read_piece
from evenrank.preprocess.build.sequences import REQUEST_SCHEMA
from evenrank.preprocess.build.splits import (
    IN_EVAL,
    TRAIN,
    SplitFacts,
    SplitRule,
    drop_unknown,
    k_core,
    keep_lengths,
    leave_out_times,
    parse_split,
    read_listed_users,
)
from evenrank.preprocess.build.vocabulary import (
    EarlierIds,
    IdColumn,
    Ids,
    number_ids,
    vocabulary_name,
    write_vocabulary,
)
from evenrank.preprocess.config import Filters, PreprocessConfig, parse_min_count
from evenrank.preprocess.engine import Engine, Memory, num_cores, threads
from evenrank.preprocess.log_config import DENSE
from evenrank.preprocess.read.features import FeatureLookup, Interactions
from evenrank.preprocess.read.keys import KeyTable, TextValues
from evenrank.preprocess.read.places import source_files
from evenrank.preprocess.read.times import check_era, utc_text
from evenrank.preprocess.read.vectors import write_vectors
from evenrank.preprocess.replace import REJECTS_NAME
from evenrank.preprocess.writer import (
    EVENTS_PER_FILE,
    RangeRules,
    split_file,
    split_schema,
    write_item_features,
    write_no_rows,
    write_range,
)

_BYTES_PER_TEXT = 16  # of an id, before it is a key
_LOGGER = logging.getLogger("evenrank.preprocess")


@dataclass(slots=True)
class Job:
    """Writes all files of a dataset."""

    folder: Path
    work: Path  # folder of what is needed until the dataset is complete, and of results
    config: PreprocessConfig
    source: Interactions  # its first part has the rows of `base`
    rules: Mapping[str, str]  # of the ids
    earlier: Mapping[str, EarlierIds]
    base: Base | None  # to which events are appended
    counts: dict[str, int] = field(default_factory=dict)  # of events and users, by what became of them
    added: str = ""  # description of what was appended to `base`

    @property
    def dtypes(self) -> dict[str, str]:
        """Types of the columns of events, with keys in place of ids."""
        in_eval = {IN_EVAL: "int32"} if self.source.has_eval_log else {}
        return {column.name: column.dtype for column in (USER_IDS, *self.source.events)} | in_eval

    def engine(
        self, before: int, files: Sequence[Path], on_stage: Callable[[str], None]
    ) -> contextlib.AbstractContextManager[Engine]:
        """Open what runs the functions of the stages, as many at a time as cores and memory allow.

        `before` are the bytes that the process had before it read `files`.
        """
        config, features, earlier = self.config, (self.source.context, self.source.item_features), self.earlier.values()
        sizes = [*(of.rows.estimated_size() for of in features), *(of.values.estimated_size() for of in earlier)]
        keys = [*(of.keys for of in features), *(of.keys for of in earlier)]
        keys += [of.keys for of in self.source.vectors.values()]
        num_texts = [*self.source.id_kinds.values()].count("text")
        of_event = sum(np.dtype(dtype).itemsize for dtype in self.dtypes.values()) + _BYTES_PER_TEXT * num_texts
        taken = before + int(sum(sizes)) + sum(3 * of_column.nbytes for of_column in keys)
        memory = Memory(config.memory_limit, taken, of_event, are_processes=config.engine == "ray")
        count, results = min(num_cores(), memory.num_tasks), self.work / "results"
        if config.engine == "local":
            return threads(count, results, on_stage, memory)
        from evenrank.preprocess.ray_workers import ray_workers

        return ray_workers(config.ray_address, count, [self.folder.parent, *files], results, memory, on_stage)

    @property
    def options(self) -> dict[str, Any]:
        """The options of preprocessing, for the manifest."""
        config, default = self.config, asdict(Filters())
        return {
            **self.source.options,
            # Which is the same wherever a file is.
            "split": config.split if self.rule.file is None else f"file:{self.rule.file.name}",
            "seed": config.seed,
            "on_error": config.on_error,
            "unknown": config.unknown,
            **({"min_count": config.min_count} if config.min_count else {}),
            "filters": {name: value for name, value in asdict(config.filters).items() if value != default[name]},
            "requests": None if config.requests is None else asdict(config.requests),
        }

    @property
    def rule(self) -> SplitRule:
        """The rule of the split."""
        return parse_split(self.config.split, has_eval_log=self.source.has_eval_log)

    def run(self, engine: Engine) -> Manifest:
        """Write all files, and return the manifest; none if events are to be appended that are there already."""
        config, source, base, options = self.config, self.source, self.base, self.options
        if base is not None:
            # The other ones depend on files, and `on_error` is skip if rows of one of them may be bad.
            base.check_options(
                {name: options[name] for name in options if name not in ("events", "delimiter", "on_error")}
            )
            options["on_error"] = max(options["on_error"], base.manifest.options["on_error"])
        eval_users, num_listed = np.empty(0, dtype=np.int64), 0
        if (listed := None if source.has_eval_log else self.rule.file) is not None:
            column = str(source.options.get("user_column", USER_ID))
            eval_users, num_listed = read_listed_users(listed, column, source.id_kinds[USER_ID])
        # The raw files are read a second time for their checksums, and vocabularies are written, while events are.
        with ThreadPoolExecutor(3) as background:
            pending_sources = background.submit(source.sources)
            if base is not None and {*pending_sources.result()} <= {*base.manifest.sources}:
                _LOGGER.warning("%s has these events already, and stays as it is", config.out)
                return base.manifest
            log, buckets, texts = self._read(engine)
            facts = SplitFacts(seed=config.seed, limits_ms=log.limits_ms, eval_users=eval_users)
            num_left = self._filter(log, buckets, facts, engine)
            ids = self._number(buckets, texts, engine)
            pending_summaries = {
                name: background.submit(
                    write_vocabulary, self.folder / vocabulary_name(name), of, self.earlier.get(name)
                )
                for name, of in ids.items()
            }
            pending_vectors = {name: background.submit(self._write_vectors, name, ids[name]) for name in source.vectors}
            if config.memory_limit is not None:  # which has no room for all
                wait(pending_summaries.values())
                wait(pending_vectors.values())
            rules = self._rules(facts, buckets, num_left, ids)
            splits, largest, statistics = self._write_splits(rules, engine)
            self.counts["listed users without events"] = max(0, num_listed - statistics.eval_users)
            item_table = write_item_features(self.folder, source, ids[ITEM_ID], rules.items.requested)
            sources = pending_sources.result()
            summaries = {name: pending.result() for name, pending in pending_summaries.items()}
            vectors = {}
            for name, written in pending_vectors.items():
                vectors[name], counts = written.result()
                self.counts |= counts
            if listed is not None:
                sources += source_files([(listed, listed.name)])
        first_ms, last_ms = log.limits_ms
        unit = options.get("timestamp_unit", source.time_unit)
        time = {"unit": unit, "first": utc_text(first_ms), "last": utc_text(last_ms)}
        empty = [name for name, split in splits.items() if not split.rows]
        if empty and self.rule.remedy is not None and not config.allow_empty:
            raise DataError(
                f"--split {config.split} leaves {empty[0]} without rows, of events from {time['first']} to "
                f"{time['last']}{self._losses()}; {self.rule.remedy}, or pass --allow-empty"
            )
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
            contextual={column.name: column.type for column in source.context.columns},
            extra_events={c.name: c.type for c in rules.columns if c.kind == "event" and c not in EVENTS},
            vocabulary_sizes={
                **{name: of_column.size or largest[name] + 1 for name, of_column in ids.items()},
                ACTION: source.num_actions or largest[ACTION] + 1,
                **source.context.sizes,
                **source.item_features.sizes,
            },
            context_labels={
                **{name: (None, *map(str, values)) for name, values in source.context.values.items()},
                **{name: () for name in source.context.sizes if name not in labels},
            },
            ids={
                **{
                    name: summary if ids[name].size is not None else replace(summary, largest=largest[name])
                    for name, summary in summaries.items()
                },
                # Without files, values are drawn, as ids.
                **{name: label_ids(of, source.feature_ids.get(name)) for name, of in labels.items() if source.files},
            },
            item_features=item_table,
            vectors=vectors,
        )
        manifest = replace(manifest, content_hash=content_hash(manifest))
        manifest.write(self.folder)
        if base is not None:
            self.added = base.describe_added(manifest, statistics) + self.added
        return manifest

    def _read(self, engine: Engine) -> tuple[Log, Buckets, dict[str, TextValues]]:
        """Write the events of all parts to buckets of users, and the texts that are ids beside them."""
        source, base, work = self.source, self.base, self.work
        num_expected = sum(part.num_events for part in source.parts)
        num_bits = num_range_bits(num_expected, EVENTS_PER_BUCKET)
        check_space(work, bytes_on_disk(num_expected, self.dtypes), f"{num_expected:,} events")
        names = [name for name, kind in source.id_kinds.items() if kind == "text"]
        texts = {name: TextValues(work / f"texts of {name}", num_bits) for name in names}
        for folder in ("buckets", "values", *(f"texts of {name}" for name in texts)):
            (work / folder).mkdir(exist_ok=True)
        has_times = source.time_unit != "row"
        rejects, on_error = self.config.rejects, self.config.on_error
        reading = ReadRules(
            folder=work / "buckets", num_bits=num_bits, texts=texts, has_times=has_times, keeps_bad=rejects
        )
        pieces = [(part, piece) for part in source.parts for piece in part.pieces]
        tasks = [ReadPiece(number, *piece) for number, piece in enumerate(pieces)]
        read = engine.map(partial(read_piece, reading), tasks, stage="reading")
        with (self.folder / REJECTS_NAME).open("wb") if rejects else contextlib.nullcontext() as file:
            if file is not None:  # after those of the dataset to which events are appended
                content = b"file,line,reason,text\n"
                if base is not None and (earlier := base.folder / REJECTS_NAME).exists():
                    content = earlier.read_bytes()
                file.write(content)
            log = join_pieces(read, has_times=has_times, on_error=on_error, rejects=file, on_stage=engine.on_stage)
        new = {name: span for name, span in log.spans.items() if base is None or name != str(base.folder)}
        if not new and (base is None or any(late in text for text in log.num_skipped for late in base.first_ms)):
            more = f" and {len(source.parts) - 1} more" if len(source.parts) > 1 else ""
            reasons = "; ".join(log.num_skipped) or f"there is no row in {source.parts[0].name}{more}"
            raise DataError(f"no events could be read: {reasons}; check the file, or unpack or download it again")
        if new and base is not None:  # else nothing tells the unit
            base.check_options({"timestamp_unit": source.time_unit})
            limits_ms = log._replace(spans=new).limits_ms
            self.added = f", from {utc_text(limits_ms[0])} to {utc_text(limits_ms[1])}"
        if new and not self.config.allow_empty and not source.counts_from_start:
            check_era(new, source.time_unit)
        audit = {} if base is None else base.manifest.options["audit"]
        skipped = Counter({what: count for what, count in audit.items() if what.endswith("all skipped")})
        self.counts = dict(skipped + log.num_skipped)
        buckets = Buckets(folder=work / "buckets", runs=log.runs, dtypes=self.dtypes, num_bits=num_bits)
        if engine.memory is not None and (largest := buckets.largest) > EVENTS_PER_BUCKET:
            engine.memory.take(f"{largest:,} events at a time, of one user or a few", largest=largest)
        return log, buckets, texts

    def _filter(self, log: Log, buckets: Buckets, facts: SplitFacts, engine: Engine) -> int:
        """Leave out what the filters and the split say, and return the number of events that are left."""
        filters, earlier, counts = self.config.filters, self.earlier, self.counts
        strict = {name: ids for name, ids in earlier.items() if ids.unknown == "drop" and ids.summary.versions}
        known = {name: KeyTable(ids.keys) for name, ids in strict.items()}
        counts |= (left_out := leave_out_times(buckets, self.rule, facts, engine))
        counts["events of unknown users or items (dropped)"] = num_dropped = drop_unknown(buckets, known, engine)
        counts["events left out by the k-core"] = num_left_out = k_core(buckets, filters, engine)
        counts["users left out by filters"] = keep_lengths(buckets, filters, engine)
        return sum(run.num_events for run in log.runs) - sum(left_out.values()) - num_dropped - num_left_out

    def _number(self, buckets: Buckets, texts: Mapping[str, TextValues], engine: Engine) -> dict[str, Ids]:
        """Find the ids of users and items, at the same time."""
        kinds, min_counts = self.source.id_kinds, parse_min_count(self.config.min_count)

        def number(name: str) -> Ids:
            values, min_count = self.work / "values", min_counts.get(name, 1)
            column = IdColumn(name, kinds[name], texts.get(name), buckets, values, min_count)
            return number_ids(self.rules[name], column, self.earlier.get(name), engine)

        with ThreadPoolExecutor(2) as both:
            ids = dict(zip(kinds, both.map(number, kinds), strict=True))
        for name, of in ids.items():
            rare = f"rare {name.removesuffix('_id')}s (kept"
            self.counts |= {f"{rare}, with the id 0)": of.num_rare, f"events of {rare})": of.num_rare_events}
        return ids

    def _rules(self, facts: SplitFacts, buckets: Buckets, num_left: int, ids: Mapping[str, Ids]) -> RangeRules:
        """Return what becomes of the events that are left."""
        source, config = self.source, self.config
        items = FeatureLookup(source.item_features, of="items")
        if source.has_item_table:  # in place of columns of events: of all items of the vocabulary
            found = ids[ITEM_ID].summary
            if found.collisions:
                raise DataError(
                    f"{found.collisions:,} items share their ids by {found.rule}, so no table has their features; "
                    "choose dense ids or item_features_as 'events'"
                )
            items = FeatureLookup(replace(source.item_features, rows=pl.DataFrame()), of="items")
            items.requested |= (ids[ITEM_ID].encode(source.item_features.keys) > 0) & (found.rule == DENSE)
        return RangeRules(
            folder=self.folder,
            buckets=buckets,
            num_bits=num_range_bits(num_left, EVENTS_PER_FILE),
            split=self.rule,
            facts=facts,
            filters=config.filters,
            requests=config.requests,
            user_ids=ids[USER_ID],
            item_ids=ids[ITEM_ID],
            context=FeatureLookup(source.context, of="users"),
            items=items,
            columns=(USER_IDS, *source.context.columns, *source.events, *items.events),
        )

    def _write_splits(
        self, rules: RangeRules, engine: Engine
    ) -> tuple[dict[str, Split], Mapping[str, int], Statistics]:
        """Write all splits, and the requests if there is a rule for them.

        Return the splits, the largest user_id, item_id and action in them, and the statistics of their events.
        """
        config, num_ranges = self.config, 1 << rules.num_bits
        num_items = None if rules.item_ids.table is None else rules.item_ids.size  # few of all hashes occur, perhaps
        statistics, kept = EventCounter(num_items), Counter[str]()
        files: dict[str, list[DataFile]] = defaultdict(list)
        lengths: dict[str, list[NDArray[np.int64]]] = defaultdict(list)
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
                kept.update(part.kept)
        splits = {name: self._split(name, rules, files[name], np.concatenate(lengths[name])) for name in lengths}
        self.counts |= kept
        if not any(split.rows for split in splits.values()):
            raise DataError(f"no users are left{self._losses()}; relax the filters, or the rule for unknown values")
        self.counts |= rules.context.audit() | rules.items.audit()
        self.counts["rows of features after the first of their item (left out)"] = (
            self.source.item_features.num_repeated
        )
        beyond = sum(np.maximum(of_rows - MAX_HISTORY_LENGTH, 0).sum() for of_rows in lengths[TRAIN])
        cut_share = round(beyond / max(1, splits[TRAIN].interactions), 6)
        known = {"split": self.options["split"], "by": self.rule.by, "cut_share": cut_share}
        report = statistics.report(self.folder, engine, config.filters.overlap, **known)
        return splits, statistics.largest, report

    def _write_vectors(self, name: str, ids: Ids) -> tuple[VectorFile, dict[str, int]]:
        """Write the vectors of users or items; also count those that lack one, and those without an id."""
        given, of = self.source.vectors[name], name.removesuffix("_id")
        if ids.table is None:
            raise DataError(
                f"{given.path} has vectors of {of}s, whose ids are {ids.summary.rule}; choose --ids {of}=dense"
            )
        found, earlier = ids.encode(given.keys), None if self.base is None else self.base.vectors(name, given)
        file = write_vectors(given, found, len(ids.table) + 1, self.folder / VECTOR_FILES[name], earlier)
        return file, {
            f"{of}s with a vector but no id (left out)": given.shape[0] - int(np.count_nonzero(found)),
            f"{of}s without a vector": file.missing,
        }

    def _split(self, name: str, rules: RangeRules, files: list[DataFile], lengths: NDArray[np.int64]) -> Split:
        files = files or [write_no_rows(self.folder, split_file(name, 0), split_schema(rules, name))]
        summary = summarize_lengths(lengths)
        return Split(files=tuple(files), rows=len(lengths), interactions=int(lengths.sum()), lengths=summary)

    def _losses(self) -> str:
        return "".join(f"; {count:,} {what}" for what, count in self.counts.items() if count and "(kept)" not in what)
