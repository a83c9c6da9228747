"""Rows of the training benchmark as tables: for the terminal and, of the same columns, in Markdown.

There are three tables, so that each fits a terminal of 120 characters: how fast the runs are, what balancing does, and
what the ranks do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from end_to_end.reports.columns import NO_EXCHANGE, Evenness, Row, Speed, comparison
from end_to_end.results import Spread
from evenrank.cli import console
from rendering import markdown_tables

NOTHING = "-"
_WIDTH, _NAME_WIDTH = 120, 26  # of the tables in the terminal, and at most of a name there


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a table."""

    header: tuple[str, ...]
    """Lines of the header."""
    cell: Callable[[Row], str]
    """Returns the text of a row."""
    note: str = ""
    """What the numbers are, if the header does not say it."""


_MAX_REASON = 24  # letters that fit beside a name; the report has longer ones in full


def _name(row: Row) -> str:
    if row.failure is None:
        return row.name
    return f"{row.name} (failed: {row.failure})" if len(row.failure) <= _MAX_REASON else f"{row.name} (failed)"


def _speed(text: Callable[[Speed], str]) -> Callable[[Row], str]:
    return lambda row: NOTHING if row.speed is None else text(row.speed)


def _evenness(text: Callable[[Evenness], str]) -> Callable[[Row], str]:
    return lambda row: NOTHING if row.evenness is None else text(row.evenness)


def with_noise(spread: Spread | None, digits: int, *, scale: float = 1.0, unit: str = "") -> str:
    """Return a number and half the range of its rounds: `1.003 ±0.001`."""
    if spread is None:
        return NOTHING
    text = f"{spread.value * scale:.{digits}f}"
    return text + (f" ±{spread.noise * scale:.{digits}f}" if spread.noise else "") + unit


def _range(values: Sequence[float], digits: int) -> str:
    """Return the smallest and the largest number, or one if they look the same."""
    ends = [f"{value:.{digits}f}" for value in (min(values), max(values))] if values else [NOTHING]
    return "..".join(dict.fromkeys(ends))


def _percent(fraction: float | None, digits: int = 1) -> str:
    return NOTHING if fraction is None else f"{fraction:.{digits}%}"


def _added(speed: Speed) -> str:
    return NOTHING if speed.added is None else f"{speed.added.value - 1:+.1%}"


def _number(value: float | Spread | None, digits: int, *, scale: float = 1.0) -> str:
    number = value.value if isinstance(value, Spread) else value
    return NOTHING if number is None else f"{number * scale:.{digits}f}"


