"""The row of a run: what its steps took and how even they were, from the marks of all ranks. Pure functions.

W is the number of processes, N that of the batches that a run cycles through.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance import StepMetrics

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Row = dict[str, Any]

LIVE, PREPARED, EVEN = "live", "prepared", "even"
"""Kinds of batches: those that are balanced while training, by a Balancer or the loader that reads them; the same,
balanced before the clock starts; batches that give every rank the same lengths, of the same cost as the step's mean."""
_KEPT_WITHOUT_BALANCE = ("balance", "strategy", "tolerance", "refit_every", "num_workers")


class Work(NamedTuple):
    """What the batches give each rank to do: [W, N] each."""

    tokens: Ints
    pairs: Ints
    """Pairs of tokens of which the first sees the second."""
    predictions: Ints
    loads: Ints
    """Cost of the samples, by the run's cost."""


class Segment(NamedTuple):
    """Consecutive steps of a kind of batches in a round; those that warm up are left out."""

    kind: str
    round: int
    batch: Ints
    """[steps]: index of each step's batch, 0..N-1."""
    marks: Floats
    """[W, steps, 5]: when a rank's GPU reached a point of the step, in milliseconds since a moment that is the same for
    all ranks: the end of the step before; the begin of the encoder's forward, after its embeddings have come; the end
    of the forward; the end of the encoder's backward; the end of the step, its optimizer included."""

    @property
    def step_ms(self) -> Floats:
        """What each step took: [steps], the mean over ranks.

        Not the maximum: a rank that ends a step late begins the next one late, so maxima would add up to more than the
        segment took.
        """
        times: Floats = (self.marks[..., 4] - self.marks[..., 0]).mean(axis=0)
        return times

    @property
    def compute_ms(self) -> Floats:
        """How long each rank computed: [W, steps]; waiting for other ranks comes before and after."""
        times: Floats = self.marks[..., 3] - self.marks[..., 1]
        return times

    def by_batch(self, statistic: Callable[[Floats], Any]) -> dict[int, float]:
        """Return a statistic of the steps of each batch."""
        return {int(each): float(statistic(self.step_ms[self.batch == each])) for each in np.unique(self.batch)}


def summarize(
    segments: Sequence[Segment],
    work: Work,
    steps: Sequence[StepMetrics],
    *,
    flops: Mapping[str, int],
    peak_flops: float | None,
    data_ranks: int,
) -> Row:
    """Return the figures of a run; lists have a value for each round.

    Ratios compare steps with the same samples, because batches differ far more than kinds do: a batch counts with the
    median of its steps in a round, a round with the mean over batches. Exposed is the time by which live steps are
    longer than prepared ones, with stalls that of means in place of medians; idle is the share of a step in which ranks
    have computed and the slowest one still does.

    Args:
        work: of the live batches.
        steps: metrics of each batch, from when it was balanced before the clock started.
        flops: of the model on one GPU, forward and backward: per_token, per_pair, per_prediction.
        peak_flops: FLOP/s of one GPU, if known.
        data_ranks: ranks over which samples are balanced: fewer than W if some divide heads.
    """
    gpus = len(work.tokens)
    batch_flops = sum(
        flops[f"per_{name}"] * getattr(work, f"{name}s").sum(axis=0) for name in ("token", "pair", "prediction")
    )
    batch_tokens = work.tokens.sum(axis=0) * data_ranks / gpus
    live = [segment for segment in segments if segment.kind == LIVE]
    seconds = [float(segment.step_ms.sum()) / 1e3 for segment in live]
    tflops = [float(np.sum(batch_flops[one.batch])) / 1e12 / gpus / of for one, of in zip(live, seconds, strict=True)]
    return {
        "steps": sum(len(segment.batch) for segment in live),
        "step_ms": _rounded(np.median(segment.step_ms) for segment in live),
        "step_p95_ms": round(float(np.percentile(np.concatenate([segment.step_ms for segment in live]), 95)), 3),
        "live_over_even": ratios(segments, LIVE, EVEN, np.median),
        "prepared_over_even": ratios(segments, PREPARED, EVEN, np.median),
        "exposed_percent": _percent(ratios(segments, LIVE, PREPARED, np.median)),
        "exposed_with_stalls_percent": _percent(ratios(segments, LIVE, PREPARED, np.mean)),
        "idle_percent": _rounded(
            100 * np.mean((one.compute_ms.max(axis=0) - one.compute_ms.mean(axis=0)) / one.step_ms) for one in live
        ),
        "tokens_per_s": _rounded(batch_tokens[one.batch].sum() / of for one, of in zip(live, seconds, strict=True)),
        "tflops": _rounded(tflops),
        "mfu_percent": None if peak_flops is None else _rounded(1e14 * each / peak_flops for each in tflops),
        "load_before": round(_heaviest(np.array([step.before for step in steps])), 4),
        "load_after": round(_heaviest(work.loads.T), 4),
        "moved_tokens_percent": round(
            100 * sum(step.moved_tokens for step in steps) / sum(step.tokens for step in steps), 2
        ),
    }


def ratios(segments: Sequence[Segment], kind: str, other: str, statistic: Callable[[Floats], Any]) -> list[float]:
    """Return the step time of a kind of batches over that of another: [rounds]."""
    found = {(segment.kind, segment.round): segment.by_batch(statistic) for segment in segments}
    numbers = sorted({segment.round for segment in segments})
    pairs = [(found[kind, number], found[other, number]) for number in numbers]
    assert all(one.keys() == two.keys() for one, two in pairs)  # kinds take the same steps
    return _rounded(sum(one.values()) / sum(two.values()) for one, two in pairs)


def with_unbalanced(rows: Sequence[Row]) -> list[Row]:
    """Return rows with `x_unbalanced`: tokens/s of each round over the mean of the run that differs in balancing alone.

    Rows without such a run, and those of failed runs, have none.
    """
    bases = {_setup(row): row for row in rows if row["conditions"]["settings"]["balance"] == "none"}
    found = []
    for row in rows:
        base, ratio = bases.get(_setup(row), {}), None
        if row.get("tokens_per_s") and base.get("tokens_per_s"):
            ratio = _rounded(each / np.mean(base["tokens_per_s"]) for each in row["tokens_per_s"])
        found.append({**row, "x_unbalanced": ratio})
    return found


def _setup(row: Row) -> str:
    conditions = row["conditions"]
    kept = {key: value for key, value in conditions["settings"].items() if key not in _KEPT_WITHOUT_BALANCE}
    return repr((row["lengths"], conditions["gpus"], conditions["workload"], sorted(kept.items())))


def _heaviest(loads: Ints) -> float:
    """Return the largest load over the mean of the ranks, mean over batches: loads [N, ranks]."""
    return float((loads.max(axis=1) / np.maximum(loads.mean(axis=1), 1)).mean())


def _percent(ratios_of_rounds: list[float]) -> list[float]:
    return _rounded(100 * (ratio - 1) for ratio in ratios_of_rounds)


def _rounded(values: Any) -> list[float]:
    return [round(float(value), 6) for value in values]
