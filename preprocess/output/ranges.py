"""The events of a range of user hashes -> a file of each split.

Files end where ranges do, and the ranges depend on the number of events alone, so the bytes of a dataset depend neither
on buckets nor on how many ranges are written at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from evenrank.datasets.schema import ACTION, ITEM_ID, NUM_TARGETS, USER_ID, WINDOW, DataFile
from evenrank.preprocess.build.buckets import Buckets
from evenrank.preprocess.build.count_events import EventCounts, count_events
from evenrank.preprocess.build.filters import cut_windows
from evenrank.preprocess.build.ids import Ids
from evenrank.preprocess.build.inference_requests import request_table
from evenrank.preprocess.build.sequences import build_sequences
from evenrank.preprocess.build.splits import EVAL, SplitFacts, SplitRule
from evenrank.preprocess.options import Filters, RequestRule
from evenrank.preprocess.output.earlier_rows import EarlierRows, keep_file
from evenrank.preprocess.output.writer import split_file, split_schema, write_rows
from evenrank.preprocess.sources.features import FeatureLookup, Seen

# Target size. Building the sequences of so many takes about 0.15 GB, or twice as much if most times are equal.
EVENTS_PER_FILE = 1 << 21


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeRules:
    """What becomes of events, the same for all ranges of a dataset."""

    folder: Path  # of the dataset
    buckets: Buckets
    num_bits: int  # of a hash, which are the number of its range
    split: SplitRule
    facts: SplitFacts
    filters: Filters
    requests: RequestRule | None
    user_ids: Ids
    item_ids: Ids
    context: FeatureLookup
    items: FeatureLookup  # features of items that become columns of events
    extra_events: Mapping[str, str]  # types of the further columns of events
    earlier: EarlierRows | None  # to which events are appended


class RangeSummary(NamedTuple):
    """What the manifest says of a range."""

    files: Mapping[str, DataFile]  # by split; one without rows has none
    lengths: Mapping[str, NDArray[np.int64]]  # by split, the number of events of each row
    largest: Mapping[str, int]  # of user_id, item_id and action
    num_duplicates: int  # events


class WrittenRange(NamedTuple):
    """What was written of a range, and what is in it."""

    summary: RangeSummary
    events: EventCounts
    requests: pa.Table | None
    users: Seen
    items: Seen


def schema_of(rules: RangeRules, split: str) -> pa.Schema:
    """Return the columns of the files of a split."""
    counted = [WINDOW] * (rules.filters.window is not None)
    counted += [NUM_TARGETS] * (split == EVAL and rules.split.has_targets)
    columns = {**dict.fromkeys(counted, "int32"), **rules.context.dtypes}
    return split_schema(columns, {**rules.extra_events, **rules.items.dtypes})


def write_range(rules: RangeRules, index: int) -> WrittenRange:
    """Write the files of the range with this number."""
    columns, earlier = rules.buckets.read_range(index, rules.num_bits), rules.earlier
    if earlier is not None:
        is_same = earlier.is_same and earlier.num_bits == rules.num_bits and not len(columns[USER_ID])
        before = earlier.read(index, rules.num_bits)
        columns = {name: np.concatenate((before[name], values)) for name, values in columns.items()}
        earlier = earlier if is_same else None
    sequences, num_duplicates = build_sequences(columns, rules.user_ids.encode)
    features, items = rules.items.lookup(columns[ITEM_ID])
    events = {name: column.to_numpy() for name, column in zip(features.columns, features.iter_columns(), strict=True)}
    events = {**sequences.events, ITEM_ID: rules.item_ids.encode(columns[ITEM_ID]), **events}
    sequences = replace(sequences, events=events)
    # Which leaves no reference to the keys of users and items.
    columns = {name: sequences.events[name] for name in (ITEM_ID, ACTION)} | {USER_ID: sequences.user_ids}
    divided = rules.split.divide(sequences, rules.facts)
    files, lengths, seen = {}, {}, []
    for split, rows in divided.items():
        # Windows would separate targets from the events before them, so rows with targets are not cut.
        rows = rows if rows.num_targets.any() else cut_windows(rows, rules.filters)
        context, users = rules.context.lookup(rows.user_keys)
        seen.append(users)
        lengths[split] = rows.lengths
        name = split_file(split, index)
        if len(rows) and earlier is not None:
            keep_file(earlier.folder, name, rules.folder)
            files[split] = earlier.files[name]
        elif len(rows):
            files[split] = write_rows(rules.folder, name, schema_of(rules, split), rows, context)
    known, unknown = (np.unique(np.concatenate(parts)) for parts in zip(*seen, strict=True))
    largest = {name: int(values.max(initial=-1)) for name, values in columns.items()}
    return WrittenRange(
        RangeSummary(files, lengths, largest, num_duplicates),
        events=count_events(sequences, divided),
        requests=None if rules.requests is None else request_table(sequences, rules.requests),
        users=Seen(known, unknown),
        items=items,
    )
