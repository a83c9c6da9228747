"""`Draw`: times of attention on the samples of each rank, before and after balancing, compared with equal lengths.

What is balanced is the attention alone: the cost of a sample is the pairs of its tokens. The speed of light is a batch
of samples of equal length with the mean cost of all: not every rank could have less to do, and nothing is skewed.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attention_bench.timing import KERNEL_BACKWARD, Heads, Passes
from evenrank.core import files
from evenrank.core.errors import DataError
from evenrank.dataloader.balance.partition.strategies import lower_bound, partition
from evenrank.datasets.distributions import Distribution
from rendering import markdown_tables

STRATEGIES = ("none", "karmarkar-karp", "lpt-swap", "min-move")
TOLERANCES = {"min-move": 0.01}  # others: 0.001
TOKENS_PER_EVENT = 2  # an item and its action


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """A step of W ranks, whose samples are assigned by one strategy and trained by one attention."""

    device: str
    """Name of the GPU."""
    lengths: str
    """Name of the distribution."""
    attention: str
    """Name in `ATTENTIONS`."""
    strategy: str
    draw: int
    """Which of the steps, from 0."""
    rank_ms: tuple[float, ...]
    """Forward and backward of each rank's samples."""
    rank_tflops: tuple[float, ...]
    """TFLOP/s of each rank, with a backward of 2.5 times the forward's operations."""
    equal_ms: float
    """Forward and backward of equal lengths of the mean cost."""
    equal_tflops: float
    least_imbalance: float
    """Lower bound of the heaviest load over the mean: above 1 where one sample costs more than a rank's share."""
    runs: int
    """Timed runs of each pass, at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Medians over the draws of a distribution, an attention and a strategy."""

    lengths: str
    attention: str
    strategy: str
    slowest_ms: float
    mean_ms: float
    imbalance: float
    """Slowest rank over the mean."""
    least_imbalance: float
    """See `Draw`."""
    over_equal: float
    """Slowest rank over equal lengths."""
    tflops: float
    """Of the slowest rank."""
    equal_ms: float
    equal_tflops: float