SPEED = (
    Column(header=("run",), cell=_name),
    Column(header=("GPUs",), cell=lambda row: str(row.gpus)),
    Column(header=("steps",), cell=_speed(lambda speed: f"{speed.steps}"), note="measured, with live balancing."),
    Column(
        header=("step", "ms"),
        cell=_speed(lambda speed: f"{speed.step_ms:.2f}"),
        note="median; a step's time is the mean over ranks.",
    ),
    Column(header=("p95", "ms"), cell=_speed(lambda speed: f"{speed.step_p95_ms:.2f}"), note="of the same."),
    Column(
        header=("slowest", "ms"),
        cell=_speed(lambda speed: f"{speed.slowest_ms:.2f}"),
        note="median over steps of the step's slowest rank.",
    ),
    Column(
        header=("1,000", "tokens/s"),
        cell=_speed(lambda speed: f"{speed.tokens_per_second.value / 1e3:,.1f}"),
        note="of all data-parallel ranks, over the time of all steps measured.",
    ),
    Column(
        header=("TFLOP/s",),
        cell=_speed(lambda speed: f"{speed.tflops:.{'1f' if speed.tflops >= 1 else '1g'}}"),  # a CPU has 0.0003
        note="model FLOPs, of a GPU.",
    ),
    Column(header=("MFU",), cell=_speed(lambda speed: _percent(speed.mfu)), note="of the GPU's dense bf16 peak."),
    Column(
        header=("speed-up",),
        cell=_speed(lambda speed: with_noise(speed.speedup, 3)),
        note="tokens/s over those of the first measured run of the chain; ± is half the range over pairs of rounds.",
    ),
    Column(header=("adds",), cell=_speed(_added), note="tokens/s, compared with the run that it adds to."),
    Column(
        header=("memory", "GiB"),
        cell=_speed(lambda speed: _range(speed.peak_gib, 1)),
        note="largest allocation of a rank: smallest..largest over ranks.",
    ),
)
BALANCE = (
    Column(header=("run",), cell=_name),
    Column(
        header=("load", "before"),
        cell=_evenness(lambda even: _number(even.load_before, 3)),
        note="of the heaviest rank over the ranks' mean, mean over batches.",
    ),
    Column(
        header=("load", "after"), cell=_evenness(lambda even: _number(even.load_after, 3)), note="of what is trained."
    ),
    Column(
        header=("step /", "even"),
        cell=_evenness(lambda even: with_noise(even.to_even, 3)),
        note="step time over that with perfectly even batches, which give every rank the same lengths, of the step's "
        "mean cost: medians of each batch, the mean over batches, the median over rounds; ± is half the range of the "
        "rounds.",
    ),
    Column(
        header=("prepared", "/ even"),
        cell=_evenness(lambda even: _number(even.prepared_to_even, 3)),
        note="the same with batches that were balanced before the clock started.",
    ),
    Column(
        header=("exposed", "%"),
        cell=_evenness(lambda even: with_noise(even.exposed, 2, scale=100)),
        note="by which live balancing makes a step longer than prepared batches do, computed likewise.",
    ),
    Column(
        header=("exposed", "ms"),
        cell=_evenness(lambda even: _number(even.exposed_ms, 2)),
        note="the same in ms.",
    ),
    Column(
        header=("with", "stalls %"),
        cell=_evenness(lambda even: _number(even.exposed_mean, 2, scale=100)),
        note="the same by means of batches and rounds instead of medians, so that rare stalls count.",
    ),
    Column(
        header=("moved", "samples", "/ tokens"),
        cell=_evenness(lambda even: " / ".join(_percent(part, 0) for part in (even.moved_samples, even.moved_tokens))),
        note="share of samples, and of their tokens, that another rank trains than had loaded them.",
    ),
)
RANKS = (
    Column(header=("run",), cell=_name),
    Column(
        header=("compute", "ms"),
        cell=_evenness(lambda even: f"{even.mean_compute_ms:.2f}"),
        note="the encoder's forward to the end of its backward, mean over ranks and steps.",
    ),
    Column(
        header=("heaviest", "ms"),
        cell=_evenness(lambda even: f"{even.heaviest_ms:.2f}"),
        note="the same of each step's heaviest rank, mean over steps.",
    ),
    Column(
        header=("heaviest", "/ mean"), cell=_evenness(lambda even: f"{even.heaviest_ms / even.mean_compute_ms:.3f}")
    ),
    Column(
        header=("wait", "ms"),
        cell=_evenness(lambda even: f"{even.wait_ms:.2f}"),
        note="the rest of the mean step: waiting for other ranks, embeddings, optimizer.",
    ),
    Column(
        header=("of each rank, ms",),
        cell=_evenness(lambda even: _range(even.compute_ms, 2)),
        note="mean compute time of a rank over steps: smallest..largest.",
    ),
    Column(
        header=("slowest rank",),
        cell=_evenness(lambda even: f"{even.slowest_rank} ({max(even.compute_ms) / even.mean_compute_ms - 1:+.1%})"),
        note="the largest of these, and how far above the ranks' mean.",
    ),
)


def terminal_table(columns: Sequence[Column], rows: Iterable[Row]) -> Table:
    """Return a table for the terminal; long names are wrapped."""
    name = "\n".join(columns[0].header)
    table = console.new_table(*("\n".join(column.header) for column in columns), left=[name], narrow=True)
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    table.columns[0].no_wrap = False
    table.columns[0].max_width = _NAME_WIDTH
    # On a narrower terminal, or in a file, lines are longer than that, rather than names and numbers cut off.
    table.width = Console(width=_WIDTH).measure(table).maximum
    return table


def markdown_table(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """Return a table in Markdown."""
    headers = [" ".join(column.header) for column in columns]
    return markdown_tables.table(headers, [[column.cell(row) for column in columns] for row in rows])


def notes(columns: Sequence[Column]) -> str:
    """Return what the columns are, as a list in Markdown."""
    return "".join(f"- {' '.join(column.header)}: {column.note}\n" for column in columns if column.note)


EVEN_RATIOS = {"lpt-swap": 1.01, f"lpt-swap{NO_EXCHANGE}": 1.01, "min-move": 1.02}
"""Largest step time of a strategy, over that of perfectly even batches."""
EXPOSED = 0.005
"""Largest share of a step that balancing exposes."""
MFU = 0.35
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


def check_targets(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """Return the verdicts on the rows of a table. Runs are known by their settings; see `comparison`."""
    found = comparison(rows)
    return (
        *(_even(strategy, limit, found) for strategy, limit in EVEN_RATIOS.items()),
        _as_fast(found),
        *(_exposed(strategy, found) for strategy in EVEN_RATIOS),
        _utilization(rows),
    )


def verdict_table(verdicts: Sequence[Verdict]) -> str:
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
