"""The data of all kinds of loader, and what the samples of each are, from the files alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from evenrank.dataloader import JaggedCollate, RandomData, RandomFeature, StochasticLength, dense, jagged
from evenrank.dataloader.random_batches import draw_samples
from evenrank.dataloader.rank_loader import make_rng
from evenrank.datasets.distributions import Lognormal, Uniform
from evenrank.datasets.schema import read_manifest
from tests.dataloader.stochastic import kept_events
from tests.datasets.crafted import add_columns, copy_dataset, set_columns, write_in_parts, write_manifest
from tests.datasets.logs import end_log

Values = Mapping[str, bytes]
"""Of a sample: each key's bytes, by field and key."""
Samples = dict[int, Values]
"""By sample id."""

HISTORY = 9  # events; the longest histories are longer
WEEK_MS = 7 * 86_400_000
START, START_MS = "2020-09-17", 1_600_300_800_000
DRAWN = StochasticLength(alpha=1.4, newest=1)  # 9^0.7: 4 events
_EMPTY = (3, 17, 41)  # rows without events


def make_data(out: Path) -> Path:
    """Write a dataset with columns of every kind, with users who have no events, and with requests; and as a log."""
    from evenrank.preprocess import PreprocessConfig, RequestRule, SyntheticConfig, preprocess

    synthetic = SyntheticConfig(num_users=43, lengths=Lognormal(mean=7, std=8, low=1, high=30))
    rule = RequestRule(seconds=2 * 86400)
    made = out.with_name("made")
    preprocess(
        PreprocessConfig(dataset="synthetic", out=made, seed=1, synthetic=synthetic, split="none", requests=rule)
    )
    add_columns(made)
    table, requests = pq.read_table(made / "train"), pq.read_table(made / "requests.parquet")
    users = table["user_id"].to_numpy()[[*_EMPTY]]
    lists = [field.name for field in table.schema if pa.types.is_list(field.type) and field.name != "tags"]
    columns = {name: table[name].to_pylist() for name in (*lists, "length")}
    for row in _EMPTY:
        for name in lists:
            columns[name][row] = []
        columns["length"][row] = 0
    for row, prices in enumerate(columns["price"]):
        prices[row % 4 :: 3] = [math.nan] * len(prices[row % 4 :: 3])  # also of all targets of some
    columns["price"][0][0] = -0.0  # which equals 0.0
    types = {name: table.schema.field(name).type for name in columns}
    changed = set_columns({name: pa.array(values, types[name]) for name, values in columns.items()})(table)
    pq.write_table(changed, made / "train" / "part-00000.parquet")
    pq.write_table(requests.filter(~np.isin(requests["user_id"].to_numpy(), users)), made / "requests.parquet")
    extra = {**read_manifest(made).extra_events, "price": "float32?"}
    write_manifest(replace(read_manifest(made), extra_events=extra), made)
    write_in_parts(made, out, rows_per_file=20, rows_per_group=6)
    log = copy_dataset(out, out.with_name("log"))
    contextual = {name: dtype for name, dtype in read_manifest(log).contextual.items() if name != "tags"}
    write_manifest(replace(read_manifest(log), contextual=contextual), log)  # no lists of a user are in logs
    end_log(log / "train")
    return out


