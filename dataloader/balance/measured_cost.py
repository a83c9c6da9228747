"""`MeasuredCost`: what a sample costs, fitted to the times of real steps on the machine that trains."""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.balance.cost import TokenCost
from evenrank.datasets.schema import ITEM_ID

_FORMAT, _VERSION = "evenrank measured cost", 1
_FEWEST_STEPS = 20
_LEAST_SPREAD = 0.02  # of the steps' sums, from the 5th to the 95th percentile, as a part of their median
_LEAST_BEND = 1e-3  # part of the variance of sum(t^2) that sum(t) leaves; lengths that deviate by 5 % leave as much
_LEAST_R2 = 0.8  # part of the variance of the steps' times, outliers left out, that the fit must explain
_MOST_OUTLIERS = 0.25  # of the steps
_COST_BITS = 60  # of the longest sample; what is added up is scaled once more, by the size of a step
_MOST_COST_BITS = 62  # that a file may ask for
_MAD_OF_NORMAL = 0.6745  # median absolute deviation of a normal distribution of standard deviation 1
_OUTLIER = 4.0  # standard deviations
_ROUNDS = 50  # of reweighting; it has to find outliers, not the last digit


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCost(TokenCost):
    """Seconds of a sample with t tokens: b t + c t^2, in whole units of 2^-`fraction_bits` seconds.

    Make it with `fit`, keep it with `save`, and give all ranks the same with `load`; they compare it at the start.
    `fit` chooses the unit so that a sample of `max_tokens` costs about 2^60: with the default of 131,072 tokens,
    rounding b and c changes no sample's cost by more than 1 part in 2^24.
    """

    linear: int  # b
    quadratic: int  # c
    fraction_bits: int
    seconds_per_step: float  # a, what a step takes whoever trains what; no part of a sample's cost
    steps: int  # that it was fitted to
    r2: float  # part of the variance of their times that it explains, without outliers

    def __post_init__(self) -> None:
        TokenCost.__post_init__(self)
        for name in ("linear", "quadratic", "fraction_bits", "seconds_per_step", "steps"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} must be finite and not negative, got {value}")
        if not 0 <= self.r2 <= 1:
            raise ConfigError(f"r2 must be from 0 to 1, got {self.r2}")
        if not self.linear and not self.quadratic:
            raise ConfigError("linear and quadratic must not both be 0: no sample would cost anything")
        if self.max_cost.bit_length() > _MOST_COST_BITS:
            raise ConfigError(
                f"linear {self.linear} and quadratic {self.quadratic} are too large: a sample of max_tokens, "
                f"{self.max_tokens:,}, must cost less than 2^{_MOST_COST_BITS}"
            )

    def of_tokens(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the cost of samples with these numbers of tokens, of the same shape."""
        return self.linear * tokens + self.quadratic * tokens * tokens

    @classmethod
    def fit(
        cls,
        lengths: Sequence[NDArray[np.integer]] | NDArray[np.integer],
        seconds: Sequence[float] | NDArray[np.floating],
        *,
        history_key: str = ITEM_ID,
        interleave_actions: bool = False,
        contextual: tuple[str, ...] = (),
        max_tokens: int = 131_072,
    ) -> Self:
        """Fit the cost to measured steps: seconds = a + b sum(t) + c sum(t^2), over the samples of a step.

        Time one rank's own forward and backward, between two synchronisations of its device and before gradients are
        reduced: a synchronous step lasts as long as its slowest rank, which says little of one's own samples. Take
        steps that are not balanced (`strategy="identity"`): balanced ones are all alike. Leave out the first steps,
        which compile and allocate. Times that are far too long, as where a checkpoint was written, do no harm; they
        may be a quarter of all.

        a is a step's, not a sample's: it is the same whoever trains what, so the cost leaves it out.

        Args:
            lengths: per step, the tokens of this rank's samples: integers [samples of the step]; or all as [N, B].
            seconds: [N], of each step.
            history_key: with the next two, which values of a batch are tokens, as for every `TokenCost`; they have to
                say of a batch what `lengths` says.
            interleave_actions: likewise.
            contextual: likewise.
            max_tokens: of the longest sample that there can be.

        Raises:
            ConfigError: the fit would be poor; the message says why and what to measure instead.

        """
        if max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {max_tokens}")
        times = np.asarray(seconds, dtype=np.float64)
        if times.ndim != 1 or len(times) != len(lengths):
            raise ConfigError(f"there must be one time for each step, got {len(lengths)} steps and {times.shape} times")
        if len(times) < _FEWEST_STEPS:
            raise ConfigError(f"{len(times)} steps are too few to fit a cost to; time at least {_FEWEST_STEPS}")
        wrong = np.flatnonzero(~(np.isfinite(times) & (times > 0)))
        if len(wrong):
            raise ConfigError(
                f"times must be positive and finite: {len(wrong)} of {len(times)} are not, the first {times[wrong[0]]} "
                f"seconds, of step {wrong[0]}; time these steps again or leave them out"
            )
        sums = _sums([np.asarray(step) for step in lengths], max_tokens)
        _check_that_steps_differ(sums)
        found = _fit_without_negative(sums, times)
        r2, outliers = _explained(sums @ found, times)
        remedy = (
            "time forward and backward alone, synchronise the device before and after, and leave out the first steps"
        )
        if found[1:].max() == 0:
            raise ConfigError(f"the time of the {len(times)} steps does not grow with tokens; {remedy}")
        if r2 < _LEAST_R2:
            raise ConfigError(
                f"the time of the {len(times)} steps is explained to {r2:.0%} by tokens, at least {_LEAST_R2:.0%} are "
                f"needed; {remedy}"
            )
        if outliers > _MOST_OUTLIERS * len(times):
            raise ConfigError(
                f"{outliers} of {len(times)} steps are far from what their tokens explain, at most "
                f"{_MOST_OUTLIERS:.0%} may be; {remedy}"
            )
        a, b, c = found.tolist()
        fraction_bits = _COST_BITS - math.ceil(math.log2(b * max_tokens + c * max_tokens**2))
        return cls(
            linear=round(math.ldexp(b, fraction_bits)),
            quadratic=round(math.ldexp(c, fraction_bits)),
            fraction_bits=fraction_bits,
            seconds_per_step=a,
            steps=len(times),
            r2=r2,
            history_key=history_key,
            interleave_actions=interleave_actions,
            contextual=contextual,
            max_tokens=max_tokens,
        )

    def save(self, path: Path | str) -> None:
        """Write it to a JSON file, whole or not at all.

        Raises:
            DataError: the file cannot be written.

        """
        target = Path(path)
        partial = target.parent / f".{target.name}.{os.getpid()}.partial"
        text = json.dumps({"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(self)}, indent=2) + "\n"
        try:
            try:
                with partial.open("w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())  # before the rename, which could otherwise outlive a crash without the text
                partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise DataError(f"{target} could not be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read what `save` wrote.

        Raises:
            DataError: the file is missing or not such a file; the message names the file and the field.

        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{path} could not be read as a measured cost: {error}") from error
        if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
            raise DataError(f"{path} is not a measured cost; write one with MeasuredCost.save")
        version = values.pop("version", None)
        if type(version) is not int or version != _VERSION:
            raise DataError(f"{path} has version {version!r}, this evenrank reads {_VERSION}; fit the cost again")
        fields = {entry.name: _typed(values, entry, path) for entry in dataclasses.fields(cls)}
        try:
            return cls(**fields)
        except ConfigError as error:
            raise DataError(f"{path}: {error}; fit the cost again") from error


def _typed(values: dict[str, Any], entry: Any, path: Path | str) -> Any:
    """Return a field's value if it is there and of its type."""
    if entry.name not in values:
        raise DataError(f"{path} lacks {entry.name}; fit the cost again")
    value = values[entry.name]
    if entry.name == "contextual":
        sound = isinstance(value, list) and all(isinstance(key, str) for key in value)
    else:
        sound = type(value) is entry.type  # True is no whole number here, nor 1 a float: reprs are compared
    if not sound:
        raise DataError(f"{path}: {entry.name} is {value!r}, of another type; fit the cost again")
    return tuple(value) if entry.name == "contextual" else value


def _sums(steps: Sequence[NDArray[np.integer]], max_tokens: int) -> NDArray[np.float64]:
    """Return 1, sum(t) and sum(t^2) of each step: float64 [N, 3]."""
    sums = np.ones((len(steps), 3))
    for number, step in enumerate(steps):
        if step.ndim != 1 or (step.size and step.dtype.kind not in "iu"):
            raise ConfigError(
                f"lengths must give each step the whole numbers of its samples' tokens, [samples]; step {number} has "
                f"{step.dtype} of shape {step.shape}"
            )
        low, high = (int(step.min()), int(step.max())) if step.size else (0, 0)
        if low < 0 or high > max_tokens:
            raise ConfigError(
                f"step {number} has a sample of {low if low < 0 else high:,} tokens, they must be from 0 to "
                f"{max_tokens:,}; correct lengths, or raise max_tokens"
            )
        tokens = step.astype(np.float64)
        sums[number, 1:] = tokens.sum(), tokens @ tokens
    return sums


def _check_that_steps_differ(sums: NDArray[np.float64]) -> None:
    """Refuse steps from which the three coefficients cannot be told apart."""
    tokens, squares = sums[:, 1], sums[:, 2]
    spread = min(_spread(tokens), _spread(squares))
    if spread < _LEAST_SPREAD:  # then sums are as constant as a
        raise ConfigError(
            f"the timed steps are too much alike: their tokens vary by {spread:.1%}, at least {_LEAST_SPREAD:.0%} are "
            'needed; time steps that are not balanced (strategy="identity") nor filled up to a number of tokens'
        )
    tokens, squares = tokens / tokens.max() - np.mean(tokens / tokens.max()), squares / squares.max()
    squares -= squares.mean()
    bend = 1 - float(tokens @ squares) ** 2 / float((tokens @ tokens) * (squares @ squares))
    if bend < _LEAST_BEND:  # where all lengths are one, sum(t^2) is a multiple of sum(t)
        raise ConfigError(
            f"the samples' lengths are too much alike: tokens explain all but {max(bend, 0):.2%} of their squares, "
            f"{_LEAST_BEND:.1%} must be left; time steps with short and long samples"
        )


def _spread(values: NDArray[np.float64]) -> float:
    low, middle, high = np.percentile(values, [5, 50, 95])
    return float((high - low) / middle) if middle > 0 else 0.0


def _fit_without_negative(sums: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fit times = sums @ (a, b, c) with none negative: what comes out negative is fixed at 0 and the rest fitted anew.

    Returns:
        float64 [3].

    """
    coefficients = np.zeros(3)
    columns = [0, 1, 2]
    while columns:
        found = _fit_robustly(sums[:, columns], times)
        seconds = found * sums[:, columns].mean(axis=0)  # of a step; coefficients have different units
        lowest = int(np.argmin(seconds))
        if seconds[lowest] >= 0:
            coefficients[columns] = found
            break
        del columns[lowest]
    return coefficients


def _fit_robustly(sums: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Find outliers by the least sum of absolute errors, which they do not bend, and fit the rest by least squares."""
    scale = sums.max(axis=0)
    scaled = sums / scale
    weights = np.ones(len(times))
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(scaled * root[:, np.newaxis], times * root, rcond=None)[0]
        errors = times - scaled @ found
        # Least squares with weights 1 / |error| tends to the least absolute error; tiny errors count alike.
        least = 1e-3 * _deviation(errors, times)
        weights = least / np.maximum(np.abs(errors), least)
    inlier = _inliers(errors, times)
    result: NDArray[np.float64] = np.linalg.lstsq(scaled[inlier], times[inlier], rcond=None)[0] / scale
    return result


def _deviation(errors: NDArray[np.float64], times: NDArray[np.float64]) -> float:
    """Return the standard deviation of errors, from their median: outliers hardly change it. It is never 0."""
    return max(float(np.median(np.abs(errors))) / _MAD_OF_NORMAL, 1e-9 * float(np.median(times)))


def _inliers(errors: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.bool_]:
    inlier: NDArray[np.bool_] = np.abs(errors) <= _OUTLIER * _deviation(errors, times)
    return inlier


def _explained(predicted: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float, int]:
    """Return the part of the variance of `times` that is explained, without outliers, and the number of these."""
    errors = times - predicted
    inlier = _inliers(errors, times)
    variance = float(np.var(times[inlier]))
    r2 = 1.0 - float(np.mean(errors[inlier] ** 2)) / variance if variance > 0 else 0.0
    return r2, int((~inlier).sum())
