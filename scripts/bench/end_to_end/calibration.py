"""`Calibration`: what a run without balancing, and its perfectly even steps, say about the times of steps."""

from dataclasses import dataclass

import numpy as np

from end_to_end.cost_fit import fit_cost, predict
from end_to_end.results import EVEN, Floats, RunResult
from end_to_end.step_times import compute_ms, job_ms, segments_of
from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import MeasuredCost

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
