"""Simulation of steps on many ranks: draw the samples' lengths and run the planner, without GPUs or processes."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.cli.options import is_dataset
from evenrank.cli.reports.gains import Gain
from evenrank.core import files
from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.storage import local_path
from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.costs.cost import COST_BITS, Cost, cost_shift, count_tokens, scaled_costs
from evenrank.dataloader.balance.costs.measured_cost import MeasuredCost
from evenrank.dataloader.balance.costs.model_costs import PaddedCost, counted_tokens
from evenrank.dataloader.balance.metrics.log import read_json_lines
from evenrank.dataloader.balance.metrics.step_metrics import StepMetrics, measure_step, summarize
from evenrank.dataloader.balance.partition.strategies import Assignment, unbalanced, warm_up
from evenrank.dataloader.balance.plan import assign_to_steps, plan_steps
from evenrank.datasets.distributions import DISTRIBUTIONS, Distribution, parse_distribution
from evenrank.datasets.schema import ACTION, ITEM_ID
from evenrank.datasets.store import open_store

# In a SequenceBatch an event is an item and an action; a sample has a label, its number of candidates and its id.
_BYTES_PER_EVENT = 16
_BYTES_PER_SAMPLE = 24


@dataclass(frozen=True, kw_only=True)
class LengthSource:
    """A source of history lengths, cut to `max_length`: known ones, [rows], or a distribution."""

    lengths: NDArray[np.int64] | None = None
    distribution: Distribution | None = None
    max_length: int = (1 << 31) - 1
    of_tokens: bool = False
    """The lengths are the tokens that a cost has counted, not events."""

    def draw(self, rng: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
        """Draw lengths, int64 [num_samples]; known ones without replacement, unless there are too few."""
        if self.lengths is not None:
            drawn = rng.choice(self.lengths, num_samples, replace=self.repeats_rows(num_samples))
        else:
            assert self.distribution is not None
            drawn = self.distribution.sample(rng, num_samples)
        cut: NDArray[np.int64] = np.minimum(drawn, self.max_length)
        return cut

    def repeats_rows(self, num_samples: int) -> bool:
        """Return whether a step of `num_samples` samples needs more rows than are known."""
        return self.lengths is not None and num_samples > len(self.lengths)


def open_source(text: str, split: str, max_length: int) -> LengthSource:
    """Open a source of lengths: a dataset, a distribution, a .npy or .parquet file of lengths, or the log of a run.

    All but those of a log, which are the tokens that the run trained on, are cut to `max_length`.
    """
    path, has_dataset = local_path(text), is_dataset(text)
    if text.partition(":")[0] in DISTRIBUTIONS and not path.exists():
        return LengthSource(distribution=parse_distribution(text), max_length=max_length)
    is_log = path.suffix == ".jsonl"
    if has_dataset:
        lengths = open_store(text, split).lengths
    elif path.suffix in (".npy", ".parquet"):
        lengths = _read_lengths(path)
    elif is_log:
        tokens = [record.loaded_tokens for record in read_json_lines(path).records]
        lengths = np.concatenate([np.empty(0, dtype=np.int64), *tokens])
        lengths = lengths[lengths > 0]
    else:
        missing = "" if path.exists() else ", and no such file or folder exists"
        raise ConfigError(
            f"{text!r} is no source of lengths{missing}; pass a folder written by `evenrank preprocess`, a .npy or "
            f".parquet file of lengths, the .jsonl log of a run, or one of the distributions {', '.join(DISTRIBUTIONS)}"
        )
    if len(lengths) == 0:
        raise ConfigError(f"{text} has no lengths" + f" in the split {split!r}" * has_dataset + "; choose another")
    return LengthSource(lengths=lengths, max_length=int(lengths.max()) if is_log else max_length, of_tokens=is_log)


def _read_lengths(path: Path) -> NDArray[np.int64]:
    """Read an array of integers [n], or the only column of a table."""
    with files.open_regular(path) as file:
        try:
            if path.suffix == ".npy":
                lengths = np.asarray(np.load(file))
            else:
                import pyarrow.parquet as pq

                table = pq.read_table(file)
                lengths = table.column(0).to_numpy() if table.num_columns == 1 else np.empty((0, table.num_columns))
        except (OSError, EOFError, ValueError) as error:  # PyArrow's errors are of these
            raise DataError(f"{path} cannot be read ({first_line(error)}); write the lengths again") from error
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (len(lengths) and int(lengths.min()) < 0):
        found = f"{lengths.dtype} of shape {list(lengths.shape)}"
        raise DataError(f"{path} must have one column of integers, the lengths, none negative; it has {found}")
    as_int64: NDArray[np.int64] = lengths.astype(np.int64)
    return as_int64


class SimulatedStep(NamedTuple):
    """A step of W ranks with B samples each; arrays are [W, B]."""

    lengths: NDArray[np.int64]  # of each sample
    costs: NDArray[np.int64]  # scaled as a Balancer does, so that those of a step can be summed
    tokens: NDArray[np.int64]
    assignment: Assignment
    before: NDArray[np.int64]  # [W]: loads of the step that the order has here, without windows
    plan_seconds: float


def simulated_steps(
    source: LengthSource, balance: BalanceConfig, world_size: int, *, batch_size: int, steps: int, seed: int = 0
) -> Iterator[SimulatedStep]:
    """Draw steps and plan each; the arguments are those of `simulate`."""
    warm_up(balance.strategy, limits_tokens=balance.max_tokens_per_rank is not None)
    rng = np.random.default_rng((seed, world_size))
    shape = (-1, world_size, batch_size)
    per_window = balance.window * world_size * batch_size
    for first in range(0, steps, balance.window):
        lengths = np.concatenate([source.draw(rng, world_size * batch_size) for _ in range(balance.window)])
        by_key, none = _lengths_by_key(balance.cost, lengths, of_tokens=source.of_tokens), np.zeros_like(lengths)
        tokens = count_tokens(balance.cost, by_key, per_window)
        costs, costs_in_window = (
            scaled_costs(balance.cost, by_key, none, samples_per_step=count)
            for count in (world_size * batch_size, per_window)
        )
        start = time.perf_counter()
        places = np.arange(per_window)
        if balance.window > 1:
            num_steps = balance.window
            step_of = assign_to_steps(costs_in_window, tokens, num_steps, world_size, balance, seed=seed, epoch=first)
            places = np.argsort(step_of, kind="stable")
        seconds = (time.perf_counter() - start) / balance.window
        for order, loaded in zip(places.reshape(shape)[: steps - first], costs.reshape(shape), strict=False):
            start = time.perf_counter()
            (rank_of,) = plan_steps(costs[order][np.newaxis], tokens[order][np.newaxis], balance)
            assignment = Assignment(rank_of=rank_of, padded=balance.partition_options["padded"])
            plan_seconds = seconds + time.perf_counter() - start
            before = unbalanced(rank_of >= 0, padded=assignment.padded).loads(loaded)
            yield SimulatedStep(lengths[order], costs[order], tokens[order], assignment, before, plan_seconds)


def _lengths_by_key(cost: Cost, lengths: NDArray[np.int64], *, of_tokens: bool) -> dict[str, NDArray[np.int64]]:
    counted = counted_tokens(cost) or {}
    others = {ACTION: lengths, **dict.fromkeys(counted.get("contextual", ()), np.ones_like(lengths))}
    if of_tokens:
        others = {key: np.zeros_like(lengths) for key in others}
    return {**others, counted.get("history_key", ITEM_ID): lengths}


def simulate(
    source: LengthSource,
    balance: BalanceConfig,
    world_size: int,
    *,
    batch_size: int,
    steps: int,
    seed: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> list[StepMetrics]:
    """Draw steps, the same for every strategy and window, balance them, and return their metrics.

    The cost gets the lengths of `item_id` and `action`, and one value for each `contextual` key of a `TokenCost`. The
    seconds per step of a MeasuredCost count as a load of every rank. Of the times, only those of planning are known.
    """
    metrics = []
    fixed = _fixed_load(balance.cost, world_size * batch_size)
    for step in simulated_steps(source, balance, world_size, batch_size=batch_size, steps=steps, seed=seed):
        sample_bytes = step.lengths * _BYTES_PER_EVENT + _BYTES_PER_SAMPLE
        of_step = measure_step(step.assignment, costs=step.costs, tokens=step.tokens, sample_bytes=sample_bytes)
        of_step = dataclasses.replace(of_step, before=step.before, plan_seconds=step.plan_seconds)
        metrics.append(with_fixed_load(of_step, fixed))
        on_step()
    return metrics


def _fixed_load(cost: Cost, samples_per_step: int) -> int:
    row = cost.row if isinstance(cost, PaddedCost) else cost
    if not isinstance(row, MeasuredCost):
        return 0
    return round(row.seconds_per_step * 2.0**row.fraction_bits) >> cost_shift(cost, samples_per_step)


def with_fixed_load(step: StepMetrics, load: int) -> StepMetrics:
    """Return a step in which every rank has a further load, which balancing cannot change."""
    if load + int(step.before.max()) >= 1 << COST_BITS:
        raise ConfigError(
            "the fixed time is too long beside that of the samples; check --fixed-ms, or the measured cost"
        )
    return dataclasses.replace(
        step, before=step.before + load, after=step.after + load, lower_bound=step.lower_bound + load
    )


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Steps that are drawn alike for all ways to balance."""

    source: LengthSource
    batch_size: int
    steps: int
    seed: int = 0
    fixed_share: float = 0.0
    """Of the time of a step before balancing."""
    is_timed: bool = True
    """The planner's time is that of compiled loops."""

    def gain(self, world_size: int, balance: BalanceConfig, *, fixed: float | None = None, **progress: Any) -> Gain:
        """Return what balancing gains; `fixed` is the load that it cannot change, None: by `fixed_share`."""
        sizes: dict[str, Any] = {"batch_size": self.batch_size, "steps": self.steps, "seed": self.seed}
        steps = simulate(self.source, balance, world_size, **sizes, **progress)
        if not self.is_timed:
            steps = [dataclasses.replace(step, plan_seconds=0.0) for step in steps]
        unit = 2.0 ** cost_shift(balance.cost, world_size * self.batch_size)
        if fixed is None:
            fixed = unit * summarize(steps).heaviest_before * self.fixed_share / (1 - self.fixed_share)
        steps = [with_fixed_load(step, round(fixed / unit)) for step in steps]
        return Gain(world_size, balance.strategy, steps, balance.window, unit=unit, fixed=fixed)
