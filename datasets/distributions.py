"""Distributions of integers, for history lengths and item popularity: uniform, normal, Zipf, lognormal, histograms.

Each draws int64 values in `low..high`, where `low` is at least 0. On command lines they are written as text:

    lognormal:mean=128,std=256,high=4096
    zipf:exponent=1.2,high=none
    histogram:path=out/ml-20m,column=length        (values observed in a dataset)
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.rules import Bounds, NonNegative, Positive, without_rules
from evenrank.core.settings import Settings
from evenrank.core.storage import locate
from evenrank.datasets.schema import ACTION, EVENT_DTYPES, LENGTH, NUM_TARGETS

Made = TypeVar("Made")

_MAX_VALUE = 2**63 - 1024  # the largest int64 that float64 represents
_MAX_EXPONENT = 100  # areas of larger exponents underflow
_MAX_STD_OVER_MEAN = 1e100  # its square must be a float64
_FAR = 1e300  # stands for draws that are too large for float64
_Value = Annotated[int, Bounds(at_least=0, at_most=_MAX_VALUE)]
_Std = Annotated[float, Bounds(at_least=0, below=math.inf)]
_MAX_ACTION = int(np.iinfo(EVENT_DTYPES[ACTION]).max)


class Distribution(Protocol):
    """A distribution of integers."""

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""


class _Range(Settings):
    """Base of distributions over `low..high`."""

    low: int
    high: int | None

    def _check(self) -> None:
        if self.high is not None and self.low > self.high:
            kind = type(self).__name__
            raise ConfigError(f"{kind}: low must be at most high, got low={self.low} and high={self.high}")


@dataclass(frozen=True, kw_only=True)
class Uniform(_Range):
    """Every integer in `low..high` with the same probability; `low` is at least 0, as in all distributions."""

    low: _Value = 1
    high: _Value = 1024

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""
        return rng.integers(self.low, self.high, size=size, endpoint=True, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Normal(_Range):
    """A normal distribution with this mean and standard deviation, then rounded and clipped to `low..high`."""

    mean: Annotated[float, Bounds(above=-math.inf, below=math.inf)] = 128.0
    std: _Std = 64.0
    low: _Value = 1
    high: _Value = 4096

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""
        return _round_and_clip(rng.normal(self.mean, self.std, size), self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Lognormal(_Range):
    """A lognormal distribution, rounded and clipped to `low..high`.

    Mean and standard deviation are those of the values, not of their logarithm, before clipping.
    """

    mean: Positive = 128.0
    std: _Std = 256.0
    low: _Value = 1
    high: _Value = 4096

    def _check(self) -> None:
        _Range._check(self)
        if self.std / self.mean > _MAX_STD_OVER_MEAN:
            raise ConfigError(f"std must be at most 10^100 times the mean, got mean={self.mean} and std={self.std}")

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""
        # exp(N(mu, sigma^2)) has mean exp(mu + sigma^2/2) and variance (exp(sigma^2) - 1) * mean^2.
        sigma2 = math.log1p((self.std / self.mean) ** 2)
        mu = math.log(self.mean) - sigma2 / 2
        return _round_and_clip(rng.lognormal(mu, math.sqrt(sigma2), size), self.low, self.high)


class _Zipf(_Range):
    """Base of distributions by a power of low + shift."""

    shift: int

    def _check(self) -> None:
        _Range._check(self)
        if self.low + self.shift < 1:
            raise ConfigError(
                f"low + shift must be at least 1, got low={self.low} shift={self.shift}; pass shift=1 for values from 0"
            )


@dataclass(frozen=True, kw_only=True)
class Zipf(_Zipf):
    """P(k) proportional to (k + shift)^-exponent for k = low..high, without larger values."""

    exponent: Annotated[float, Bounds(at_least=0, at_most=_MAX_EXPONENT)] = 1.2
    """The support is finite, so exponents of 1 and below are valid too."""
    low: _Value = 1
    high: _Value | None = 4096
    """Largest value; None: 2^63 - 1024, the largest int64 that float64 represents."""
    shift: NonNegative = 0
    """Set to 1 with low = 0, for ids counted from 0: value k then has rank k + 1."""

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""
        high = _MAX_VALUE if self.high is None else self.high
        drawn = draw_zipf(rng, size, exponent=self.exponent, first=self.low + self.shift, span=high - self.low)
        return np.minimum(self.low + drawn.astype(np.int64), high)  # float64 rounds values above 2^53


@dataclass(frozen=True, kw_only=True)
class ClippedZipf(_Zipf):
    """P(k) proportional to (k + shift)^-exponent for all k >= low, with larger values than `high` set to `high`.

    With exponent 1.2, 17 % of the values are `high` = 4096; under `Zipf` 0.001 % are.
    """

    exponent: Annotated[float, Bounds(above=1, at_most=_MAX_EXPONENT)] = 1.2
    """Without a limit, values have probabilities above 1 only."""
    low: _Value = 1
    high: _Value = 4096
    shift: NonNegative = 0

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""
        drawn = draw_zipf(rng, size, exponent=self.exponent, first=self.low + self.shift, span=math.inf)
        return self.low + np.minimum(drawn, self.high - self.low).astype(np.int64)


def draw_zipf(rng: np.random.Generator, size: int, *, exponent: float, first: int, span: float) -> NDArray[np.float64]:
    """Draw values k of 0..span with probabilities proportional to (first + k)^-exponent: float64 [size], integral.

    The exponent is at least 0, or above 1 if `span` is infinite, and `first` at least 1. Values above 2^53 are
    multiples of powers of 2.

    Rejection-inversion (W. Hoermann and G. Derflinger, ACM Transactions on Modeling and Computer Simulation 6(3), 1996)
    takes constant memory and the same time for any range. The mass of k is a bar of width 1 and height
    f(k) = ((first + k) / first)^-exponent. As f is convex, the area below it from k - 1/2 to k + 1/2 is at least that:

        k - 1/2        k        k + 1/2
           |-----|-----------------|        a point of the area below f, uniformly distributed, is x
           reject|      accept              k is x rounded, accepted if x is in the last part, whose area is f(k)

    Points are drawn by inverting the integral of f, 1.2 per value on average at most. Areas are measured from k = 0 and
    divided by `first`, so that neither a large `first` nor an exponent close to 1 cancels digits.
    """
    power = 1 - exponent
    end = float(_box_cox(np.log1p((span + 0.5) / first), power))
    begin = float(_box_cox(np.log1p(0.5 / first), power)) - 1 / first
    drawn = np.empty(size)
    num_drawn = 0
    with np.errstate(divide="ignore", over="ignore"):  # where a draw is infinite
        while num_drawn < size:
            areas = end - (end - begin) * (1 - rng.random(size - num_drawn))
            points = first * np.expm1(_log_inverse_box_cox(areas, power))
            values = np.clip(np.rint(points), 0, min(span, _FAR))
            # Relative to the upper end of the interval, where digits do not cancel even for large values.
            upper = first + values + 0.5
            masses = np.exp(-exponent * np.log1p(-0.5 / upper)) / upper
            accepted = values[values + 0.5 - points <= -upper * np.expm1(_log_inverse_box_cox(-masses, power))]
            drawn[num_drawn : num_drawn + len(accepted)] = accepted
            num_drawn += len(accepted)
    return drawn


def _box_cox(log_x: NDArray[np.float64], power: float) -> NDArray[np.float64]:
    """Return (x^power - 1) / power, the integral of t^(power - 1) from 1 to x, or its limit log(x) at power 0."""
    return log_x if power == 0 else np.expm1(power * log_x) / power


def _log_inverse_box_cox(values: NDArray[np.float64], power: float) -> NDArray[np.float64]:
    """Return log(x), given `_box_cox` of x."""
    return values if power == 0 else np.log1p(power * values) / power


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Histogram(Settings):
    """Observed values, each with a probability proportional to its number of observations."""

    values: NDArray[np.int64]
    """[n]: distinct, ascending, at least 0."""
    counts: NDArray[np.int64]
    """[n]: at least 1."""
    source: str = ""
    """Where the values were observed, for messages and manifests."""

    def _check(self) -> None:
        if not len(self.values) or len(self.values) != len(self.counts):
            raise ConfigError(
                f"a histogram needs as many counts as values and at least one, got {len(self.values)} values and "
                f"{len(self.counts)} counts"
            )
        if self.values[0] < 0 or (np.diff(self.values) <= 0).any() or self.counts.min() < 1:
            raise ConfigError(
                "the values of a histogram must ascend from at least 0 and its counts be at least 1; use Histogram.of "
                "to count observations"
            )

    @classmethod
    def of(cls, observations: NDArray[np.integer], *, source: str = "") -> Self:
        """Count observations [m]; raises a ConfigError if there are none, or one is negative."""
        values, counts = np.unique(observations, return_counts=True)
        if not len(values) or values[0] < 0:
            least = values[0] if len(values) else "none"
            raise ConfigError(f"a histogram needs observations of at least 0, got {least}")
        return cls(values=values.astype(np.int64), counts=counts.astype(np.int64), source=source)

    @classmethod
    def read(cls, path: Path | str, column: str = LENGTH, *, split: str = "train") -> Self:
        """Count the values of a column of a dataset.

        Args:
            column: `length` for the number of events per row; a list column, such as `item_id` or `action`, for the
                values of all events; `user_id`, a contextual feature or `num_targets` for one value per row.

        Raises:
            ConfigError: there is no such column of integers, or it has a negative value.
            DataError: the dataset is missing or malformed, or the split has no values.
        """
        from evenrank.datasets.store import open_store  # 20 ms, and other distributions read nothing

        store = open_store(path, split)
        known = {LENGTH: store.lengths, **store.columns, NUM_TARGETS: store.num_targets}
        columns = {name: values for name, values in known.items() if values is not None and values.dtype.kind == "i"}
        if column not in columns:
            raise ConfigError(f"{path} has no integer column {column!r}; known: {', '.join(columns)}")
        if not len(columns[column]):
            raise DataError(f"the split {split!r} of {path} has no values of {column!r}; read another split")
        return cls.of(columns[column], source=f"{column} of {locate(path)}, {split}")

    def __repr__(self) -> str:
        return (
            f"Histogram(source={self.source!r}, low={self.values[0]}, high={self.values[-1]}, "
            f"distinct={len(self.values)}, observations={self.counts.sum()})"
        )

    @cached_property
    def _cumulative(self) -> NDArray[np.int64]:
        return np.cumsum(self.counts)

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""
        observations = rng.integers(0, self._cumulative[-1], size)
        return self.values[np.searchsorted(self._cumulative, observations, side="right")]


DISTRIBUTIONS: dict[str, Callable[..., Distribution]] = {
    "uniform": Uniform,
    "normal": Normal,
    "zipf": Zipf,
    "clipped-zipf": ClippedZipf,
    "lognormal": Lognormal,
    "histogram": Histogram.read,
}


def parse_distribution(text: str) -> Distribution:
    """Parse a distribution from `name:parameter=value,...`; omitted parameters keep their defaults.

    Raises:
        ConfigError: the name, a parameter or a value is invalid, or a parameter is missing.
        DataError: the dataset of a histogram is missing or malformed.
    """
    name, _, rest = text.partition(":")
    if name not in DISTRIBUTIONS:
        raise ConfigError(f"unknown distribution {name!r} (in {text!r}); known: {', '.join(DISTRIBUTIONS)}")
    return parse_parameters(name, DISTRIBUTIONS[name], rest, text)


def parse_parameters(name: str, make: Callable[..., Made], pairs: str, text: str) -> Made:
    """Call `make` with parameters written as `key=value,...`; a ConfigError names what is wrong in the text."""
    parameters = inspect.signature(make).parameters
    values: dict[str, Any] = {}
    for pair in filter(None, pairs.split(",")):
        key, _, value = pair.partition("=")
        if key not in parameters:
            raise ConfigError(f"{name} has no parameter {key!r} (in {text!r}); known: {', '.join(parameters)}")
        if key in values:
            raise ConfigError(f"{name} has {key} twice (in {text!r}); give it once")
        values[key] = _parse_value(key, value, without_rules(parameters[key].annotation), text)
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in values:
            raise ConfigError(f"{name} needs {key} (in {text!r}); write {name}:{key}=...")
    return make(**values)


def draw_actions(actions: Distribution, rng: np.random.Generator, size: int) -> NDArray[np.int32]:
    """Draw actions: int32 [size]; raises a ConfigError if one is not in 0..2^31-1."""
    drawn = actions.sample(rng, size)
    if size and not 0 <= int(drawn.min()) <= int(drawn.max()) <= _MAX_ACTION:
        raise ConfigError(
            f"actions must be between 0 and {_MAX_ACTION}, got {int(drawn.min())} to {int(drawn.max())}; choose "
            "another distribution of actions"
        )
    return drawn.astype(np.int32)


def _parse_value(key: str, value: str, kind: object, text: str) -> int | float | str | None:
    if kind in (str, Path | str):
        return value
    if kind == int | None and value == "none":
        return None
    number = float if kind is float else int
    try:
        return number(value)
    except ValueError as error:
        raise ConfigError(f"{key} must be {number.__name__}, got {value!r} (in {text!r})") from error


def _round_and_clip(values: NDArray[np.float64], low: int, high: int) -> NDArray[np.int64]:
    return np.clip(np.rint(values), low, high).astype(np.int64)
