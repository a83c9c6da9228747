"""The section of the report on more GPUs than were measured: its plots, tables and text."""

from collections.abc import Sequence
from pathlib import Path

from end_to_end import scaling_plot, scaling_table
from end_to_end.experiments import slug
from end_to_end.results import RunResult
from end_to_end.scaling import RANKS, STRATEGIES, scale, scaled_runs
from evenrank.cli import console
from evenrank.core.errors import ConfigError
from rendering import figures


def write_section(out: Path, results: Sequence[RunResult]) -> str:
    """Simulate, write plots below `out`, and return a section of Markdown; "" without unbalanced runs.

    Lengths that were measured on one number of GPUs alone are named and not simulated, which takes some seconds.
    """
    groups = list(scaled_runs(results))
    if not groups:
        return ""
    scalable = [runs for runs in groups if len({run.gpus for run in runs}) > 1]
    parts = ["## Scaling", *([_EXPLANATION] if scalable else [])]
    parts += [_alone(runs) for runs in groups if runs not in scalable]
    points_of_all = len(scalable) * (1 + (len(RANKS) - 1) * len(STRATEGIES))
    with console.steps("simulating more ranks", points_of_all) as on_point:
        for runs in scalable:
            try:
                scaling = scale(runs, on_point)
            except ConfigError as error:
                parts.append(f"{error}")
                continue
            plot = f"plots/scaling-{slug(scaling.lengths)}.png"
            figures.save(scaling_plot.draw(scaling), out / plot)
            parts += scaling_table.render(scaling)
            parts.append(f"![Speed-up and efficiency by ranks]({plot})")
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _alone(runs: Sequence[RunResult]) -> str:
    gpus = scaling_table.count_gpus(runs[0].gpus)
    return (
        f"{runs[0].lengths}: measured on {gpus} alone. More ranks are predicted from runs with the same settings on at "
        "least two numbers of GPUs, so that each prediction can be tried on another measurement; see "
        "scripts/bench/experiments/scaling.toml."
    )


_EXPLANATION = """\
Steps on more GPUs than were measured: their samples are drawn from the distribution of lengths and assigned by the
planner, with the fitted cost. A step takes the overhead and the time of its slowest rank; a rank takes the fitted time
of its samples, times a factor drawn from those of the measured GPUs, times a residual drawn from those of their steps,
as if nothing delayed several ranks at once. Factors and residuals are those of perfectly even steps, because ranks that
wait compute more slowly; so is the overhead, which is what a step takes beyond its slowest rank's computing. It is
assumed not to grow with the number of ranks, as if collectives took no longer on more GPUs. Times are means over steps;
measured ratios to even are those of the tables above."""
