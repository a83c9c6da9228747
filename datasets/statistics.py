"""What the log of a dataset contains, each event counted once, and what its split leaks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta

from evenrank.core.errors import DataError
from evenrank.datasets.schema import REMEDY, Manifest

OPTION = "statistics"  # the entry of a manifest's options
_LARGEST = 253_402_300_799_999  # the last millisecond of the year 9999; counts are smaller too
_MANY_COLD = 0.1  # share of eval's events from which items without training are worth a warning


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Counts of the events that preprocessing kept; how rows repeat them, in windows or in eval, has no effect.

    Of `eval`, only the events that are to be predicted count if its rows have numbers of targets: those before them are
    in `train`. Days and hours are those of UTC.
    """

    split: str
    """The rule of the split, such as `leave-last:1`."""
    events: Mapping[str, int]
    """By split."""
    users: int
    items: int
    first_ms: int
    last_ms: int
    days: int
    """From the first to the last one, including those without events."""
    largest_day_ms: int
    largest_day_events: int
    hours_of_day: Sequence[int]
    """Events of each hour of the day: [24]."""
    bin_start_ms: int
    bin_width_ms: int
    bin_unit: str
    """Name of the width of a bin, such as `day`."""
    bins: Sequence[int]
    """Events over time, in consecutive bins of equal width."""
    ranks: Sequence[int]
    """Some ranks of items by popularity, from 1."""
    ranks_events: Sequence[int]
    """Events of the items of these ranks."""
    top_events: int
    """Events of the most popular 1 % of the items, rounded up."""
    gini: float
    """Gini coefficient of the events of the items: 0 if all have equally many."""
    early_eval_events: int
    """Events of eval that are older than the newest one of train."""
    eval_items: int
    cold_items: int
    """Items of events of eval that no event of train has."""
    cold_item_events: int
    eval_users: int
    cold_users: int
    """Users of eval without an event in train."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            is_text = name in ("split", "bin_unit")
            if any(isinstance(one, str) != is_text or (not is_text and abs(one) > _LARGEST) for one in values):
                raise ValueError(f"{name} is {value!r}")
        totals = {self.num_events, sum(self.hours_of_day), sum(self.bins)}
        if len(totals) > 1 or 0 in (self.num_events, self.users, self.items, self.days) or len(self.hours_of_day) != 24:
            raise ValueError("the counts do not add up")

    @property
    def num_events(self) -> int:
        """Events of the log, in all splits."""
        return sum(self.events.values())

    def describe(self) -> dict[str, str]:
        """Return the statistics in words, by label, with a verdict on each number that could be a leak."""
        num_events, largest_hour = self.num_events, max(self.hours_of_day)
        hour, num_eval = self.hours_of_day.index(largest_hour), self.events.get("eval", 0)
        lines = {
            "events": f"{num_events:,}, each counted once",
            "users": f"{self.users:,}",
            "items": f"{self.items:,}",
            "density": f"{100 * num_events / (self.users * self.items):.3g} % of users x items",
            "time": f"{format_time(self.first_ms)} to {format_time(self.last_ms)} UTC",
            "events per day": f"{num_events / self.days:,.0f} on average, {self.largest_day_events:,} on the busiest, "
            f"{format_time(self.largest_day_ms)[:10]}",
            "events per hour": f"{num_events / self.days / 24:,.0f} on average, most from {hour:02}:00 to {hour:02}:59 "
            f"UTC ({_percent(largest_hour, num_events)})",
            "popularity": f"{_percent(self.top_events, num_events)} of events are of the top 1 % of items; Gini "
            f"coefficient {self.gini:.2f}",
        }
        if num_eval:
            of_eval = f"{self.cold_item_events:,} or {_percent(self.cold_item_events, num_eval)} of its events"
            early, of_items, of_users = self._verdicts(num_eval)
            lines |= {
                "eval events": f"{num_eval:,} ({_percent(num_eval, num_events)})",
                "eval events before the newest train event": f"{self.early_eval_events:,} ({early})",
                "cold items of eval": f"{self.cold_items:,} of {self.eval_items:,}, in {of_eval} ({of_items})",
                "cold users of eval": f"{self.cold_users:,} of {self.eval_users:,} ({of_users})",
            }
        return lines

    def _verdicts(self, num_eval: int) -> tuple[str, str, str]:
        """Return what to think of early events, cold items and cold users, which depends on the kind of split."""
        kind = self.split.partition(":")[0]
        if not self.early_eval_events:
            early = "expected: no leak in time"
        elif kind == "user":
            early = "expected: the split is by user, not by time"
        elif kind == "leave-last":
            early = "LEAK in time, inherent to leave-last; --split time:TIMESTAMP has none"
        else:
            early = "LEAK in time; preprocess again"
        if kind == "time":
            of_items, of_users = "expected: new since the split", "expected: new since the split"
        else:
            of_items = "expected: rare items"
            if self.cold_item_events > _MANY_COLD * num_eval:
                of_items = "warning: untrained embeddings; --k-core leaves out rare items"
            num_expected = self.eval_users if kind == "user" else 0
            of_users = "expected: the split is by user" if kind == "user" else "expected: all have a history in train"
            if self.cold_users != num_expected:
                of_users = "LEAK: the others are in train" if kind == "user" else "warning: no history in train"
        return early, of_items, of_users


def read_statistics(manifest: Manifest) -> Statistics:
    """Return the statistics in a manifest; raises a DataError if they are missing or malformed."""
    try:
        return Statistics(**manifest.options[OPTION])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"the manifest of {manifest.dataset} has no valid {OPTION} ({error}); {REMEDY}") from error


def format_time(milliseconds: int) -> str:
    """Return a time since 1970 as date and time of day in UTC."""
    return f"{datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds):%Y-%m-%d %H:%M:%S}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"
