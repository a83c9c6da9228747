"""New days of a log after those of a dataset, whose rows are one more log: the result is that of all days at once.

Also the values of features, which keep the numbers that they have in an earlier dataset.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.event_statistics import Statistics, read_statistics
from evenrank.datasets.schema import REMEDY, USER_ID, WINDOW, IdSummary, Manifest, read_manifest, sha256_of
from evenrank.preprocess.build.splits import EVAL, TRAIN, parse_split
from evenrank.preprocess.build.vocabulary import EarlierIds, read_earlier, read_values, versions_of, vocabulary_name
from evenrank.preprocess.config import Filters, PreprocessConfig
from evenrank.preprocess.log_config import AUTO, DENSE, KEEP
from evenrank.preprocess.read.features import Features, Interactions
from evenrank.preprocess.read.table import EventPart, Events, Piece, wrap_read_errors
from evenrank.preprocess.read.times import utc_text
from evenrank.preprocess.read.vectors import Vectors

_AT_ONCE = "preprocess all of the log at once"


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """A dataset to which later events are appended."""

    folder: Path
    config: PreprocessConfig  # of the later events, which has the same options
    manifest: Manifest
    statistics: Statistics
    ids: Mapping[str, EarlierIds]

    @property
    def first_ms(self) -> dict[str, int]:
        """The least time of new events, by the reason to report of earlier ones."""
        last_ms = self.statistics.last_ms
        reason = f"is not after {utc_text(last_ms)}, where the dataset ends; append later events, or {_AT_ONCE}"
        return {reason: last_ms + 1}

    def describe_added(self, manifest: Manifest, statistics: Statistics) -> str:
        """Return how much a dataset, with its statistics, has beyond this one."""
        old = self.statistics
        counts = {
            "event": statistics.num_events - old.num_events,
            "user": statistics.users - old.users,
            "item": statistics.items - old.items,
            "file": len(manifest.sources) - len(self.manifest.sources),
        }
        return ", ".join(f"{count:,} {what}{'s' * (count != 1)}" for what, count in counts.items())

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise a ConfigError if options of preprocessing are not those of this dataset."""
        for name, value in json.loads(json.dumps(options)).items():
            old = self.manifest.options.get(name)
            # Times of Parquet's own types have no unit.
            has_no_unit = name == "timestamp_unit" and "auto" in (value, old)
            if value != old and not has_no_unit:
                raise ConfigError(
                    f"{name} is {value!r}, and was {old!r} when {self.folder} was made; append with the same options"
                )

    def vectors(self, name: str, new: Vectors) -> NDArray[Any] | None:
        """Return the vectors of its users or items, of the same d and type as new ones; None: it has none."""
        if (file := self.manifest.vectors.get(name)) is None:
            return None
        if (file.width, file.dtype) != (new.shape[1], new.dtype):
            raise DataError(
                f"{new.path} has vectors of {new.shape[1]} {new.dtype}, and {self.folder} of {file.width} {file.dtype};"
                f" append vectors of the same model, or {_AT_ONCE}"
            )
        if sha256_of(path := self.folder / file.path) != file.sha256:
            raise DataError(f"{path} does not match its manifest; {REMEDY}")
        vectors: NDArray[Any] = np.load(path, mmap_mode="r")
        return vectors

    def followed_by(self, log: Interactions) -> Interactions:
        """Return its rows and then a log, as one log with the options of both."""
        if log.time_unit == "row" or log.has_eval_log:
            which = "without times" if log.time_unit == "row" else "with a second one for eval"
            raise ConfigError(f"events of a log {which} cannot be appended; {_AT_ONCE}")
        num_others = len(log.files) - len(log.parts) + (parse_split(self.config.split).file is not None)
        old, logs = self.manifest.options, self.manifest.sources[: len(self.manifest.sources) - num_others]
        options = {
            **log.options,
            "events": [*old["events"], *log.options["events"]],  # type: ignore[misc]
            "delimiter": old["delimiter"] or log.options["delimiter"],
            "timestamp_unit": log.time_unit if old["timestamp_unit"] == "auto" else old["timestamp_unit"],
        }
        names = sorted({PurePath(file.path).name for split in self.manifest.splits.values() for file in split.files})
        rows = EventPart(
            name=str(self.folder),
            num_events=self.statistics.num_events,
            read=partial(self._read, names, [column.name for column in log.events]),
            pieces=[Piece(number, number + 1) for number in range(len(names))],
        )
        return replace(log, parts=(rows, *log.parts), sources=lambda: (*logs, *log.sources()), options=options)

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
                begin = pl.when(pl.col(WINDOW) > 0).then(self.config.filters.overlap).otherwise(0)
                rows = rows.with_columns(pl.col(lists).list.slice(begin))
            events = rows.select(USER_ID, *lists).explode(lists)
            raw = [
                ids.values.gather(events.get_column(name) - 1).alias(name)
                for name, ids in self.ids.items()
                if ids.summary.rule == DENSE
            ]
            yield Events(events.with_columns(raw))


