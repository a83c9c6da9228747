"""The cost of a sample, fitted to the compute times of a run without balancing.

Times are those of a rank's GPU from the encoder's forward to the end of its backward, where it waits for no other rank.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from end_to_end.results import EVEN, Floats, Ints, RunResult, Segment, compute_ms, job_ms, segments_of
from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import HSTUCost, MeasuredCost
from evenrank.dataloader.balance.costs.model_costs import TokenCost
from evenrank.datasets.schema import USER_ID

# Settings that do not change what a rank computes for the samples that it trains on.
_NOT_OF_COMPUTE = ("data", "out", "balance", "strategy", "refit_every")


def fit_cost(result: RunResult) -> MeasuredCost:
    """Fit a cost to the times of a run without balancing.

    Each rank and batch counts once, with the median of its repeats. Ranks that fit the same file have the same cost,
    which a Balancer demands, even if their CPUs differ in the last bits of what they compute.

    Raises:
        ConfigError: the run failed or is balanced, or `MeasuredCost.fit` refuses its times.
    """
    if result.balanced is None:
        raise ConfigError(f"no cost can be fitted to {result.name!r}, which failed: {result.failure}; run it again")
    if is_balanced(result):
        raise ConfigError(
            f"no cost can be fitted to {result.name!r}, whose ranks are balanced: all take about as long; name a run "
            'with balance = "none"'
        )
    batches, milliseconds = _median_of_repeats(result)
    tokens = result.balanced.sample_tokens[:, batches]
    cost = MeasuredCost.fit(
        tokens.reshape(-1, tokens.shape[-1]),
        milliseconds.reshape(-1) / 1e3,
        interleave_actions=True,
        contextual=_contextual(result),
        max_tokens=_max_tokens(result),
    )
    return dataclasses.replace(
        cost,
        linear=int(_rounded(cost.linear)),
        quadratic=int(_rounded(cost.quadratic)),
        seconds_per_step=_rounded(cost.seconds_per_step),
        r2=_rounded(cost.r2),
    )


def is_balanced(result: RunResult) -> bool:
    """Return whether the run's samples were distributed by their cost."""
    settings = result.settings
    return result.data_ranks > 1 and settings["balance"] != "none" and settings["strategy"] != "none"


def configuration(result: RunResult) -> str:
    """Return what decides how long a rank computes for given samples, equal for runs that differ in balancing alone."""
    return repr(sorted((name, value) for name, value in result.settings.items() if name not in _NOT_OF_COMPUTE))


def trained_segments(result: RunResult) -> list[Segment]:
    """Return the segments that train the batches of `result.balanced`."""
    return [segment for segment in result.segments if segment.kind != EVEN and len(segment.batch)]


def predict(cost: MeasuredCost, tokens: Ints) -> Floats:
    """Return the seconds that ranks compute, [...], given the tokens of their samples, [..., rows], 0 for padding."""
    seconds: Floats = sample_seconds(cost, tokens).sum(axis=-1) + cost.seconds_per_step
    return seconds


