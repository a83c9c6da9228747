"""Distributions of integers, for history lengths and item popularity: uniform, normal, Zipf, lognormal.

Each draws int64 values in `low..high`. On command lines they are written as text:

    lognormal:mean=128,std=256,high=4096
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError


class Distribution(Protocol):
    """A distribution of integers."""

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Every integer in `low..high` with the same probability."""

    low: int = 1
    """Smallest value, at least 0."""
    high: int = 1024
    """Largest value."""

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""
        return rng.integers(self.low, self.high, size=size, endpoint=True, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Normal:
    """A normal distribution, rounded and clipped to `low..high`."""

    mean: float = 128.0
    """Mean before clipping."""
    std: float = 64.0
    """Standard deviation before clipping."""
    low: int = 1
    """Smallest value, at least 0."""
    high: int = 4096
    """Largest value."""

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)
        if self.std < 0:
            raise ConfigError(f"std must be at least 0, got {self.std}")

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""
        return _round_and_clip(rng.normal(self.mean, self.std, size), self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Lognormal:
    """A lognormal distribution, rounded and clipped to `low..high`."""

    mean: float = 128.0
    """Mean of the values (not of their logarithm) before clipping."""
    std: float = 256.0
    """Standard deviation of the values (not of their logarithm) before clipping."""
    low: int = 1
    """Smallest value, at least 0."""
    high: int = 4096
    """Largest value."""

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)
        if self.mean <= 0 or self.std < 0:
            raise ConfigError(f"mean must be positive and std at least 0, got {self.mean} and {self.std}")

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""
        # exp(N(mu, sigma^2)) has mean exp(mu + sigma^2/2) and variance (exp(sigma^2) - 1) * mean^2.
        sigma2 = math.log1p((self.std / self.mean) ** 2)
        mu = math.log(self.mean) - sigma2 / 2
        return _round_and_clip(rng.lognormal(mu, math.sqrt(sigma2), size), self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Zipf:
    """P(k) proportional to k^-exponent for k = low..high."""

    exponent: float = 1.2
    """At least 0. The support is finite, so exponents of 1 and below are valid too."""
    low: int = 1
    """Smallest value, at least 1."""
    high: int = 4096
    """Largest value."""

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)
        if self.low < 1 or self.exponent < 0:
            raise ConfigError(f"low must be at least 1 and exponent at least 0, got {self.low} and {self.exponent}")

    @cached_property
    def _cumulative(self) -> NDArray[np.float64]:
        mass = np.arange(self.low, self.high + 1, dtype=np.float64) ** -self.exponent
        cumulative: NDArray[np.float64] = np.cumsum(mass)
        cumulative /= cumulative[-1]
        return cumulative

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""
        return self.low + np.searchsorted(self._cumulative, rng.random(size), side="right").astype(np.int64)


DISTRIBUTIONS: dict[str, Callable[..., Distribution]] = {
    "uniform": Uniform,
    "normal": Normal,
    "zipf": Zipf,
    "lognormal": Lognormal,
}


def parse_distribution(text: str) -> Distribution:
    """Parse a distribution from `name:parameter=value,...`; omitted parameters keep their defaults.

    Raises:
        ConfigError: the name, a parameter or a value is unknown; the message lists the known ones.

    """
    name, _, rest = text.partition(":")
    if name not in DISTRIBUTIONS:
        raise ConfigError(f"unknown distribution {name!r} (in {text!r}); known: {', '.join(DISTRIBUTIONS)}")
    kind = DISTRIBUTIONS[name]
    types = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, float] = {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        if key not in types:
            raise ConfigError(f"{name} has no parameter {key!r} (in {text!r}); known: {', '.join(types)}")
        number = int if types[key] is int else float
        try:
            values[key] = number(value)
        except ValueError as error:
            raise ConfigError(f"{key} must be {number.__name__}, got {value!r} (in {text!r})") from error
    return kind(**values)


def _check_range(low: int, high: int) -> None:
    if not 0 <= low <= high:
        raise ConfigError(f"low must be between 0 and high, got low={low} high={high}")


def _round_and_clip(values: NDArray[np.float64], low: int, high: int) -> NDArray[np.int64]:
    return np.clip(np.rint(values), low, high).astype(np.int64)
