"""Simulated and measured scaling as Markdown."""

from typing import TYPE_CHECKING

from rendering import markdown_tables

if TYPE_CHECKING:
    from end_to_end.scaling import Point, Scaling

_MEASURED_COLUMNS = (
    "GPUs",
    "strategy",
    "run",
    "predicted by",
    "measured (ms)",
    "predicted (ms)",
    "error",
    "error on its batches",
    "speed-up, measured",
    "speed-up, predicted",
    "ratio to even, measured",
    "ratio to even, predicted",
    "efficiency, measured",
    "efficiency, predicted",
)


def render(scaling: Scaling) -> list[str]:
    """Return paragraphs and tables: the calibration, predictions with measurements, and all predictions."""
    measured = [point for point in scaling.points if point.measured is not None]
    strategies = list(dict.fromkeys(point.strategy for point in scaling.points))
    rows = [
        [f"{ranks:,}", *(_cell(scaling, scaling.find(ranks, strategy)) for strategy in strategies)]
        for ranks in dict.fromkeys(point.ranks for point in scaling.points)
    ]
    return [
        f"### {scaling.lengths}",
        _calibration(scaling.points[-1]),
        " ".join([_error_statement(measured), *scaling.refused]),
        markdown_tables.table(_MEASURED_COLUMNS, [_measured_row(scaling, point) for point in measured], left=4),
        "Predicted, by ranks and strategy: step time in ms, speed-up over unbalanced steps, ratio to even steps, and "
        f"scaling efficiency, which is tokens per second of each GPU relative to those of one GPU ({_base(scaling)}).",
        markdown_tables.table(("ranks", *strategies), rows),
    ]


def count_gpus(gpus: int) -> str:
    """Return a number of GPUs in words: `1 GPU`, `2 GPUs`."""
    return f"{gpus} GPU{'s' if gpus > 1 else ''}"


def _calibration(point: "Point") -> str:
    calibration = point.calibration
    factors, noise = calibration.factors, calibration.noise
    return (
        f"More ranks than measured are predicted by the run {calibration.run!r} on {count_gpus(calibration.gpus)}: "
        f"factors of its ranks {factors.min():.3f} to {factors.max():.3f}, residuals with a standard deviation of "
        f"{noise.std():.2%} and a maximum of {noise.max():.2f}, overhead {calibration.overhead * 1e3:.2f} ms."
    )


def _error_statement(measured: list["Point"]) -> str:
    errors = [errors for point in measured if (errors := point.errors) is not None]
    if not errors:
        return "No run was measured on which the prediction could be tried."
    worst, worst_on_batches = (max((error[one] for error in errors), key=abs) for one in (0, 1))
    return (
        f"Tried on {len(errors)} measured points, each predicted by a run on another number of GPUs where there is one "
        f"and never by itself, the step time is at most {abs(worst):.1%} off; given the very batches of the measured "
        f"run instead of others of the same distribution, at most {abs(worst_on_batches):.1%}."
    )


def _base(scaling: Scaling) -> str:
    return "as measured" if scaling.find(1, "").measured is not None else "as predicted"


def _measured_row(scaling: Scaling, point: "Point") -> list[str]:
    assert point.measured is not None
    errors = ["-", "-"] if point.errors is None else [f"{error:+.1%}" for error in point.errors]
    ratios = [
        text
        for of, form in ((scaling.speedup, ".2f"), (scaling.to_even, ".3f"), (scaling.efficiency, ".1%"))
        for text in (_number(of(point, measured=True), form), _number(of(point), form))
    ]
    return [
        f"{point.ranks:,}",
        point.strategy,
        point.measured.run,
        count_gpus(point.calibration.gpus),
        f"{point.measured.seconds * 1e3:.2f}",
        f"{point.seconds * 1e3:.2f}",
        *errors,
        *ratios,
    ]


def _cell(scaling: Scaling, point: "Point") -> str:
    ratios = ((scaling.speedup(point), ".2f"), (scaling.to_even(point), ".3f"), (scaling.efficiency(point), ".0%"))
    return f"{point.seconds * 1e3:.1f}, " + ", ".join(_number(value, form) for value, form in ratios)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
