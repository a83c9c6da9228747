"""`WindowEvaluation`: with windows of time, the one after those that are trained is evaluated, and all are plotted.

windows       |   0   |   1   |   2   |   3   |       the last one is evaluated alone
trained           0       1       2
evaluated                 1       2       3           by the model that was trained on all windows before it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evenrank.dataloader import Loader
from trainer.evaluation import Evaluation
from trainer.logs import JobLog

_PLOTTED = ("auc", "recall")  # the first letters of metrics
_STYLE: Any = {"date.converter": "concise", "axes.grid": True, "grid.alpha": 0.2, "axes.axisbelow": True}


@dataclass(slots=True)
class WindowEvaluation:
    """An evaluation of the window of time after the one that is trained, or was trained last."""

    evaluation: Evaluation
    """Of the batches of `evaluated`."""
    trained: Loader[Any]
    evaluated: Loader[Any]
    """Another loader with the same windows."""

    def run(self) -> dict[str, Any]:
        """Return the window, its times in UTC, its number of targets, and the metrics. Collective."""
        # A job that resumes within a window has not begun to iterate over it.
        is_within = self.trained.remaining_batches() < len(self.trained)
        self.evaluated.begin_at(self.trained.epoch + is_within)
        self.evaluated.skip_empty()
        window, (store,) = self.evaluated.epoch, self.evaluated.stores
        begin, end = (_show(time) for time in self.evaluated.window(window))
        targets = 0 if store.num_targets is None else int(store.num_targets.sum())
        return {"window": window, "begin": begin, "end": end, "targets": targets, **self.evaluation.run()}


def _show(time: datetime) -> str:
    return time.isoformat().removesuffix("+00:00").removesuffix("T00:00:00")


def plot_log(log: JobLog, path: Path) -> None:
    """Plot the windows that this run of a job and earlier ones have evaluated, if there are any; on the first rank."""
    if lines := log.read("eval"):
        if find_spec("matplotlib") is None:  # as on hosts that only train
            log.say(f"{path} is not drawn without matplotlib; pip install 'evenrank[reports]'")
        else:
            plot_windows(lines, path)


def plot_windows(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG with the metrics of each window over time, above its number of targets.

    Args:
        lines: of `WindowEvaluation.run`, in their order; the last one of a window counts.
        path: of the file.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    of_windows = {line["window"]: line for line in lines}
    ordered = [of_windows[window] for window in sorted(of_windows)]
    begins, ends = ([datetime.fromisoformat(line[name]) for line in ordered] for name in ("begin", "end"))
    middles, widths = [], []
    for begin, end in zip(begins, ends, strict=True):
        middles.append(begin + (end - begin) / 2)
        widths.append(end - begin)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
        for name in (name for name in ordered[-1] if name.startswith(_PLOTTED)):
            values = [float("nan") if line.get(name) is None else line[name] for line in ordered]
            above.plot(middles, values, marker="o", markersize=3, linewidth=1, label=name)
        above.set(title="each window of time, by the model that was trained on those before it")
        above.legend(frameon=False)
        below.bar(begins, [line["targets"] for line in ordered], widths, align="edge", color="#8c939c")
        below.set(ylabel="targets", xlabel="time (UTC)")
        figure.savefig(path, dpi=120)