class Rows(NamedTuple):
    """The rows of a dataset."""

    rows: Mapping[str, Sequence[Any]]
    """Per column of rows."""
    events: Mapping[str, NDArray[Any]]
    """Per column of events, those of all rows."""
    offsets: Sequence[int]
    left_out: tuple[str, ...] = ()
    """Columns that batches do not have."""

    def values(
        self,
        row: int,
        begin: int,
        end: int,
        num_candidates: int,
        *,
        is_request: bool = False,
        kinds: Sequence[int] = (),
        drawn_by: tuple[int, int, int] | None = None,
    ) -> Values:
        """Return what a batch has of a row's events begin..end-1, of which the last `num_candidates` are candidates.

        With `kinds`, histories have as many of each of these actions, and the target its weekday. With `drawn_by`, a
        seed, an epoch and the sample's id, they have the events that these draw.
        """
        ids, events = self.rows, self.events
        targets = end - num_candidates
        history = np.arange(max(begin, targets - HISTORY), targets)
        if kinds:
            of_kinds = [[event for event in range(begin, targets) if events["action"][event] == kind] for kind in kinds]
            share = HISTORY // len(kinds)
            history = np.array(sorted(event for kept in of_kinds for event in kept[-share:]), dtype=np.int64)
        if drawn_by is not None:
            seed, epoch, sample_id = drawn_by
            places = kept_events(targets - begin, HISTORY, DRAWN, seed=seed, epoch=epoch, sample_id=sample_id)
            history = begin + np.array(places, dtype=np.int64)
        labelled = np.arange(targets, end) if num_candidates else history
        values = {
            "features.item_id": events["item_id"][[*history, *range(targets, end)]].astype(np.int64),
            "features.action": events["action"][history].astype(np.int64),
            "labels.label": events["action"][labelled].astype(np.int64),
            "num_candidates": np.int64(num_candidates),
        }
        if "share" in ids:
            prices = events["price"][labelled].astype(np.float32)
            values |= {
                "features.user_id": np.int64(ids["user_id"][row]),
                "features.segment": np.int64(ids["segment"][row]),
                "float_features.share": np.float32(ids["share"][row]),
                "float_features.price": events["price"][history].astype(np.float32),
                "labels.label": events["dwell"][labelled].astype(np.int64),
                "float_labels.label": prices,
                "weights.weight": np.float32(ids["share"][row]) * ~np.isnan(prices),
                "known.known": np.flatnonzero(~np.isnan(prices)),
            }
        if "tags" in ids and "tags" not in self.left_out:
            values["features.tags"] = np.array(ids["tags"][row], dtype=np.int64)
        if kinds:
            values["features.weekday"] = np.int64(events["timestamp_ms"][targets] // 86_400_000 % 7)
        if is_request:
            values["request_ts_ms"] = np.int64(events["timestamp_ms"][targets])
        return {name: value.tobytes() for name, value in values.items()}

    def whole(self, num_candidates: int, first_id: int = 0, drawn_by: tuple[int, int] | None = None) -> Samples:
        """Return the samples that are whole rows; shorter ones are none. With `drawn_by`: a seed and an epoch."""
        return {
            first_id + row: self.values(
                row, begin, end, num_candidates, drawn_by=None if drawn_by is None else (*drawn_by, row)
            )
            for row, (begin, end) in enumerate(pairwise(self.offsets))
            if end - begin >= num_candidates
        }


_READ: dict[Path, Rows] = {}


def read_rows(data: Path) -> Rows:
    if data not in _READ:
        table = pq.read_table(data / "train")
        events, rows = {}, {}
        for field in table.schema:
            column = table[field.name]
            if field.name == "tags" or not pa.types.is_list(field.type):
                rows[field.name] = column.to_pylist()
            else:
                events[field.name] = column.combine_chunks().flatten().to_numpy()
        _READ[data] = Rows(rows, events, np.cumsum([0, *rows["length"]]).tolist())
    return _READ[data]


def samples_of_targets(
    data: Path,
    holds: Callable[[Rows, int, int], Any] = lambda of_data, row, event: True,
    *,
    max_targets: int = 1,
    min_history: int = 0,
    week: int | None = None,
    kinds: Sequence[int] = (),
) -> Samples:
    """Return samples, row by row: each event that qualifies is once one of the last `max_targets` of a sample."""
    of_data, found = read_rows(data), []
    weeks = (of_data.events["timestamp_ms"] - START_MS) // WEEK_MS
    for row, (begin, end) in enumerate(pairwise(of_data.offsets)):
        events = [event for event in range(begin + min_history, end) if week in (None, weeks[event])]
        events = [event for event in events if holds(of_data, row, event)]
        for first in range(0, len(events), max_targets):
            targets = events[first : first + max_targets]
            found.append(of_data.values(row, begin, targets[-1] + 1, len(targets), kinds=kinds))
    return dict(enumerate(found))


def samples_of_requests(data: Path, max_targets: int) -> Samples:
    """Return the requests, by time: what the user had done before, and the first events from each on."""
    of_data, table = read_rows(data), pq.read_table(data / "requests.parquet")
    row_of = {user: row for row, user in enumerate(of_data.rows["user_id"])}
    requests = sorted(
        zip(*(table[name].to_pylist() for name in ("request_ts_ms", "user_id", "history_end")), strict=True)
    )
    samples, next_of = {}, dict(enumerate(of_data.offsets[1:]))
    for number, (_, user, history_end) in reversed([*enumerate(requests)]):
        row = row_of[user]
        begin = of_data.offsets[row]
        event = begin + history_end
        end = min(next_of[row], event + max_targets)
        samples[number] = of_data.values(row, begin, end, end - event, is_request=True)
        next_of[row] = event
    return samples


RANDOM = RandomData(
    lengths=Uniform(low=1, high=14),
    items=Uniform(low=0, high=99),
    contextual={"tags": RandomFeature(values=Uniform(low=0, high=9), lengths=Uniform(low=0, high=4), max_length=3)},
    num_real=Uniform(low=0, high=6),
)


def drawn_samples(world_size: int, batch_size: int, num_batches: int, seed: int) -> Samples:
    """Return the samples of random batches, which depend on the number of ranks."""
    samples: Samples = {}
    for rank in range(world_size):
        for step in range(num_batches):
            rng = make_rng(seed, 0, step * world_size + rank)
            assert RANDOM.num_real is not None
            num_real = int(np.clip(RANDOM.num_real.sample(rng, 1)[0], 0, batch_size))
            store = draw_samples(RANDOM, rng, num_real, min_length=1, split="train")
            rows = Rows({}, dict(store.columns), store.offsets.tolist())
            starts = store.list_offsets["tags"]
            for row, values in rows.whole(1).items():
                tags = store.columns["tags"][starts[row] : starts[row + 1]].astype(np.int64).tobytes()
                samples[(step * world_size + rank) * batch_size + row] = {**values, "features.tags": tags}
    return samples


OWN: list[dict[str, Any]] = [
    {"item_id": [*range(index, index + index * 5 % 9)], "price": [index / 7] * (index % 3), "sample_ids": index}
    for index in range(45)
]
OWN_LENGTHS = {name: np.array([len(sample[name]) for sample in OWN]) for name in ("item_id", "price")}
OWN_COLLATE = JaggedCollate(
    {
        "item_id": jagged(),
        "price": jagged(torch.float32, field="prices"),
        "sample_ids": dense(fill=-1, dtype=torch.int64, shape=()),
    }
)


def own_samples() -> Samples:
    return {
        sample["sample_ids"]: {
            "features.item_id": np.array(sample["item_id"], dtype=np.int64).tobytes(),
            "prices.price": np.array(sample["price"], dtype=np.float32).tobytes(),
        }
        for sample in OWN
    }
