"""A piece of a raw file -> runs of events, and what has to be known of it; rows that cannot be read are counted."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evenrank.core.errors import DataError
from evenrank.datasets.schema import ITEM_ID, TIMESTAMP_MS, USER_ID
from evenrank.preprocess.build.buckets import Columns, Run, write_run
from evenrank.preprocess.build.key_table import TextValues, keys_of
from evenrank.preprocess.files.table import OPEN_QUOTE, BadRow, EventPart, Piece, first_bad_rows
from evenrank.preprocess.options import OnError

EVENTS_PER_RUN = 1 << 21


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRules:
    """What becomes of rows, the same for all pieces of a log."""

    folder: Path  # of the runs
    num_bits: int  # of the buckets
    texts: Mapping[str, TextValues]  # of the columns whose ids are text
    has_times: bool  # otherwise rows count as seconds


class ReadPiece(NamedTuple):
    """A piece of a raw file that was read."""

    number: int
    part: EventPart
    piece: Piece


class PieceSummary(NamedTuple):
    """What was read of a piece."""

    runs: Sequence[Run]
    num_bad: int
    first_bad: Sequence[BadRow]  # at most MAX_SHOWN; lines are counted from the begin of the piece
    num_lines: int
    first_ms: int
    last_ms: int


def read_piece(rules: ReadRules, task: ReadPiece) -> PieceSummary:
    """Write the events of a piece in runs. Ids become keys; those that are text are registered."""
    num_bad, first_bad, num_lines, num_rows = 0, list[BadRow](), 0, 0
    texts = {name: values.of_piece(task.number) for name, values in rules.texts.items()}
    runs, buffered = list[Run](), list[Columns]()
    first_ms, last_ms = 1 << 62, 0

    def flush() -> None:
        if buffered:
            events = {name: np.concatenate([part[name] for part in buffered]) for name in buffered[0]}
            path = rules.folder / f"run-{task.number:05d}-{len(runs):05d}"
            runs.append(write_run(path, events, rules.num_bits))
            buffered.clear()

    for batch in task.part.read(task.piece):
        num_bad += batch.num_bad
        first_bad = first_bad_rows([*first_bad, *batch.first_bad])
        num_lines = batch.last_line
        columns = {column.name: column for column in batch.good.iter_columns()}
        ids = {name: columns.pop(name) for name in (USER_ID, ITEM_ID)}
        keys = {name: texts[name].add(raw) if name in texts else keys_of(raw) for name, raw in ids.items()}
        values = {name: column.to_numpy() for name, column in columns.items()}
        if not rules.has_times:
            values[TIMESTAMP_MS] = np.arange(num_rows, num_rows + len(batch.good)) * 1000
            num_rows += len(batch.good)
        for events in task.part.expand(keys | values):
            if len(times := events[TIMESTAMP_MS]):
                first_ms, last_ms = min(first_ms, int(times.min())), max(last_ms, int(times.max()))
                buffered.append(events)
            if sum(len(part[USER_ID]) for part in buffered) >= EVENTS_PER_RUN:
                flush()
    flush()
    for of_column in texts.values():
        of_column.flush()
    return PieceSummary(runs, num_bad, first_bad, num_lines, first_ms, last_ms)


class Log(NamedTuple):
    """A log that was read."""

    runs: Sequence[Run]
    num_skipped: Counter[str]  # rows, by a description of the first ones of each part
    first_ms: int
    last_ms: dict[str, int]  # by name of the part, of those with events


def join_pieces(
    read: Iterable[tuple[ReadPiece, PieceSummary]],
    *,
    has_times: bool,
    on_error: OnError,
    on_stage: Callable[[str], None],
) -> Log:
    """Join all pieces in their order, and raise a DataError about rows that cannot be read, unless they are skipped."""
    num_events, first_ms, last_ms, num_skipped = 0, 1 << 62, dict[str, int](), Counter[str]()
    runs = list[Run]()
    for (name, source), pieces in itertools.groupby(read, lambda pair: (pair[0].part.name, pair[0].part.source)):
        num_bad, num_lines, first_bad = 0, 0, list[BadRow]()
        for _, piece in pieces:
            first_bad += [row._replace(line=row.line + num_lines) for row in piece.first_bad]
            num_bad += piece.num_bad
            num_lines += piece.num_lines
            before_ms = 0 if has_times else 1000 * num_events
            first_ms = min(first_ms, before_ms + piece.first_ms)
            if piece.runs:
                last_ms[name] = max(last_ms.get(name, 0), before_ms + piece.last_ms)
            runs += [run._replace(first_ms=before_ms) for run in piece.runs]
            num_events += sum(run.num_events for run in piece.runs)
            on_stage(f"reading {name}: {num_events:,} events")
        if num_bad:
            shown = first_bad_rows(first_bad)
            rows = "; ".join(f"line {row.line} ({row.text[:80]!r}): {row.reason}" for row in shown)
            description = f"{num_bad:,} bad row{'s' if num_bad > 1 else ''}, first {rows}"
            if on_error == "fail" or shown[0].reason == OPEN_QUOTE:
                remedy = "skip them with --on-error skip" if shown[0].reason != OPEN_QUOTE else "convert the file"
                raise DataError(f"{name}: {description}; fix them, or {remedy}")
            num_skipped[f"{source}: {description}; all skipped"] += num_bad
    return Log(runs, num_skipped, first_ms, last_ms)
