"""Raw files -> runs of events by bucket; rows that cannot be read are counted."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import polars as pl

from evenrank.core.errors import DataError
from evenrank.core.files import replacing
from evenrank.datasets.schema import ITEM_ID, TIMESTAMP_MS, USER_ID
from evenrank.preprocess.build.buckets import Columns, Run, write_run
from evenrank.preprocess.config import OnError
from evenrank.preprocess.read.keys import TextValues, keys_of
from evenrank.preprocess.read.table import OPEN_QUOTE, BadRows, EventPart, Piece

EVENTS_PER_RUN = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRules:
    """What becomes of rows, the same for all pieces of a log."""

    folder: Path  # of the runs
    num_bits: int  # of the buckets
    texts: Mapping[str, TextValues]  # of the columns whose ids are text
    has_times: bool  # otherwise rows count as seconds
    keeps_bad: bool  # whether bad rows are written to files, too


class ReadPiece(NamedTuple):
    """A piece of a raw file that was read."""

    number: int
    part: EventPart
    piece: Piece


class PieceSummary(NamedTuple):
    """What was read of a piece."""

    runs: Sequence[Run]
    bad: BadRows  # whose lines are counted from the begin of the piece
    bad_files: Sequence[Path]  # Parquet with all bad rows, if they are kept
    dropped: Counter[str]  # rows without a value, by column
    num_lines: int
    first_ms: int
    last_ms: int


def read_piece(rules: ReadRules, task: ReadPiece) -> PieceSummary:
    """Write the events of a piece in runs. Ids become keys; those that are text are registered."""
    bad, bad_files, num_lines, num_rows = BadRows(), list[Path](), 0, 0
    texts = {name: values.of_piece(task.number) for name, values in rules.texts.items()}
    runs, buffered, dropped = list[Run](), list[Columns](), Counter[str]()
    first_ms, last_ms = 1 << 62, 0

    def flush() -> None:
        if buffered:
            events = {name: np.concatenate([part.pop(name) for part in buffered]) for name in [*buffered[0]]}
            path = rules.folder / f"run-{task.number:05d}-{len(runs):05d}"
            runs.append(write_run(path, events, rules.num_bits))
            buffered.clear()

    for batch in task.part.read(task.piece):
        if len(batch.bad):
            bad.add(batch.bad)
            if rules.keeps_bad:
                bad_files.append(rules.folder / f"bad-{task.number:05d}-{len(bad_files):05d}.parquet")
                with replacing(bad_files[-1]) as new:
                    batch.bad.write_parquet(new)
        dropped.update(batch.dropped)
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
    return PieceSummary(runs, bad, bad_files, dropped, num_lines, first_ms, last_ms)


class Log(NamedTuple):
    """A log that was read."""

    runs: Sequence[Run]
    num_skipped: Counter[str]  # rows, by a description of the first ones of each part and kind of reason
    spans: dict[str, tuple[int, int]]  # times of the first and the last event by name of the part, of those with events

    @property
    def limits_ms(self) -> tuple[int, int]:
        """Times of the first and the last event."""
        firsts, lasts = zip(*self.spans.values(), strict=True)
        return min(firsts), max(lasts)


def join_pieces(
    read: Iterable[tuple[ReadPiece, PieceSummary]],
    *,
    has_times: bool,
    on_error: OnError,
    rejects: BinaryIO | None,
    on_stage: Callable[[str], None],
) -> Log:
    """Join all pieces in their order, and raise a DataError about rows that cannot be read, unless they are skipped.

    All of them are written to `rejects`.
    """
    num_events, spans, num_skipped = 0, dict[str, tuple[int, int]](), Counter[str]()
    runs = list[Run]()
    for (name, source), pieces in itertools.groupby(read, lambda pair: (pair[0].part.name, pair[0].part.source)):
        bad, num_lines = BadRows(), 0
        for _, piece in pieces:
            bad.add_piece(piece.bad, num_lines)
            for column, count in piece.dropped.items():
                num_skipped[f"{source}: events without {column}, all skipped"] += count
            if rejects is not None:
                for path in piece.bad_files:
                    rows = pl.read_parquet(path, glob=False)
                    of_file = rows.select(pl.lit(source), pl.col("line") + num_lines, "reason", "text")
                    rejects.write(of_file.write_csv(include_header=False, quote_style="non_numeric").encode())
            num_lines += piece.num_lines
            before_ms = 0 if has_times else 1000 * num_events
            if piece.runs:
                first_ms, last_ms = spans.get(name, (1 << 62, 0))
                spans[name] = min(first_ms, before_ms + piece.first_ms), max(last_ms, before_ms + piece.last_ms)
            runs += [run._replace(first_ms=before_ms) for run in piece.runs]
            num_events += sum(run.num_events for run in piece.runs)
            on_stage(f"reading {name}: {num_events:,} events")
        if bad.counts:
            description, of_kinds = bad.describe()
            if on_error == "fail" or OPEN_QUOTE in bad.counts:
                remedy = "convert the file" if OPEN_QUOTE in bad.counts else "skip them with --on-error skip"
                raise DataError(f"{name}: {description}; fix them, or {remedy}")
            num_skipped.update({f"{source}: {of_kind}; all skipped": count for of_kind, count in of_kinds.items()})
    return Log(runs, num_skipped, spans)