def sample_seconds(cost: MeasuredCost, tokens: Ints) -> Floats:
    """Return the seconds of samples with so many tokens, of the same shape; without those of the step itself."""
    seconds: Floats = np.ldexp(_of_tokens(cost, tokens), -cost.fraction_bits)
    return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The costs fitted to a run: a MeasuredCost, and HSTUCost in seconds."""

    run: RunResult
    """Without balancing."""
    measured: MeasuredCost
    hstu: HSTUCost
    seconds_per_operation: float
    """Of HSTUCost, by least squares."""

    @classmethod
    def of(cls, run: RunResult) -> "Fit":
        """Fit both costs.

        Raises:
            ConfigError: see `fit_cost`.
        """
        measured = fit_cost(run)
        assert run.balanced is not None
        hstu = _hstu_cost(run)
        batches, milliseconds = _median_of_repeats(run)
        operations = _of_tokens(hstu, run.balanced.sample_tokens[:, batches]).sum(axis=-1)
        scale = float((operations * milliseconds).sum() / (operations**2).sum()) / 1e3
        return cls(run=run, measured=measured, hstu=hstu, seconds_per_operation=scale)

    @property
    def hstu_break_even(self) -> float:
        """Tokens of a sample at which the linear and the quadratic part of HSTUCost are equal."""
        of_one, of_two = _of_tokens(self.hstu, np.array([1, 2]))
        quadratic = (of_two - 2 * of_one) / 2
        return float((of_one - quadratic) / quadratic)

    def predict(self, tokens: Ints) -> tuple[Floats, Floats]:
        """Return the seconds that `measured` and `hstu` predict for ranks, as `predict` does."""
        return predict(self.measured, tokens), _of_tokens(self.hstu, tokens).sum(axis=-1) * self.seconds_per_operation


def _median_of_repeats(result: RunResult) -> tuple[Ints, Floats]:
    """Return which batches were trained, [n], and how long each rank computed for each in milliseconds, [W, n]."""
    segments = trained_segments(result)
    steps = np.concatenate([segment.batch for segment in segments])
    times = np.concatenate([compute_ms(segment) for segment in segments], axis=1)
    batches = np.unique(steps)
    return batches, np.stack([np.median(times[:, steps == batch], axis=1) for batch in batches], axis=1)


def _of_tokens(cost: TokenCost, tokens: Ints) -> Floats:
    """Return the costs of samples without candidates as float64, which does not overflow where they are summed."""
    return cost.of_tokens(tokens, np.zeros_like(tokens)).astype(np.float64)


def _hstu_cost(result: RunResult) -> HSTUCost:
    settings = result.settings
    return HSTUCost(
        hidden=settings["hidden"],
        heads=settings["heads"],
        head_dim=settings["hidden"] // settings["heads"],
        layers=settings["layers"],
        interleave_actions=True,
        contextual=_contextual(result),
        max_tokens=_max_tokens(result),
    )


def _contextual(result: RunResult) -> tuple[str, ...]:
    return (USER_ID,) if result.settings["user_id"] else ()


def _rounded(value: float) -> float:
    return float(f"{value:.8e}")


def _max_tokens(result: RunResult) -> int:
    return len(_contextual(result)) + 2 * int(result.settings["max_history_length"])


_DRAWS = 10  # for each step: the largest residuals are rare, and a step that has one takes much longer


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """How long steps take, as measured with W GPUs.

    A step takes the overhead and the time of its slowest rank; a rank takes

        (a + cost of its samples) x factor x noise

    with a and the cost of `MeasuredCost`, fitted to steps without balancing. Factors are those of GPUs that are slower
    than others in every step, noise varies from step to step. Both are drawn from those of perfectly even steps,
    independently of each other and of the rank's load. Without balancing, ranks that wait compute more slowly: kernels
    of the all-reduce occupy multiprocessors until the slowest rank is there. That is in the fitted cost, but not in the
    time of the slowest rank, nor in steps that are balanced. Times are means, which add up, where medians do not.
    """

    run: str
    """Its name."""
    gpus: int
    cost: MeasuredCost
    factors: Floats
    """[W]: of each rank, the median over steps of measured over predicted compute times."""
    noise: Floats
    """[n]: measured compute times over predicted ones times the rank's factor, of each rank and step."""
    overhead: float
    """Seconds of a step beyond its slowest rank's computing, mean over steps."""

    @classmethod
    def of(cls, result: RunResult) -> "Calibration":
        """Calibrate to a run.

        Raises:
            ConfigError: see `fit_cost`; or the run has no even steps.
        """
        cost = fit_cost(result)
        segments = segments_of(result, EVEN)
        if result.even is None or not segments:
            raise ConfigError(f"{result.name!r} has no perfectly even steps; run it again")
        predicted = 1e3 * predict(cost, result.even.sample_tokens)
        ratios = np.concatenate([compute_ms(one) / predicted[:, one.batch] for one in segments], axis=1)
        overheads = np.concatenate([job_ms(one) - compute_ms(one).max(axis=0) for one in segments])
        factors = np.median(ratios, axis=1)
        return cls(
            run=result.name,
            gpus=result.gpus,
            cost=cost,
            factors=factors,
            noise=(ratios / factors[:, np.newaxis]).ravel(),
            overhead=float(overheads.mean()) / 1e3,
        )

    def step_seconds(self, compute: Floats) -> float:
        """Return the mean time of steps, given the seconds that each rank computes without factors and noise.

        Args:
            compute: [steps, W].
        """
        rng = np.random.default_rng(0)  # the same draws for all strategies
        slowest = [
            (compute * rng.choice(self.factors, compute.shape) * rng.choice(self.noise, compute.shape)).max(axis=1)
            for _ in range(_DRAWS)
        ]
        return self.overhead + float(np.mean(slowest))
