"""What the log of a dataset contains, each event counted once, and what its split leaks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from evenrank.core.errors import DataError
from evenrank.datasets.schema import MAX_HISTORY_LENGTH, REMEDY, Manifest

DAY_MS = 86_400_000
DURATIONS_MS = {"m": DAY_MS // 1440, "h": DAY_MS // 24, "d": DAY_MS, "w": 7 * DAY_MS}
_LEAVE_LAST = "inherent to leave-last, --split time:TIMESTAMP has none"
_MANY_COLD = 0.1  # share of eval's events from which items without training are worth a warning


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Counts of the events that preprocessing kept; how rows repeat them, in windows or in eval, has no effect.

    Of `eval` with targets, only these count: the events before them are in `train`. Days and hours are those of UTC.
    """

    split: str
    """The rule of the split, such as `leave-last:1`."""
    by: str
    """What the split divides: users (`user`), the last events of each user from earlier ones (`last`), late events from
    early ones (`time`), or nothing."""
    events: Mapping[str, int]
    """By split."""
    users: int
    items: int
    first_ms: int
    last_ms: int
    largest_day_ms: int
    largest_day_events: int
    hours_of_day: Sequence[int]
    """Events of each hour of the day: [24]."""
    bins: Sequence[int]
    """Events over time, in consecutive bins of equal width."""
    bin_start_ms: int
    bin_width_ms: int
    ranks: Sequence[int]
    """Some ranks of items by popularity, from 1, whose items have `ranks_events`."""
    ranks_events: Sequence[int]
    top_events: int
    """Events of the most popular 1 % of the items, rounded up."""
    early_eval_events: int
    """Events of eval that are older than the newest one of train."""
    eval_items: int
    cold_items: int
    """Items of events of eval that no event of train has."""
    cold_item_events: int
    eval_users: int
    cold_users: int
    """Users of eval without an event in train."""
    cut_share: float | None = None
    """Share of the events in rows of train that are before the newest `MAX_HISTORY_LENGTH` of their row, which loaders
    leave out unless `max_history_length` says otherwise. None: unknown, as in older datasets."""

    def __post_init__(self) -> None:
        if not self.num_events == sum(self.hours_of_day) == sum(self.bins) or len(self.hours_of_day) != 24:
            raise ValueError("the counts do not add up")
        if self.by not in ("user", "last", "time", ""):
            raise ValueError(f"no split is by {self.by!r}")
        self.describe()  # raises an error where a number is missing

    @property
    def num_events(self) -> int:
        """Events of the log, in all splits."""
        return sum(self.events.values())

    def describe(self) -> dict[str, str]:
        """Return the statistics in words, by label, with a verdict on each number that could be a leak."""
        total, in_eval = self.num_events, self.events.get("eval", 0)
        largest_hour, num_days = max(self.hours_of_day), self.last_ms // DAY_MS - self.first_ms // DAY_MS + 1
        hour = self.hours_of_day.index(largest_hour)
        lines = {
            "events": f"{total:,}, each counted once",
            "users": f"{self.users:,}",
            "items": f"{self.items:,}",
            "density": f"{100 * total / (self.users * self.items):.3g} % of users x items",
            "time": f"{_time(self.first_ms)} to {_time(self.last_ms)} UTC",
            "events per day": f"{_rounded(total / num_days)} on average, {self.largest_day_events:,} on the busiest, "
            f"{_time(self.largest_day_ms)[:10]}",
            "events per hour": f"{_rounded(total / num_days / 24)} on average, most from {hour:02}:00 to {hour:02}:59 "
            f"UTC, {_percent(largest_hour, total)}",
            "popularity": f"{_percent(self.top_events, total)} of events have one of the most popular 1 % of items",
        }
        if self.cut_share:
            beyond = (
                f"{100 * self.cut_share:.2g} % of train is before the newest {MAX_HISTORY_LENGTH} events of its rows"
            )
            lines["cut off"] = f"{beyond}, which loaders leave out (max_history_length)"
        if in_eval:
            early, of_items, of_users = self._verdicts()
            cold_events = f"{self.cold_item_events:,} or {_percent(self.cold_item_events, in_eval)} of its events"
            lines |= {
                "eval events": f"{in_eval:,} ({_percent(in_eval, total)})",
                "eval events before the newest train event": f"{self.early_eval_events:,} ({early})",
                "cold items of eval": f"{self.cold_items:,} of {self.eval_items:,}, in {cold_events} ({of_items})",
                "cold users of eval": f"{self.cold_users:,} of {self.eval_users:,} ({of_users})",
            }
        return lines

    def _verdicts(self) -> tuple[str, str, str]:
        """Return what early events, cold items and cold users mean for this kind of split."""
        early = "LEAK in time; " + ("the logs overlap" if self.by == "time" else _LEAVE_LAST)
        if self.by == "user" or not self.early_eval_events:
            early = "expected: the split is by user, not by time" if self.by == "user" else "expected: no leak in time"
        if self.by == "time":
            return early, "expected: new since the split", "expected: new since the split"
        many = self.cold_item_events > _MANY_COLD * self.events["eval"]
        of_items = "warning: untrained embeddings; --k-core leaves out rare items" if many else "expected: rare items"
        if self.by == "user":
            num_known = self.eval_users - self.cold_users
            of_users = "LEAK: the others are in train" if num_known else "expected: the split is by user"
        else:
            of_users = "warning: no history in train" if self.cold_users else "expected: all have a history in train"
        return early, of_items, of_users


def read_statistics(manifest: Manifest) -> Statistics:
    """Return the statistics in a manifest; raises a DataError if they are missing or malformed."""
    try:
        return Statistics(**manifest.options["statistics"])
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise DataError(f"the manifest of {manifest.dataset} has no valid statistics ({error}); {REMEDY}") from error


def _time(milliseconds: int) -> str:
    return f"{datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds):%Y-%m-%d %H:%M:%S}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
