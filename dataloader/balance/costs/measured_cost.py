"""`MeasuredCost`: the cost of a sample, fitted to measured times of training steps."""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray

from evenrank.core import files
from evenrank.core.errors import ConfigError, DataError
from evenrank.core.rules import Bounds, Count, NonNegative
from evenrank.core.settings import check_types, construct
from evenrank.dataloader.balance.costs.cost import register_cost
from evenrank.dataloader.balance.costs.model_costs import TokenCost, attended_pairs
from evenrank.datasets.schema import ITEM_ID

_FORMAT, _VERSION = "evenrank measured cost", 1
_MIN_STEPS = 20
# Spread of the steps' sums from the 5th to the 95th percentile, as a fraction of their median.
_MIN_SPREAD = 0.02
# Fraction of the variance of sum(p) that sum(t) must leave unexplained: as much as lengths that deviate by 5 %.
_MIN_UNEXPLAINED = 1e-3
_MIN_R2 = 0.8  # without outliers
_MAX_OUTLIERS = 0.25  # of the steps
_COST_BITS = 60  # of the most expensive sample; costs are scaled once more by the samples of a step
_MAX_COST_BITS = 62  # of the most expensive sample, in a file
_MAD_OF_NORMAL = 0.6745  # median absolute deviation of a normal distribution of standard deviation 1
OUTLIER = 4.0  # standard deviations
_ITERATIONS = 50  # of reweighting: enough to find outliers, which does not take full convergence


@register_cost("measured")
@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCost(TokenCost):
    """Seconds of a sample with t tokens in p pairs, b t + c p, as integers in units of 2^-`fraction_bits` seconds.

    p is twice the number of causally attended pairs, in which a token's pair with itself counts half (see
    `attended_pairs`): h^2 + k (2 h + 1) with h history and k candidate tokens, which is t^2 without candidates.

    Create it with `fit`, store it with `save`, and `load` the same file on all ranks, which compare it. `fit` chooses
    the unit such that a sample of `max_tokens` costs about 2^60: with the default of 131,072 tokens, rounding b and c
    changes no sample's cost by more than 1 part in 2^24.
    """

    linear: NonNegative
    """b, per token."""
    quadratic: NonNegative
    """c, per unit of p."""
    fraction_bits: NonNegative
    seconds_per_step: Annotated[float, Bounds(at_least=0, below=math.inf)]
    """a, the seconds of a step that do not depend on its samples; not part of a sample's cost."""
    steps: NonNegative
    """Number of steps that were fitted."""
    r2: Annotated[float, Bounds(at_least=0, at_most=1)]
    """Fraction of the variance of step times that the fit explains, outliers excluded."""

    def _check(self) -> None:
        if not self.linear and not self.quadratic:
            raise ConfigError("linear and quadratic must not both be 0: no sample would cost anything")
        if self.max_cost.bit_length() > _MAX_COST_BITS:
            raise ConfigError(
                f"linear {self.linear} and quadratic {self.quadratic} are too large: a sample of max_tokens, "
                f"{self.max_tokens:,}, must cost less than 2^{_MAX_COST_BITS}"
            )

    def of_tokens(self, history: NDArray[np.int64], candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the cost of samples with these numbers of history and candidate tokens, of the same shape."""
        pairs = attended_pairs(history, candidates, causal=True)
        return self.linear * (history + candidates) + self.quadratic * pairs

    @classmethod
    def fit(
        cls,
        lengths: Sequence[NDArray[np.integer]] | NDArray[np.integer],
        seconds: Sequence[float] | NDArray[np.floating],
        *,
        candidates: Sequence[NDArray[np.integer]] | NDArray[np.integer] | None = None,
        history_key: str = ITEM_ID,
        interleave_actions: bool,
        contextual: tuple[str, ...] = (),
        max_tokens: Count = 131_072,
    ) -> Self:
        """Fit the cost to measured steps: seconds = a + b sum(t) + c sum(p), summed over the samples of a step.

        Time the forward and backward pass of one rank, between two synchronizations of its device and before gradients
        are reduced: a synchronous step lasts as long as its slowest rank. Use steps that are not balanced
        (`strategy="none"`), because balanced ones are too similar. Leave out the first steps, which compile and
        allocate. Up to a quarter of the times may be far too long, such as those of steps that wrote a checkpoint.

        Args:
            lengths: per step, the tokens of this rank's samples, as `tokens` of any `TokenCost` counts them: integers
                [samples of the step]; or all as [N, B].
            seconds: [N], of each step.
            candidates: how many of the tokens in `lengths` are candidates, as `candidate_tokens` of any `TokenCost`
                counts them, of the same shape; None if no sample has candidates.
            history_key: as in every `TokenCost`, like the next two; they must count the tokens of `lengths` and
                `candidates`.
            interleave_actions: see `history_key`.
            contextual: see `history_key`.
            max_tokens: tokens of the longest sample that can occur.

        Raises:
            ConfigError: the fit would be poor; the message says why, and which steps to time instead.
        """
        check_types(cls.fit, {"max_tokens": max_tokens}, f"{cls.__name__}.fit")
        tokens, pairs = _sums(lengths, candidates, max_tokens).T
        return cls.fit_sums(
            tokens,
            pairs,
            np.asarray(seconds, dtype=np.float64),
            history_key=history_key,
            interleave_actions=interleave_actions,
            contextual=contextual,
            max_tokens=max_tokens,
        )

    @classmethod
    def fit_sums(
        cls,
        tokens: NDArray[np.float64],
        squares: NDArray[np.float64],
        seconds: NDArray[np.float64],
        *,
        max_tokens: int,
        min_r2: float = _MIN_R2,
        **counted: Any,
    ) -> Self:
        """Fit the cost to steps whose sums are known, such as those of a log: float64 [N] each.

        Args:
            tokens: sum of the tokens of a step's samples.
            squares: sum of their squared tokens, which is sum(p) without candidates.
            seconds: see `fit`.
            max_tokens: see `fit`.
            min_r2: the least `r2` to accept. It is low for balanced steps, because they vary little.
            counted: see `fit`: how tokens were counted.

        Raises:
            ConfigError: see `fit`.
        """
        _check_times(seconds, len(tokens))
        _check_variation(tokens, squares)
        sums = np.stack([np.ones(len(tokens)), tokens, squares], axis=1)
        coefficients = _fit_non_negative(sums, seconds)
        r2 = _check_fit(sums, coefficients, seconds, min_r2)
        a, b, c = coefficients.tolist()
        fraction_bits = _COST_BITS - math.ceil(math.log2(b * max_tokens + c * max_tokens**2))
        return cls(
            linear=round(math.ldexp(b, fraction_bits)),
            quadratic=round(math.ldexp(c, fraction_bits)),
            fraction_bits=fraction_bits,
            seconds_per_step=a,
            steps=len(seconds),
            r2=r2,
            max_tokens=max_tokens,
            **counted,
        )

    @property
    def seconds_per_unit(self) -> float:
        """Seconds of a cost of 1."""
        return math.ldexp(1.0, -self.fraction_bits)

    def save(self, path: Path | str) -> None:
        """Write the cost to a JSON file, atomically; a DataError if it cannot be written."""
        try:
            files.write_text(Path(path), self.to_text())
        except OSError as error:
            raise DataError(f"{path} could not be written: {error.strerror or error}") from error

    def to_text(self) -> str:
        """Return the cost as `from_text` reads it, exactly."""
        return json.dumps({"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a file that `save` wrote; a DataError if it is missing or malformed."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as a measured cost: {error}") from error
        return cls.from_text(text, path)

    @classmethod
    def from_text(cls, text: str, path: Path | str = "the text") -> Self:
        """Return the cost that `to_text` was called of; `path` is where the text is from, for a DataError."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} cannot be read as a measured cost: {error}") from error
        if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
            raise DataError(f"{path} is not a measured cost; create one with MeasuredCost.save")
        version = values.pop("version", None)
        if type(version) is not int or version != _VERSION:
            raise DataError(f"{path} has version {version!r}, this evenrank reads {_VERSION}; fit the cost again")
        try:
            return construct(cls, values, "the cost")
        except ConfigError as error:
            raise DataError(f"{path}: {error}; fit the cost again") from error


