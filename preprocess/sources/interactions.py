"""The common form in which every source returns its interactions, whatever its raw files look like."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from evenrank.datasets.schema import ITEM_ID, USER_ID, IdKind, SourceFile
from evenrank.preprocess.files.table import EventPart
from evenrank.preprocess.log_config import TimestampUnit
from evenrank.preprocess.sources.features import Context


@dataclass(frozen=True, kw_only=True, slots=True)
class Interactions:
    """A dataset before its events are grouped by user."""

    parts: Sequence[EventPart]  # in file order
    sources: Callable[[], tuple[SourceFile, ...]]  # reads the raw files for their checksums
    context: Context | None = None
    num_actions: int | None  # None if the largest action is only known once all events are read
    time_unit: TimestampUnit = "ms"  # of the raw times; with `row`, those of events are undefined
    extra_events: Mapping[str, str] = field(default_factory=dict)  # types of further columns: int64, int32 or float32
    has_eval_log: bool = False  # whether events have a further column, IN_EVAL
    options: Mapping[str, object] = field(default_factory=dict)  # of the source, for the manifest
    id_kinds: Mapping[str, IdKind] = field(default_factory=lambda: {USER_ID: "int64", ITEM_ID: "int64"})
