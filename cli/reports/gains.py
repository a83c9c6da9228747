"""What balancing gains, as one table: of `simulate`, `inspect`, `inspect-balance` and `demo`."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from evenrank.cli import console
from evenrank.cli.options import CostOptions, StepOptions, has_layers

if TYPE_CHECKING:
    from rich.table import Table

    from evenrank.dataloader.balance.metrics.step_metrics import MetricsSummary, StepMetrics

COLUMNS = {  # how each shows the numbers of a gain
    "ranks": "{ranks:,}",
    "strategy": "{strategy}",
    "idle\nbefore": "{idle_before:.1%}",
    "idle\nafter": "{idle_after:.1%}",
    "speed-\nup": "{speedup:.2f}x",
    "of a step": "{speedup_of_a_step:.2f} \N{PLUS-MINUS SIGN} {spread_of_a_step:.2f}",
    "bound": "{ratio_after:.3f}",
    "one": "{one_sample:.0%}",
    "moved": "{moved_tokens:.0%}",
}
EXPLANATION = """\
idle        share of rank time, of all steps together, spent waiting for the
            heaviest rank of each step
speed-up    total time of the steps before balancing / after; of a step: the
            median of single steps, and half of their 5-95 % range
bound       heaviest load after balancing / the least possible, mean of steps
one         steps whose time one sample sets: more balancing is no help
moved       share of tokens whose samples move to another rank
"""


def describe_settings(
    samples: StepOptions | None = None, model: CostOptions | None = None, *, is_cut: bool = True
) -> str:
    """Return the settings that decide on a gain: of a step, and the cost with its layers, if it has some."""
    samples, model = samples or StepOptions(), model or CostOptions()
    lengths = f"of at most {samples.max_history_length:,} events" if is_cut else "as long as logged"
    layers = f" of {model.layers} layers of width {model.hidden} with {model.heads} heads" * has_layers(model.cost)
    return f"{samples.batch_size} samples per rank, histories {lengths}; cost: {model.cost}{layers}"


class Gain(NamedTuple):
    """The steps of one way to balance on one number of ranks."""

    ranks: int
    label: str  # the strategy
    steps: "Sequence[StepMetrics]"
    window: int = 1
    has_exchange: bool = True
    unit: float = 1.0  # in which loads are, as a multiple of that of the cost
    fixed: float = 0.0  # part of all loads that balancing cannot change, in units of the cost

    @property
    def summary(self) -> "MetricsSummary":
        """All steps together."""
        from evenrank.dataloader.balance.metrics.step_metrics import summarize

        return summarize(self.steps)

    @property
    def num_samples(self) -> int:
        """Samples of all steps."""
        return sum(step.samples for step in self.steps)

    def speedup_of_a_step(self) -> tuple[float, float]:
        """Return the median of the speed-ups of single steps or windows, and half of their 5-95 % range."""
        import numpy as np

        if not self.steps:
            return 1.0, 0.0
        starts = np.arange(0, len(self.steps), self.window)
        before, after = (
            np.add.reduceat(np.array([int(loads.max()) for loads in of_steps], dtype=np.float64), starts)
            for of_steps in ([step.before for step in self.steps], [step.after for step in self.steps])
        )
        low, median, high = np.percentile(np.where(after > 0, before / np.maximum(after, 1), 1), (5, 50, 95)).tolist()
        return median, (high - low) / 2

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the row by name, and the median time to plan a step, None if it is not known."""
        summary, (median, spread) = self.summary, self.speedup_of_a_step()
        names = ("idle_before", "idle_after", "speedup", "ratio_after", "one_sample", "longest")
        return {
            "ranks": self.ranks,
            "strategy": self.label,
            **{name: getattr(summary, name) for name in names},
            "moved_tokens": summary.moved_tokens if self.has_exchange else 0.0,
            "speedup_of_a_step": median,
            "spread_of_a_step": spread,
            "plan_seconds": statistics.median([step.plan_seconds for step in self.steps] or [0.0]) or None,
        }

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        numbers = self.numbers()
        return tuple(cell.format(**numbers) for cell in COLUMNS.values())


def print_gains(gains: Sequence[Gain], *notes: str) -> None:
    """Print the table of gains, what its columns mean, and further notes."""
    numbers = [gain.numbers() for gain in gains]
    console.print_result(gains_table(gains), gains=numbers)
    if known := [1e3 * of_gain["plan_seconds"] for of_gain in numbers if of_gain["plan_seconds"]]:
        plan = f"Planning a step took {min(known):.2g} to {max(known):.2g} ms, on one thread of this machine."
        notes = (*notes, plan, "The rest is what the cost says; training measures it (training.StepTimer).")
    console.print_result("\n".join([EXPLANATION.rstrip(), *notes, ""]))


def gains_table(gains: Sequence[Gain]) -> "Table":
    """Return a table with a row for each gain, less than 80 columns wide."""
    table = console.new_table(*COLUMNS, left=["strategy"], narrow=True)
    for gain in gains:
        table.add_row(*gain.cells())
    return table