def _check_times(times: NDArray[np.float64], num_steps: int) -> None:
    if times.ndim != 1 or len(times) != num_steps:
        raise ConfigError(f"there must be one time for each step, got {num_steps} steps and {times.shape} times")
    if num_steps < _MIN_STEPS:
        raise ConfigError(f"{num_steps} times are too few to fit a cost; measure at least {_MIN_STEPS}")
    wrong = np.flatnonzero(~(np.isfinite(times) & (times > 0)))
    if len(wrong):
        raise ConfigError(
            f"times must be positive and finite: {len(wrong)} of {num_steps} are not, the first {times[wrong[0]]} "
            f"seconds of step {wrong[0]}; time these steps again or leave them out"
        )


def _sums(
    lengths: Sequence[NDArray[np.integer]] | NDArray[np.integer],
    candidates: Sequence[NDArray[np.integer]] | NDArray[np.integer] | None,
    max_tokens: int,
) -> NDArray[np.float64]:
    """Return sum(t) and sum(p) of each step: float64 [N, 2]."""
    if candidates is not None and len(candidates) != len(lengths):
        raise ConfigError(
            f"candidates must have an array for each step, got {len(candidates)} for the {len(lengths)} steps of "
            "lengths"
        )
    sums = np.empty((len(lengths), 2))
    for number, tokens in enumerate(map(np.asarray, lengths)):
        of_candidates = np.zeros_like(tokens) if candidates is None else np.asarray(candidates[number])
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise ConfigError(
                f"lengths must be integers [samples] for each step; step {number} has "
                f"{tokens.dtype} of shape {tokens.shape}"
            )
        low, high = int(tokens.min(initial=0)), int(tokens.max(initial=0))
        if low < 0 or high > max_tokens:
            raise ConfigError(
                f"step {number} has a sample of {low if low < 0 else high:,} tokens, which must be between 0 and "
                f"{max_tokens:,}; correct the lengths, or raise max_tokens"
            )
        if of_candidates.shape != tokens.shape or (of_candidates.size and of_candidates.dtype.kind not in "iu"):
            raise ConfigError(
                f"candidates must be integers of the same shape as lengths, {tokens.shape} in step {number}; it has "
                f"{of_candidates.dtype} of shape {of_candidates.shape}"
            )
        if len(wrong := np.flatnonzero((of_candidates < 0) | (of_candidates > tokens))):
            raise ConfigError(
                f"step {number} has a sample of {tokens[wrong[0]]:,} tokens, {of_candidates[wrong[0]]:,} of them "
                "candidates; correct candidates, or count candidates in lengths too"
            )
        # In float64 pairs cannot wrap around; below 2^53 their sum is exact.
        exact: NDArray[Any] = of_candidates.astype(np.float64)
        sums[number] = tokens.sum(), attended_pairs(tokens - exact, exact, causal=True).sum()
    return sums


