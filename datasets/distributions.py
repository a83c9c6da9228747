"""Distributions of whole numbers, for history lengths and item popularity: uniform, normal, Zipf, lognormal.

Each draws int64 values within `low..high`, and can be written as text, which is how command lines name it:

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
    """Draws whole numbers."""

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Every whole number from `low` to `high` with the same probability."""

    low: int = 1
    high: int = 1024

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""
        return rng.integers(self.low, self.high, size=size, endpoint=True, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Normal:
    """A normal distribution, rounded and clipped to `low..high`; mean and std are those before clipping."""

    mean: float = 128.0
    std: float = 64.0
    low: int = 1
    high: int = 4096

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)
        if self.std < 0:
            raise ConfigError(f"std must not be negative, got {self.std}")

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""
        return _round_and_clip(rng.normal(self.mean, self.std, size), self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Lognormal:
    """A lognormal distribution with this mean and std (not those of its logarithm), rounded and clipped."""

    mean: float = 128.0
    std: float = 256.0
    low: int = 1
    high: int = 4096

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)
        if self.mean <= 0 or self.std < 0:
            raise ConfigError(f"mean must be positive and std not negative, got {self.mean} and {self.std}")

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` values: int64 [size]."""
        # Of exp(N(mu, sigma^2)) the mean is exp(mu + sigma^2/2), the variance (exp(sigma^2) - 1) * mean^2.
        sigma2 = math.log1p((self.std / self.mean) ** 2)
        mu = math.log(self.mean) - sigma2 / 2
        return _round_and_clip(rng.lognormal(mu, math.sqrt(sigma2), size), self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Zipf:
    """P(k) in proportion to k^-exponent for k = low..high; cut off, so any exponent from 0 on will do."""

    exponent: float = 1.2
    low: int = 1
    high: int = 4096

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)
        if self.low < 1 or self.exponent < 0:
            raise ConfigError(f"low must be at least 1 and exponent not negative, got {self.low} and {self.exponent}")

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
    """Read a distribution from `name:parameter=value,...`; parameters that are left out keep their defaults.

    Raises:
        ConfigError: the name, a parameter or a value is not known; the message lists what is.

    """
    name, _, rest = text.partition(":")
    if name not in DISTRIBUTIONS:
        raise ConfigError(f"no distribution is called {name!r} (in {text!r}); there are {', '.join(DISTRIBUTIONS)}")
    kind = DISTRIBUTIONS[name]
    types = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, float] = {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        if key not in types:
            raise ConfigError(f"{name} has no parameter {key!r} (in {text!r}); it has {', '.join(types)}")
        number = int if types[key] is int else float
        try:
            values[key] = number(value)
        except ValueError as error:
            raise ConfigError(f"{key} must be {number.__name__}, got {value!r} (in {text!r})") from error
    return kind(**values)


def _check_range(low: int, high: int) -> None:
    if not 0 <= low <= high:
        raise ConfigError(f"low must not be negative nor above high, got low={low} high={high}")


def _round_and_clip(values: NDArray[np.float64], low: int, high: int) -> NDArray[np.int64]:
    return np.clip(np.rint(values), low, high).astype(np.int64)
