"""Results whose compute times follow a known cost, with known noise and factors of ranks."""

from typing import Any

import numpy as np

from end_to_end.results import EVEN, LIVE, Floats, Ints, RunResult
from evenrank.dataloader.balance.partition.strategies import partition
from evenrank.datasets.distributions import parse_distribution
from tests.scripts.bench.end_to_end import made_up

A, B, C = 1.5, 2e-3, 6e-7  # milliseconds of a step, of a token, and of a squared token
OVERHEAD = 4.0  # milliseconds of a step before and after computing
ROWS = 32
LENGTHS = {"lognormal": "lognormal:mean=512,std=512,high=4096", "clipped Zipf": "clipped-zipf:exponent=1.2,high=4096"}


def _work(tokens: Ints) -> Any:
    of_ranks = dict.fromkeys(("tokens", "pairs", "predictions", "loads"), tokens.sum(axis=-1).T)
    return made_up.work(**of_ranks, sample_tokens=tokens.transpose(1, 0, 2))


def compute_ms(tokens: Ints) -> Floats:
    """Return what ranks take for samples with so many tokens, [..., rows], without noise."""
    times: Floats = A + (B * tokens + C * tokens**2).sum(axis=-1)
    return times


def timed(
    name: str,
    *,
    gpus: int = 4,
    strategy: str = "none",
    lengths: str = "lognormal",
    noise: float = 0.0,
    factors: tuple[float, ...] | None = None,
    slowdown: float = 0.0,
    batches: int = 50,
    repeats: int = 2,
    seed: int = 0,
    **fields: Any,
) -> RunResult:
    """Return a result whose batches are balanced by the true cost, with live and even segments.

    Ranks that wait for others compute more slowly, by up to `slowdown` as a fraction.
    """
    rng = np.random.default_rng((seed, gpus))  # the same samples for every strategy
    events = parse_distribution(LENGTHS[lengths]).sample(rng, batches * gpus * ROWS).reshape(batches, gpus, ROWS)
    drawn = 1 + 2 * events
    costs = np.rint(1e6 * (B * drawn + C * drawn**2)).astype(np.int64)
    balanced = np.empty_like(drawn)
    for step in range(batches):
        rank_of = partition(costs[step].ravel(), gpus, strategy=strategy).rank_of.ravel()
        balanced[step] = drawn[step].ravel()[np.argsort(rank_of, kind="stable")].reshape(gpus, ROWS)
    # Samples of equal length, whose cost is the mean of all, as near as integers get.
    mean = costs.mean(axis=(1, 2)) / 1e6
    tokens = np.rint((np.sqrt(B**2 + 4 * C * mean) - B) / (2 * C)).astype(np.int64)
    even = np.broadcast_to(tokens[:, None, None], drawn.shape)
    order = np.tile(np.arange(batches), repeats)
    slow = np.ones(gpus) if factors is None else np.array(factors)
    segments = []
    for kind, of_kind in ((LIVE, balanced), (EVEN, even)):
        times = compute_ms(of_kind).T[:, order] * slow[:, None] * np.exp(noise * rng.normal(size=(gpus, len(order))))
        times *= 1 + slowdown * (1 - times / times.max(axis=0))
        after = times.max(axis=0) - times + OVERHEAD * 0.75
        segments.append(made_up.marked(kind, 0, np.full_like(times, OVERHEAD / 4), times, after, batch=order))
    settings: dict[str, Any] = {"balance": "none"} if strategy == "none" else {"strategy": strategy}
    settings |= {"hidden": 1024, "heads": 4, "layers": 8, "max_history_length": 4096, "user_id": True}
    made: dict[str, Any] = {"gpus": gpus, "data_ranks": gpus, "lengths": lengths}
    made |= {"workload": {"lengths": LENGTHS, "item_rows": 1000, "user_rows": 1000}}
    made |= {"settings": settings | {"batch_size": ROWS} | fields.pop("settings", {})}
    made |= {"balanced": _work(balanced), "even": _work(even)}
    return made_up.result(name, segments, **(made | fields))