def _check_variation(tokens: NDArray[np.float64], pairs: NDArray[np.float64]) -> None:
    """Check that the steps differ enough to tell a, b and c apart."""
    low, middle, high = np.percentile([tokens, pairs], [5, 50, 95], axis=1)
    spread = float(((high - low) / middle).min()) if middle.min() > 0 else 0.0
    if spread < _MIN_SPREAD:  # sums that hardly vary cannot be told from the constant a
        raise ConfigError(
            f"the timed steps are too similar: their tokens vary by {spread:.1%}, at least {_MIN_SPREAD:.0%} is "
            'needed; time steps that are neither balanced (strategy="none") nor packed to a number of tokens'
        )
    unexplained = 1 - float(np.corrcoef(tokens, pairs)[0, 1]) ** 2
    if unexplained < _MIN_UNEXPLAINED:  # if all lengths are equal, sum(p) is a multiple of sum(t)
        raise ConfigError(
            f"the samples' lengths are too similar: tokens explain all but {max(unexplained, 0):.2%} of their attended "
            f"pairs, at least {_MIN_UNEXPLAINED:.1%} must be unexplained; time steps with short and long samples"
        )


def _fit_non_negative(sums: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fit times = sums @ (a, b, c) with non-negative coefficients: set negative ones to 0 and fit the others again."""
    coefficients = np.zeros(3)
    columns = [0, 1, 2]
    while columns:
        fitted = fit_robustly(sums[:, columns], times)
        seconds = fitted * sums[:, columns].mean(axis=0)  # per step, because coefficients have different units
        if seconds.min() >= 0:
            coefficients[columns] = fitted
            break
        del columns[int(np.argmin(seconds))]
    return coefficients


def fit_robustly(sums: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fit times [N] = sums [N, k] @ coefficients [k], which are returned.

    Outliers are found by least absolute errors, which are robust to them; the others are fitted by least squares.
    """
    scale = sums.max(axis=0)
    scaled = sums / scale
    weights = np.ones(len(times))
    for _ in range(_ITERATIONS):
        root = np.sqrt(weights)
        fitted = np.linalg.lstsq(scaled * root[:, np.newaxis], times * root, rcond=None)[0]
        errors = times - scaled @ fitted
        # Least squares with weights 1 / |error| converges to least absolute errors; the floor avoids huge weights.
        floor = 1e-3 * deviation(errors, times)
        weights = floor / np.maximum(np.abs(errors), floor)
    inlier = np.abs(errors) <= OUTLIER * deviation(errors, times)
    result: NDArray[np.float64] = np.linalg.lstsq(scaled[inlier], times[inlier], rcond=None)[0] / scale
    return result


def deviation(errors: NDArray[np.float64], times: NDArray[np.float64]) -> float:
    """Estimate the standard deviation of errors from their median, which is robust to outliers; never 0."""
    return max(float(np.median(np.abs(errors))) / _MAD_OF_NORMAL, 1e-9 * float(np.median(times)))


def _check_fit(
    sums: NDArray[np.float64], coefficients: NDArray[np.float64], times: NDArray[np.float64], min_r2: float
) -> float:
    """Check that a fit is good, and return the explained fraction of the variance of `times`, outliers excluded."""
    errors = times - sums @ coefficients
    inlier = np.abs(errors) <= OUTLIER * deviation(errors, times)
    variance = float(np.var(times[inlier]))
    r2 = 1.0 - float(np.mean(errors[inlier] ** 2)) / variance if variance > 0 else 0.0
    outliers = int((~inlier).sum())
    if coefficients[1:].max() == 0:
        problem = f"the time of the {len(times)} steps does not grow with tokens"
    elif r2 < min_r2:
        problem = f"tokens explain {r2:.0%} of the variance of the {len(times)} times, at least {min_r2:.0%} is needed"
    elif outliers > _MAX_OUTLIERS * len(times):
        problem = (
            f"{outliers} of {len(times)} times are far from the fit to the tokens of their steps, at most "
            f"{_MAX_OUTLIERS:.0%} may be"
        )
    else:
        return r2
    raise ConfigError(
        f"{problem}; time the forward and backward pass alone, synchronize the device before and after, and leave out "
        "the first steps"
    )
