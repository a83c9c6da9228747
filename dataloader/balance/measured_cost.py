"""`MeasuredCost`: what a sample costs, fitted to the times of real steps on the machine that trains."""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.cost import TokenCost
from evenrank.datasets.errors import ConfigError, DataError
from evenrank.datasets.schema import ITEM_ID

_FORMAT, _VERSION = "evenrank measured cost", 1
_FEWEST_STEPS = 20
_LEAST_SPREAD = 0.1  # of the steps' sums of tokens, from the 5th to the 95th percentile, as a part of their median
_LEAST_R2 = 0.8
_COST_BITS = 60  # of the longest sample; what is added up is scaled once more, by the size of a step
_MAD_OF_NORMAL = 0.6745  # median absolute deviation of a normal distribution of standard deviation 1
_HUBER = 1.345  # standard deviations; the usual choice, 95 % as efficient as least squares on normal noise
_OUTLIER = 4.0  # standard deviations
_ROUNDS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCost(TokenCost):
    """Seconds of a sample with t tokens: b t + c t^2, in whole units of 2^-`fraction_bits` seconds.

    Make it with `fit`, keep it with `save`, and give all ranks the same with `load`; they compare it at the start.
    """

    linear: int  # b
    quadratic: int  # c
    fraction_bits: int
    seconds_per_step: float  # what a step takes whoever trains what; it does not count
    steps: int  # that it was fitted to
    r2: float  # part of the variance of their times that it explains, without outliers

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
        which compile and allocate. Times that are far too long, as where a checkpoint was written, do no harm.

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
        times = np.asarray(seconds, dtype=np.float64)
        if times.ndim != 1 or len(times) != len(lengths):
            raise ConfigError(f"there must be one time for each step, got {len(lengths)} steps and {times.shape} times")
        if len(times) < _FEWEST_STEPS:
            raise ConfigError(f"{len(times)} steps are too few to fit a cost to; time at least {_FEWEST_STEPS}")
        if not (np.isfinite(times) & (times > 0)).all():
            raise ConfigError(f"times must be positive and finite, got {times.min()}..{times.max()} seconds")
        samples = [np.asarray(step, dtype=np.float64) for step in lengths]
        sums = np.array([[1.0, step.sum(), (step * step).sum()] for step in samples])
        spread = _spread(sums[:, 1])
        if spread < _LEAST_SPREAD and _spread(sums[:, 2]) < _LEAST_SPREAD:
            raise ConfigError(
                f"the timed steps are too much alike: their tokens vary by {spread:.1%}; time steps that are not "
                'balanced (strategy="identity")'
            )
        found, r2 = _fit_without_negative(sums, times)
        if found is None or r2 < _LEAST_R2:
            explained = "does not grow with tokens" if found is None else f"is explained to {r2:.0%} by tokens"
            raise ConfigError(
                f"the time of the {len(times)} steps {explained}, at least {_LEAST_R2:.0%} are needed; time forward "
                "and backward alone, synchronise the device before and after, and leave out the first steps"
            )
        a, b, c = found
        fraction_bits = _COST_BITS - int(np.ceil(np.log2(b * max_tokens + c * max_tokens**2)))
        return cls(
            linear=round(float(np.ldexp(b, fraction_bits))),
            quadratic=round(float(np.ldexp(c, fraction_bits))),
            fraction_bits=fraction_bits,
            seconds_per_step=float(a),
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
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        text = json.dumps({"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(self)}, indent=2) + "\n"
        try:
            try:
                partial.write_text(text, encoding="utf-8")
                partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise DataError(f"{target} could not be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read what `save` wrote.

        Raises:
            DataError: the file is missing or not such a file; the message names the field.

        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} could not be read as a measured cost: {error}") from error
        if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
            raise DataError(f"{path} is not a measured cost; write one with MeasuredCost.save")
        if (version := values.pop("version", None)) != _VERSION:
            raise DataError(f"{path} has version {version}, this evenrank reads {_VERSION}; fit the cost again")
        return cls(**{entry.name: _checked(values, entry, path) for entry in dataclasses.fields(cls)})


_TYPES: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,), str: (str,)}


def _checked(values: dict[str, Any], entry: Any, path: Path | str) -> Any:
    """Return a field's value if it is of its type and in its range."""
    value: Any = values.get(entry.name)
    if entry.name == "contextual":
        sound = isinstance(value, list) and all(isinstance(key, str) for key in value)
        value = tuple(value) if sound and value is not None else value
    else:
        sound = type(value) in _TYPES[entry.type]
    whole = entry.name in ("linear", "quadratic", "max_tokens", "steps")
    if not sound or (whole and int(value) < 0):
        raise DataError(f"{path}: {entry.name} is {value!r}; fit the cost again")
    return value


def _spread(values: NDArray[np.float64]) -> float:
    low, middle, high = np.percentile(values, [5, 50, 95])
    return float((high - low) / middle) if middle > 0 else 0.0


def _fit_without_negative(
    sums: NDArray[np.float64], times: NDArray[np.float64]
) -> tuple[tuple[float, float, float] | None, float]:
    """Fit times = sums @ (a, b, c) with b, c not negative; None if both would be. Also the part explained."""
    columns = [0, 1, 2]
    while len(columns) > 1:
        found = _fit_robustly(sums[:, columns], times)
        negative = [column for column, value in zip(columns, found, strict=True) if column > 0 and value <= 0]
        if not negative:
            coefficients = np.zeros(3)
            coefficients[columns] = found
            a, b, c = coefficients.tolist()
            return (a, b, c), _explained(sums @ coefficients, times)
        columns.remove(negative[0])
    return None, 0.0


def _fit_robustly(sums: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weighted least squares, again and again: first towards the least absolute error, then by Huber's weights."""
    scale = np.abs(sums).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = sums / scale
    weights = np.ones(len(times))
    found = np.zeros(sums.shape[1])
    for number in range(_ROUNDS):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(scaled * root[:, np.newaxis], times * root, rcond=None)[0]
        errors = np.abs(times - scaled @ found)
        deviation = max(float(np.median(errors)) / _MAD_OF_NORMAL, 1e-12 * float(times.max()))
        limit = _HUBER * deviation if number >= _ROUNDS // 2 else 1e-3 * deviation
        weights = np.minimum(1.0, limit / np.maximum(errors, 1e-300))
    result: NDArray[np.float64] = found / scale
    return result


def _explained(predicted: NDArray[np.float64], times: NDArray[np.float64]) -> float:
    """Return the part of the variance of `times` that is explained, without outliers."""
    errors = times - predicted
    deviation = float(np.median(np.abs(errors))) / _MAD_OF_NORMAL
    inlier = np.abs(errors) <= max(_OUTLIER * deviation, 1e-9 * float(times.max()))
    variance = float(np.var(times[inlier]))
    return 1.0 - float(np.mean(errors[inlier] ** 2)) / variance if variance > 0 else 0.0
