"""What the training benchmark has to show, and whether the rows of a table show it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from end_to_end.columns import Row, comparison
from end_to_end.table import NOTHING, with_noise
from rendering import markdown_tables

EVEN_RATIOS = {"lpt-swap": 1.01, "min-move": 1.02}
"""Largest step time of a strategy, over that of perfectly even batches."""
EXPOSED = 0.005
"""Largest share of a step that balancing exposes."""
MFU = 0.30
"""Smallest MFU of the best run."""
_PERCENT = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A target, and what was measured."""

    target: str
    """What is asked for."""
    measured: str = ""
    """The number and its noise."""
    margin: float | None = None
    """By how much the target is met, as a fraction; negative: by how much it is missed. None: nothing was measured."""
    tolerance: float = 0.0
    """A miss by less than this is noise: neither met nor missed."""

    @property
    def met(self) -> bool:
        """Whether it was measured, and is met."""
        return self.margin is not None and self.margin >= 0

    @property
    def outcome(self) -> str:
        """`met`, `missed` or `within the noise`, and by how much."""
        if self.margin is None:
            return "not measured"
        by = f"{abs(self.margin) * _PERCENT:.2f} percentage points"
        if self.met:
            return f"met, {by} to spare"
        return f"missed by {by}" if self.margin < -self.tolerance else f"within the noise, {by} short"


def check(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """Return the verdicts on the rows of a table. Runs are known by their settings; see `comparison`."""
    found = comparison(rows)
    return (
        *(_even(strategy, limit, found) for strategy, limit in EVEN_RATIOS.items()),
        _as_fast(found),
        *(_exposed(strategy, found) for strategy in EVEN_RATIOS),
        _utilization(rows),
    )


def markdown_table(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts as a table in Markdown."""
    rows = [(one.target, one.measured or NOTHING, one.outcome) for one in verdicts]
    return markdown_tables.table(("target", "measured", "outcome"), rows)


def _even(strategy: str, limit: float, found: Mapping[str, Row]) -> Verdict:
    target = f"{strategy}: step at most {limit} of a perfectly even one"
    row = found.get(strategy)
    ratio = row.evenness.to_even if row and row.evenness else None
    if ratio is None:
        return Verdict(target=target)
    return Verdict(target=target, measured=with_noise(ratio, 4), margin=limit - ratio.value)


def _as_fast(found: Mapping[str, Row]) -> Verdict:
    """Compare two runs. They were measured at different times, so the noise of their rounds is allowed for."""
    target = "lpt-swap: at least as fast as karmarkar-karp"
    one, other = (found.get(strategy) for strategy in ("lpt-swap", "karmarkar-karp"))
    if not (one and other and one.speed and other.speed):
        return Verdict(target=target)
    ratio = one.speed.tokens_per_second.over(other.speed.tokens_per_second)
    return Verdict(target=target, measured=with_noise(ratio, 4), margin=ratio.value - 1, tolerance=ratio.noise)


def _exposed(strategy: str, found: Mapping[str, Row]) -> Verdict:
    target = f"{strategy}: balancing exposes at most {EXPOSED * _PERCENT:g} % of a step"
    row = found.get(strategy)
    exposed = row.evenness.exposed if row and row.evenness else None
    if exposed is None:
        return Verdict(target=target)
    measured = with_noise(exposed, 2, scale=_PERCENT, unit=" %")
    return Verdict(target=target, measured=measured, margin=EXPOSED - exposed.value)


def _utilization(rows: Sequence[Row]) -> Verdict:
    target = f"MFU of the best run at least {MFU * _PERCENT:g} %"
    measured = [(row.speed.mfu, row.name) for row in rows if row.speed and row.speed.mfu]
    if not measured:
        return Verdict(target=target)
    best, name = max(measured)
    return Verdict(target=target, measured=f"{best * _PERCENT:.1f} % ({name})", margin=best - MFU)
