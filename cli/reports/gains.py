"""What balancing gains, as one table: of `simulate`, `inspect`, `inspect-balance` and `demo`."""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from evenrank.cli import console
from evenrank.cli.options import CostOptions, StepOptions, has_layers

if TYPE_CHECKING:
    from rich.table import Table

    from evenrank.dataloader.balance.metrics.step_metrics import MetricsSummary, StepMetrics

_WIDTH = 79  # of text, in characters
_COLUMNS = {  # how each shows the numbers of a gain
    "idle\nbefore": "{idle_before:.1%}",
    "idle\nafter": "{idle_after:.1%}",
    "speed-\nup": "{speedup:.2f}x",
    "per step": "{speedup_of_a_step:.2f} \N{PLUS-MINUS SIGN} {spread_of_a_step:.2f}",
    "bound": "{ratio_after:.3f}",
    "one": "{one_sample:.0%}",
    "moved": "{moved_tokens:.0%}",
}
EXPLANATION = {
    "idle": "share of rank time spent waiting for the heaviest rank of a step, over all steps",
    "speed-up": "time of all steps before balancing / after; per step: the median of single steps, and half of their "
    "5-95 % range",
    "bound": "heaviest rank after balancing / the lowest possible, mean of steps",
    "one": "share of steps that last as long as their longest sample, which balancing cannot shorten",
    "moved": "share of tokens whose samples move to another rank",
}
PREDICTED = "numbers are predictions of the cost model; a StepTimer measures them in your job."


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
    label: str  # the strategy, or the model in a table that compares models
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

    def numbers(self, compared: str = "strategy") -> dict[str, Any]:
        """Return the numbers of the row by name, and the median time to plan a step, None if it is not known."""
        summary, (median, spread) = self.summary, self.speedup_of_a_step()
        names = ("idle_before", "idle_after", "speedup", "ratio_after", "one_sample", "longest")
        return {
            "ranks": self.ranks,
            compared: self.label,
            **{name: getattr(summary, name) for name in names},
            "moved_tokens": summary.moved_tokens if self.has_exchange else 0.0,
            "speedup_of_a_step": median,
            "spread_of_a_step": spread,
            "plan_seconds": statistics.median([step.plan_seconds for step in self.steps] or [0.0]) or None,
        }


def print_gains(gains: Sequence[Gain], *, compared: str = "strategy", marks: Mapping[str, str] | None = None) -> None:
    """Print the table of gains, what its columns and `marks` in it mean, and how far its numbers are measured."""
    numbers = [gain.numbers(compared) for gain in gains]
    console.print_result(gains_table(gains, compared), gains=numbers)
    indent = 12
    lines = [
        textwrap.fill(meaning, _WIDTH, initial_indent=name.ljust(indent), subsequent_indent=" " * indent)
        for name, meaning in {**EXPLANATION, **(marks or {})}.items()
    ]
    if known := [1e3 * of_gain["plan_seconds"] for of_gain in numbers if of_gain["plan_seconds"]]:
        lines.append(f"Planning a step took {min(known):.2g} to {max(known):.2g} ms, on one thread of this machine.")
        lines.append(textwrap.fill(f"All other {PREDICTED}", _WIDTH))
    console.print_result("\n".join([*lines, ""]))


def gains_table(gains: Sequence[Gain], compared: str = "strategy") -> "Table":
    """Return a table with a row for each gain, less than 80 columns wide; its labels are strategies, or models."""
    table = console.new_table("ranks", compared, *_COLUMNS, left=[compared], narrow=True)
    for gain in gains:
        numbers = gain.numbers(compared)
        table.add_row(f"{gain.ranks:,}", gain.label, *(cell.format(**numbers) for cell in _COLUMNS.values()))
    return table
