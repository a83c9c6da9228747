"""Lengths -> the cost of training each sample, as integers.

A cost is any callable that takes the lengths and the numbers of candidates of samples, and returns int64:

    cost({"item_id": [12, 0, 7], "action": [12, 0, 7], ...}, [1, 0, 1]) -> [c0, c1, c2]

Costs are integers so that rounding cannot make ranks plan differently. They are shifted right by a number of bits that
follows from the configuration alone, so that the costs of a whole step add up below 2^62. `COSTS` has those of
`model_costs`, and those of users, by name.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, EvenrankError, one_line
from evenrank.core.registry import Registry
from evenrank.core.settings import construct

# The costs of a step are summed in int64: one bit is the sign, one is left for the sum of two sums.
COST_BITS = 62

MAX_TOKENS = (1 << 31) - 1
"""Tokens of a sample, which ranks send as int32."""


class Cost(Protocol):
    """The cost of a sample, in any unit: only ratios matter."""

    def __call__(
        self, lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64], /
    ) -> NDArray[np.int64]:
        """Return the cost of each of n samples, of one or more batches, without padding: int64 [n], none negative.

        The arrays are passed by position, and are the function's own: it may write to them and keep them.

        Args:
            lengths: per jagged key, int64 [n]. A key that occurs in a second KeyedJaggedTensor is called `field.key`.
            num_candidates: int64 [n]; zeros for batches without candidates.
        """


class CountsTokens(Protocol):
    """A cost that knows the number of tokens of a sample in the model; optional."""

    def tokens(self, lengths: Mapping[str, NDArray[np.int64]], /) -> NDArray[np.int64]:
        """Return the tokens of each sample: int64 [B], each 0..2^31-1, given the lengths per jagged key, int64 [B]."""


class BoundsCosts(Protocol):
    """A cost that knows its largest value, so that costs can be scaled to add up without overflow; optional."""

    @property
    def max_cost(self) -> int:
        """The cost of the most expensive sample that can occur."""


COSTS: Registry[Any] = Registry("cost", expected="a function of lengths and candidates, or a class", accepts=callable)
RegisteredCost = TypeVar("RegisteredCost", bound=Cost | Callable[..., Cost])


def register_cost(name: str) -> Callable[[RegisteredCost], RegisteredCost]:
    """Return a decorator that makes a function, or a class of costs, available to `BalanceConfig.from_dict` by name.

    It raises a ConfigError if another module has taken the name or the decorated object cannot be called. The same
    module may replace its cost; `COSTS.unregister(name)` removes one.
    """
    return COSTS.register(name)


def resolve_cost(spec: Any) -> Cost:
    """Return a registered cost, given its name, or a mapping with its `name` and the settings of its class.

    Settings may be costs themselves: {"name": "padded", "row": {"name": "linear", "interleave_actions": False}}. A
    saved cost is loaded from its `path`: {"name": "measured", "path": "out/cost.json"}.

    Raises:
        ConfigError: there is no such cost, or a setting is unknown, missing or of the wrong type.
        DataError: the file of a saved cost is missing or malformed.
    """
    settings = dict(spec) if isinstance(spec, Mapping) else {"name": spec}
    made = COSTS[name := settings.pop("name", None)]
    for key, value in settings.items():
        if isinstance(value, Mapping) and "name" in value:
            settings[key] = resolve_cost(value)
    if isinstance(made, type):
        made = construct(getattr(made, "load", made) if "path" in settings else made, settings, f"the cost {name!r}")
    elif settings:
        raise ConfigError(f"the cost {name!r} is a function, without settings; leave out {', '.join(settings)}")
    cost: Cost = made
    return cost


def count_tokens(cost: Cost, lengths: Mapping[str, NDArray[np.int64]], num_samples: int) -> NDArray[np.int64]:
    """Return the tokens of each sample, int64 [num_samples]: `cost.tokens(lengths)`, or else the sum over all keys.

    Raises:
        ConfigError: the cost returns anything but integers 0..2^31-1, one for each sample.
    """
    if (tokens_of := getattr(cost, "tokens", None)) is None:
        total: NDArray[np.int64] = np.sum([*lengths.values(), np.zeros(num_samples, dtype=np.int64)], axis=0)
        return total
    tokens = _integers(f"tokens() of the cost {_name(cost)}", tokens_of, lengths, num_samples)
    low, high = int(tokens.min(initial=0)), int(tokens.max(initial=0))
    if low < 0 or high > MAX_TOKENS:
        raise ConfigError(
            f"tokens() of the cost {_name(cost)} must return 0..{MAX_TOKENS} for each sample, got {low}..{high}"
        )
    return tokens.astype(np.int64)


def cost_shift(cost: Cost, samples_per_step: int) -> int:
    """Return the bits by which costs are shifted right so that those of a step add up within 62; 0 if unbounded."""
    max_cost = int(getattr(cost, "max_cost", 0))
    return max(0, (samples_per_step * max_cost).bit_length() - COST_BITS)


def scaled_costs(
    cost: Cost,
    lengths: Mapping[str, NDArray[np.int64]],
    num_candidates: NDArray[np.int64],
    *,
    samples_per_step: int,
) -> NDArray[np.int64]:
    """Return the costs of n samples, int64 [n], scaled so that those of `samples_per_step` samples can be summed.

    Raises:
        ConfigError: the cost raises, the costs are not integers, one is negative, or so large that a step could
            overflow.
    """
    costs = _integers(f"the cost {_name(cost)}", cost, lengths, len(num_candidates), num_candidates)
    if len(costs) and int(costs.min()) < 0:
        raise ConfigError(f"the cost {_name(cost)} must not be negative, got {int(costs.min())}")
    scaled: NDArray[np.int64] = costs.astype(np.int64, copy=False) >> cost_shift(cost, samples_per_step)
    limit = (1 << COST_BITS) // samples_per_step
    if int(scaled.max(initial=0)) > limit:
        raise ConfigError(
            f"a cost of {int(costs.max())} is too large to be summed over {samples_per_step:,} samples; raise "
            f"max_tokens of the cost, or return costs of at most {limit}"
        )
    return scaled


def describe_cost(cost: object) -> str:
    """Describe a cost by a text that is the same in all processes for equal costs."""
    text = repr(cost) if dataclasses.is_dataclass(cost) else _name(cost)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _name(cost: object) -> str:
    return str(getattr(cost, "__qualname__", type(cost).__qualname__))


def _integers(
    name: str,
    function: Callable[..., object],
    lengths: Mapping[str, NDArray[np.int64]],
    num_samples: int,
    *others: NDArray[np.int64],
) -> NDArray[np.integer]:
    """Return what a user's function makes of copies of the arrays, in which it may work in place, after checking it."""
    cause: Exception | None = None
    try:
        found = np.asarray(function({key: of_key.copy() for key, of_key in lengths.items()}, *map(np.copy, others)))
        if found.shape == (num_samples,) and found.dtype.kind in "iu":
            return found
        problem = f"must return int64 of shape {(num_samples,)}, got {found.dtype} of shape {found.shape}"
    except EvenrankError:  # such as that of a TokenCost, which says what it lacks
        raise
    except Exception as error:
        problem, cause = f"raised {one_line(error)}", error
    raise ConfigError(f"{name} {problem}; the batch has the keys {', '.join(lengths)}") from cause