def read_base(folder: Path, config: PreprocessConfig, rules: Mapping[str, str]) -> Base:
    """Open a dataset to append events to it, with these rules of ids.

    Raises a ConfigError or DataError if that is not possible.
    """
    manifest, ids = read_manifest(folder), read_earlier(folder)
    given, default = config.filters, Filters()
    names = ("min_user_events", "min_item_events", "min_length", "max_length")
    lossy = [name for name in names if getattr(given, name) != getattr(default, name)]
    rule = parse_split(config.split)
    lossy += ["the split"] * bool(rule.gap_ms or rule.eval_ms)
    hashed = [name for name, of in ids.items() if of.summary.rule not in (DENSE, KEEP)]
    reason = (
        "min_count gives the id 0 to values that may be frequent by now"
        if config.min_count or manifest.options.get("min_count")
        else f"{', '.join(lossy)} left out events that may count by now"
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
    for name, of in ids.items():
        # `auto` counts the values that it keeps.
        was_given = of.summary.rule == KEEP and of.summary.distinct is None
        if rules[name] not in (of.summary.rule, "" if was_given else AUTO):
            raise ConfigError(
                f"the rule of {name} is {rules[name]}, and the ids of {folder} are {of.summary.rule}; "
                f"give --ids as for that dataset, or {_AT_ONCE}"
            )
    return Base(folder=folder, config=config, manifest=manifest, statistics=read_statistics(manifest), ids=ids)


def continue_features(interactions: Interactions, folder: Path) -> Interactions:
    """Number the values of features as an earlier dataset does; raises a DataError if it is damaged."""
    manifest, context, items = read_manifest(folder), interactions.context, interactions.item_features
    earlier = {name: pl.Series(labels[1:], dtype=pl.String) for name, labels in manifest.context_labels.items()}
    for name in items.values.keys() & manifest.vocabulary_sizes.keys() - earlier.keys():
        earlier[name] = read_values(folder / vocabulary_name(name))
    context, items = _continue(context, earlier), _continue(items, earlier)
    return replace(interactions, context=context, item_features=items, feature_ids=manifest.ids)


def _continue(features: Features, earlier: Mapping[str, pl.Series]) -> Features:
    """Number values as an earlier dataset does, whose values are given by feature; further ones follow, ascending."""
    rows, values = features.rows, dict(features.values)
    for name in values.keys() & earlier.keys():
        known, found = earlier[name], values[name]
        if known.dtype != found.dtype:  # labels in the manifest are texts
            known, found = (pl.Series(map(str, series), dtype=pl.String) for series in (known, found))
        values[name] = pl.concat([known, found.filter(~found.is_in(known.implode()))])
        numbers = pl.int_range(len(values[name]) + 1, eager=True)
        ids = found.replace_strict(values[name], numbers[1:]).cast(pl.Int64)
        is_list = rows.schema[name] == pl.List
        numbered = (pl.element() if is_list else pl.col(name)).replace_strict(
            numbers[: len(found) + 1], pl.concat([numbers[:1], ids])
        )
        rows = rows.with_columns(pl.col(name).list.eval(numbered) if is_list else numbered)
    return replace(features, rows=rows, values=values)


def label_ids(values: pl.Series, earlier: IdSummary | None) -> IdSummary:
    """Return how the values of a feature became ids: 1, 2, ..., those of an earlier dataset first."""
    labels = [*map(str, values)]
    digest = hashlib.sha256(json.dumps(labels).encode()).hexdigest()
    versions = versions_of(earlier, len(labels), digest)
    return IdSummary(rule=DENSE, kind="text", distinct=len(labels), versions=versions)