def pairs(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return in how many pairs of tokens the first sees the second: int64 like `tokens`, the tokens of samples."""
    return tokens * (tokens + 1) // 2


def equal_length(tokens: NDArray[np.int64]) -> int:
    """Return the tokens of a sample of the mean cost of these samples, the closest there is, and at least one."""
    mean = float(pairs(tokens).mean())
    return max(round((math.sqrt(8 * mean + 1) - 1) / 2), 1)  # solves n (n + 1) / 2 = mean


def assigned(tokens: NDArray[np.int64], strategy: str) -> list[list[int]]:
    """Return the tokens of the samples of each rank, after balancing.

    Args:
        tokens: int64 [W, B], as they were drawn.
        strategy: see `partition`.

    """
    tolerance = TOLERANCES.get(strategy, 0.001)
    ranks = len(tokens)
    rank_of = partition(pairs(tokens), ranks, strategy=strategy, tokens=tokens, tolerance=tolerance).rank_of
    return [tokens[rank_of == rank].tolist() for rank in range(ranks)]


def measure_draw(
    measure: Callable[[Sequence[int]], Passes],
    heads: Heads,
    tokens: NDArray[np.int64],
    *,
    device: str,
    lengths: str,
    attention: str,
    draw: int,
    on_batch: Callable[[], None],
) -> list[Draw]:
    """Time the ranks of a step with every strategy.

    Args:
        measure: times both passes of the attention on samples of these lengths.
        heads: the rest of the shape.
        tokens: int64 [W, B], of the samples of each rank.
        device: see `Draw`, as the next three.
        lengths: of them.
        attention: of them.
        draw: of them.
        on_batch: called after each of the W * len(STRATEGIES) + 1 batches.

    """

    def timed(batch: Sequence[int]) -> tuple[float, float, int]:
        times = measure(batch).both
        on_batch()
        tflops = (1 + KERNEL_BACKWARD) * heads.forward_flops(batch) / times.ms / 1e9
        return round(times.ms, 4), round(tflops, 2), times.runs

    costs, ranks = pairs(tokens), len(tokens)
    least_imbalance = round(lower_bound(costs, ranks) * ranks / int(costs.sum()), 4)
    equal_ms, equal_tflops, equal_runs = timed([equal_length(tokens)] * tokens.shape[1])
    rows = []
    for strategy in STRATEGIES:
        ms, tflops, runs = zip(*map(timed, assigned(tokens, strategy)), strict=True)
        rows.append(
            Draw(
                device=device,
                lengths=lengths,
                attention=attention,
                strategy=strategy,
                draw=draw,
                rank_ms=ms,
                rank_tflops=tflops,
                equal_ms=equal_ms,
                equal_tflops=equal_tflops,
                least_imbalance=least_imbalance,
                runs=min(equal_runs, *runs),
            )
        )
    return rows


def draw_tokens(distribution: Distribution, ranks: int, samples: int, seed: int) -> NDArray[np.int64]:
    """Draw the tokens of a step's samples: int64 [ranks, samples]; an event is two tokens."""
    events = distribution.sample(np.random.default_rng(seed), ranks * samples)
    return TOKENS_PER_EVENT * events.reshape(ranks, samples)


def summarize(draws: Iterable[Draw]) -> list[Summary]:
    """Return the medians over draws, in the order in which distributions, attentions and strategies occur."""
    groups: dict[tuple[str, str, str], list[Draw]] = {}
    for draw in draws:
        groups.setdefault((draw.lengths, draw.attention, draw.strategy), []).append(draw)
    return [_summary(*key, group) for key, group in groups.items()]


def _summary(lengths: str, attention: str, strategy: str, draws: Sequence[Draw]) -> Summary:
    def median(value: Callable[[Draw], float]) -> float:
        return statistics.median(map(value, draws))

    return Summary(
        lengths=lengths,
        attention=attention,
        strategy=strategy,
        slowest_ms=median(lambda draw: max(draw.rank_ms)),
        mean_ms=median(lambda draw: statistics.mean(draw.rank_ms)),
        imbalance=median(lambda draw: max(draw.rank_ms) / statistics.mean(draw.rank_ms)),
        least_imbalance=median(lambda draw: draw.least_imbalance),
        over_equal=median(lambda draw: max(draw.rank_ms) / draw.equal_ms),
        tflops=median(lambda draw: draw.rank_tflops[int(np.argmax(draw.rank_ms))]),
        equal_ms=median(lambda draw: draw.equal_ms),
        equal_tflops=median(lambda draw: draw.equal_tflops),
    )


def markdown_table(summaries: Iterable[Summary]) -> str:
    """Return the summaries as a table in Markdown."""
    columns = (
        "lengths",
        "attention",
        "strategy",
        "slowest rank, ms",
        "mean, ms",
        "slowest / mean",
        "least by cost",
        "slowest / equal lengths",
        "slowest, TFLOP/s",
        "equal lengths, ms",
        "equal, TFLOP/s",
    )
    rows = [
        (
            row.lengths,
            row.attention,
            row.strategy,
            f"{row.slowest_ms:.2f}",
            f"{row.mean_ms:.2f}",
            f"{row.imbalance:.3f}",
            f"{row.least_imbalance:.3f}",
            f"{row.over_equal:.3f}",
            f"{row.tflops:.0f}",
            f"{row.equal_ms:.2f}",
            f"{row.equal_tflops:.0f}",
        )
        for row in summaries
    ]
    return markdown_tables.table(columns, rows, left=3)


def save(draws: Iterable[Draw], path: Path) -> None:
    """Write one JSON line per draw to a file, atomically, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, "".join(json.dumps(dataclasses.asdict(draw)) + "\n" for draw in draws))


def load(path: Path) -> list[Draw]:
    """Read what `save` wrote.

    Raises:
        DataError: the file is missing, damaged or empty.

    """
    try:
        draws = [_draw(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read as draws: {error}; run it again without --report-only") from error
    if not draws:
        raise DataError(f"{path} has no draws; run it again without --report-only")
    return draws


def _draw(line: str) -> Draw:
    content = json.loads(line)
    for name in ("rank_ms", "rank_tflops"):
        content[name] = tuple(content[name])
    return Draw(**content)
