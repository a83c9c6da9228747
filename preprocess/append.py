"""New days of a log after those of a dataset, whose rows are one more log: the result is that of all days at once."""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import polars as pl

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.listing import list_files
from evenrank.datasets.event_statistics import Statistics, read_statistics
from evenrank.datasets.schema import (
    EVENT_DTYPES,
    REMEDY,
    USER_ID,
    WINDOW,
    Manifest,
    SourceFile,
    read_manifest,
    sha256_of,
)
from evenrank.preprocess.build.splits import EVAL, TRAIN, parse_split
from evenrank.preprocess.build.vocabulary import EarlierIds, read_earlier
from evenrank.preprocess.config import PreprocessConfig
from evenrank.preprocess.options import AUTO, DENSE, KEEP, Filters
from evenrank.preprocess.read.features import Interactions
from evenrank.preprocess.read.table import EventPart, Events, Piece, wrap_read_errors
from evenrank.preprocess.read.times import utc_text

_AT_ONCE = "preprocess all of the log at once"


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """A dataset to which later events are appended."""

    folder: Path
    manifest: Manifest
    statistics: Statistics
    ids: Mapping[str, EarlierIds]
    overlap: int  # events that a window shares with the one before
    others: tuple[Path, ...]  # files that are read besides logs: features, a list of users

    @property
    def skipped(self) -> dict[str, int]:
        """Numbers of rows of its log that could not be read, by their descriptions."""
        return {what: count for what, count in self.manifest.options["audit"].items() if what.endswith("all skipped")}

    def copy_to(self, folder: Path) -> Manifest:
        """Put all its files into the folder of the new dataset, and return the manifest."""
        for name in list_files(self.folder):  # all but those of the cache, which is hidden
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)  # left by a killed run
            try:
                os.link(self.folder / name, path)
            except OSError:  # some file systems have no such links
                shutil.copyfile(self.folder / name, path)
        return self.manifest

    def with_logs(self, sources: tuple[SourceFile, ...]) -> tuple[SourceFile, ...]:
        """Return its files of logs and all new files."""
        return self.manifest.sources[: len(self.manifest.sources) - len(self.others)] + sources

    def with_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options with which it and the new events would be preprocessed at once."""
        old = self.manifest.options
        found = {"timestamp_unit": old["timestamp_unit"], "delimiter": old["delimiter"] or options["delimiter"]}
        found["on_error"] = max(old["on_error"], options["on_error"])  # skip, if rows of one of them may be bad
        return {**options, **found, "events": [*old["events"], *options["events"]]}

    def check(self, source: Interactions, options: Mapping[str, Any]) -> None:
        """Raise a ConfigError if events of a log cannot be appended, or with other options."""
        if source.time_unit == "row" or source.has_eval_log:
            which = "without times" if source.time_unit == "row" else "with a second one for eval"
            raise ConfigError(f"events of a log {which} cannot be appended; {_AT_ONCE}")
        self.check_options(options, but=("events", "delimiter", "timestamp_unit", "on_error"))  # which depend on files

    def check_options(self, options: Mapping[str, Any], *, but: Collection[str] = ()) -> None:
        """Raise a ConfigError if options of preprocessing, `but` some, are not those of this dataset."""
        for name, value in json.loads(json.dumps(options)).items():
            if name not in but and value != (old := self.manifest.options.get(name)):
                raise ConfigError(
                    f"{name} is {value!r}, and was {old!r} when {self.folder} was made; append with the same options"
                )

    def check_rules(self, rules: Mapping[str, str]) -> None:
        """Raise a ConfigError if the rules of ids may be other ones than those of this dataset."""
        for name, ids in self.ids.items():
            # `auto` counts the values that it keeps.
            was_given = ids.summary.rule == KEEP and ids.summary.distinct is None
            if rules[name] not in (ids.summary.rule, "" if was_given else AUTO):
                raise ConfigError(
                    f"the rule of {name} is {rules[name]}, and the ids of {self.folder} are {ids.summary.rule}; "
                    f"give --ids as for that dataset, or {_AT_ONCE}"
                )

    @property
    def first_ms(self) -> dict[str, int]:
        """The least time of new events, by the reason to report of earlier ones."""
        last_ms = self.statistics.last_ms
        reason = f"is not after {utc_text(last_ms)}, where the dataset ends; append later events, or {_AT_ONCE}"
        return {reason: last_ms + 1}

    def part(self, extra_events: Collection[str]) -> EventPart:
        """Return its rows as a log, whose events have these columns besides those of every log."""
        names = sorted({PurePath(file.path).name for split in self.manifest.splits.values() for file in split.files})
        return EventPart(
            name=str(self.folder),
            num_events=self.statistics.num_events,
            read=partial(self._read, names, [*EVENT_DTYPES, *extra_events]),
            pieces=[Piece(number, number + 1) for number in range(len(names))],
        )

    def _read(self, names: Sequence[str], lists: Sequence[str], piece: Piece) -> Iterator[Events]:
        """Yield the events of files with one name, which have the same users in all splits; those of each in order."""
        files = {file.path: file for split in self.manifest.splits.values() for file in split.files}
        read = np.empty(0, dtype=np.int64)
        for split in (EVAL, TRAIN):  # whose rows repeat events of eval
            if (file := files.get(f"{split}/{names[piece.begin]}")) is None:
                continue
            path = self.folder / file.path
            if sha256_of(path) != file.sha256:
                raise DataError(f"{path} does not match its manifest; {REMEDY}")
            with wrap_read_errors(path):
                rows = pl.read_parquet(path, glob=False)
            rows = rows.filter(~np.isin(rows.get_column(USER_ID), read))
            read = rows.get_column(USER_ID).to_numpy()
            if WINDOW in rows.columns:
                begin = pl.when(pl.col(WINDOW) > 0).then(self.overlap).otherwise(0)
                rows = rows.with_columns(pl.col(lists).list.slice(begin))
            events = rows.select(USER_ID, *lists).explode(lists)
            raw = [
                ids.values.gather(events.get_column(name) - 1).alias(name)
                for name, ids in self.ids.items()
                if ids.summary.rule == DENSE
            ]
            yield Events(events.with_columns(raw))


def read_base(folder: Path, config: PreprocessConfig) -> Base:
    """Open a dataset to append events to it; raises a ConfigError or DataError if that is not possible."""
    manifest, listed = read_manifest(folder), parse_split(config.split).file
    ids = read_earlier(folder)
    others = [] if config.custom is None else [file.path for file in config.custom.feature_files.values()]
    lossy = [
        name
        for name in ("min_user_events", "min_item_events", "min_length", "max_length")
        if getattr(config.filters, name) != getattr(Filters(), name)
    ]
    hashed = [name for name, of in ids.items() if of.summary.rule not in (DENSE, KEEP)]
    reason = (
        f"{', '.join(lossy)} left out events that may count by now"
        if lossy
        else f"{', '.join(hashed)} has ids that are hashes"
        if hashed
        else f"{folder} is {manifest.dataset}, no log of your own"
        if manifest.dataset != config.dataset
        else f"{folder} has ids of an earlier vocabulary"
        if any(of.summary.unknown_values or (of.summary.distinct or 0) < len(of.keys) for of in ids.values())
        else ""
    )
    if reason:
        raise ConfigError(f"events cannot be appended: {reason}; {_AT_ONCE}")
    return Base(
        folder=folder,
        manifest=manifest,
        statistics=read_statistics(manifest),
        ids=ids,
        overlap=config.filters.overlap,
        others=(*others, *([] if listed is None else [listed])),
    )
