"""New days of a log after those of a dataset, with the same result as all of them at once."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.core.listing import list_files
from evenrank.datasets.event_statistics import Statistics, read_statistics
from evenrank.datasets.schema import USER_ID, Manifest, SourceFile, read_manifest, sha256_of
from evenrank.preprocess.build.buckets import num_range_bits
from evenrank.preprocess.build.ids import AUTO, DENSE, KEEP
from evenrank.preprocess.build.splits import parse_split
from evenrank.preprocess.build.vocabulary import EarlierIds, read_earlier
from evenrank.preprocess.config import PreprocessConfig
from evenrank.preprocess.files.table import wrap_read_errors
from evenrank.preprocess.files.times import utc_text
from evenrank.preprocess.options import Filters
from evenrank.preprocess.output.earlier_rows import EarlierRows, keep_file
from evenrank.preprocess.sources.interactions import Interactions

OF_LOG = ("events", "delimiter", "timestamp_unit", "on_error")  # options that depend on files
_AT_ONCE = "preprocess all of the log at once"


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """A dataset to which later events are appended."""

    folder: Path
    manifest: Manifest
    statistics: Statistics
    ids: Mapping[str, EarlierIds]
    others: tuple[Path, ...]  # files that are read besides logs: features, a list of users

    @property
    def skipped(self) -> dict[str, int]:
        """Numbers of rows of its log that could not be read, by their descriptions."""
        return {what: count for what, count in self.manifest.options["audit"].items() if what.endswith("all skipped")}

    def copy_to(self, folder: Path) -> Manifest:
        """Put all its files into the folder of the new dataset, and return the manifest."""
        for name in list_files(self.folder):  # all but those of the cache, which is hidden
            keep_file(self.folder, name, folder)
        return self.manifest

    def with_logs(self, sources: tuple[SourceFile, ...]) -> tuple[SourceFile, ...]:
        """Return its files of logs and all new files."""
        return self.manifest.sources[: self._num_logs] + sources

    def with_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options with which it and the new events would be preprocessed at once."""
        old = self.manifest.options
        found = {"timestamp_unit": old["timestamp_unit"], "delimiter": old["delimiter"] or options["delimiter"]}
        found["on_error"] = max(old["on_error"], options["on_error"])  # skip, if rows of one of them may be bad
        return {**options, **found, "events": [*old["events"], *options["events"]]}

    @property
    def _num_logs(self) -> int:
        return len(self.manifest.sources) - len(self.others)

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

    def rows(self, config: PreprocessConfig, dtypes: Mapping[str, str], events_per_file: int) -> EarlierRows:
        """Return the rows, whose events have the columns `dtypes`."""
        is_same = [sha256_of(path) for path in self.others] == [
            source.sha256 for source in self.manifest.sources[self._num_logs :]
        ]
        return EarlierRows(
            folder=self.folder,
            files={file.path: file for split in self.manifest.splits.values() for file in split.files},
            num_bits=num_range_bits(self.statistics.num_events, events_per_file),
            dtypes=dtypes,
            keys={name: ids.keys for name, ids in self.ids.items() if ids.summary.rule == DENSE},
            overlap=config.filters.overlap,
            is_same=is_same and not config.split.startswith("time:last:"),
        )


def read_base(folder: Path, config: PreprocessConfig) -> Base:
    """Open a dataset to append events to it; raises a ConfigError or DataError if that is not possible."""
    manifest, listed = read_manifest(folder), parse_split(config.split).file
    ids = read_earlier(folder, {}, is_continued=True)
    for name, of_column in ids.items():
        if of_column.summary.rule == KEEP and of_column.summary.distinct is not None:  # by the rule auto
            ids[name] = replace(of_column, keys=_values_in(folder, manifest, name))
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
        others=(*others, *([] if listed is None else [listed])),
    )


def _values_in(folder: Path, manifest: Manifest, column: str) -> NDArray[np.int64]:
    """Return the distinct values of a column of rows or events: int64 [n]."""
    parts = []
    for split in manifest.splits.values():
        paths = [folder / file.path for file in split.files]
        with wrap_read_errors(folder):
            values = pl.scan_parquet(paths, glob=False).select(column)
            values = values.explode(column) if column != USER_ID else values
            parts.append(values.unique().collect(engine="streaming").get_column(column).to_numpy())
    return np.unique(np.concatenate(parts))


def check_source(source: Interactions) -> None:
    """Raise a ConfigError if events of a log cannot be appended."""
    if source.time_unit == "row" or source.has_eval_log:
        which = "without times" if source.time_unit == "row" else "with a second one for eval"
        raise ConfigError(f"events of a log {which} cannot be appended; {_AT_ONCE}")
