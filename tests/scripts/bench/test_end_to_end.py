import warnings
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from end_to_end import measure
from end_to_end.batches import Source, even_lengths, feature_lengths
from end_to_end.experiments import Run, Workload
from end_to_end.summary import EVEN, LIVE, PREPARED, Row, Segment, Work, ratios, summarize
from evenrank.dataloader import LoaderConfig
from evenrank.dataloader.balance import BalanceConfig, Balancer, HSTUCost
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets.distributions import ClippedZipf, Distribution, Lognormal
from tests.ranks import RankPool
from trainer import TrainConfig, World

COST = HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=True, contextual=("user_id",))
STEPS = {"steps": 8, "rounds": 2, "warmup_steps": 4, "skipped_steps": 1, "num_batches": 3}
WORKLOAD = Workload(lengths="lognormal:mean=12,std=20,high=64", item_rows=500, user_rows=300, **STEPS)
SIZES = {"hidden": 16, "heads": 2, "layers": 1, "embedding_dim": 8, "max_history_length": 64}
SETTINGS: dict[str, Any] = {**SIZES, "num_tasks": 2, "user_id": True, "batch_size": 6, "attention": "padded"}


def cost(events: NDArray[np.int64]) -> NDArray[np.int64]:
    return COST.of_tokens(2 * events + 1, np.zeros_like(events))


@pytest.mark.parametrize("distribution", [Lognormal(mean=512, std=512), ClippedZipf()])
def test_even_batch_has_the_mean_cost_and_the_mean_events_of_a_step(distribution: Distribution) -> None:
    for seed, num_ranks in enumerate((2, 2, 4, 8, 8)):
        lengths = distribution.sample(np.random.default_rng(seed), num_ranks * 32)
        even = even_lengths(lengths, num_ranks, cost, max_length=4096)
        assert len(even) == 32
        assert even.sum() == pytest.approx(lengths.sum() / num_ranks, rel=5e-4)
        assert cost(even).sum() == pytest.approx(cost(lengths).sum() / num_ranks, rel=5e-4)


def _contents(batch: Any) -> list[list[int]]:
    values = [batch.features.values(), batch.features.lengths(), batch.labels.values(), batch.sample_ids]
    return [value.tolist() for value in values]


def _batches(rank: int, world_size: int) -> tuple[Any, Any, Any]:
    """Return the batches of a Balancer, more than two cycles of those that are read, and the lengths of even ones."""
    world = World(rank=rank, size=world_size, device=torch.device("cpu"))
    key_map = KeyMap(num_embeddings=500, world_size=world_size, mode="roundrobin")
    config = LoaderConfig(batch_size=6, max_history_length=30, user_id=True, num_tasks=2, key_maps={"item_id": key_map})
    source = Source(WORKLOAD, config, world)
    balance = BalanceConfig(cost=COST)
    with Balancer(source.once(), balance) as balancer:
        exchanged = [_contents(batch) for batch in balancer]
    with closing(source.reading(balance, num_workers=1, endless=True)) as loader:
        read = [_contents(batch) for batch in islice(loader, 7)]
    return exchanged, read, [feature_lengths(batch)["item_id"] for batch in source.even(COST)]


def test_batches_that_are_read_are_those_of_a_balancer_again_and_again_and_even_ones_are_equal(ranks: RankPool) -> None:
    first, second = ranks.run(2, _batches)
    for exchanged, read, _ in (first, second):
        assert len(exchanged) == 3
        assert read == [*exchanged, *exchanged, exchanged[0]]
    np.testing.assert_array_equal(first[2], second[2])


def _measured(rank: int, world_size: int, runs: list[dict[str, Any]]) -> list[tuple[Row, Any]]:
    """Return the row of each run, and what it was made of."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    made: list[Any] = []

    def kept(segments: Any, work: Work, steps: Any, **options: Any) -> Row:
        made.append((segments, work))
        return summarize(segments, work, steps, **options)

    vars(measure)["summarize"] = kept
    found, world = [], World(rank=rank, size=world_size, device=torch.device("cpu"))
    for config in (TrainConfig(**SETTINGS, **changed) for changed in runs):
        run = Run(name="a run", lengths="skewed", gpus=world_size, workload=WORKLOAD, settings=config)
        found.append((measure.measured(run, world), made[-1]))
    return found


def test_balancing_changes_who_trains_samples_and_kinds_take_turns(ranks: RankPool) -> None:
    runs: list[dict[str, Any]] = [{"balance": way} for way in ("none", "all-to-all", "no-exchange")]
    runs += [{"balance": "all-to-all", "refit_every": 6}]
    runs += [{"embeddings": "sharded", "min_sharded_rows": 1, "pipeline": "sparse-dist"}]
    first, second = ranks.run(2, _measured, runs)
    assert [row for row, _ in first] == [row for row, _ in second]
    (unbalanced, before), (exchanged, after), (own, read), (refit, _), (_, (of_sharded, _)) = first
    assert refit["cost"] in ("HSTUCost", "MeasuredCost")  # of such a small model, times say anything
    assert all(np.isfinite(segment.marks).all() for segment in of_sharded)
    for name in ("tokens", "pairs", "predictions", "loads"):
        np.testing.assert_array_equal(getattr(before[1], name).sum(0), getattr(after[1], name).sum(0))
        np.testing.assert_array_equal(getattr(after[1], name), getattr(read[1], name))
    assert after[1].loads.max(0).sum() < before[1].loads.max(0).sum()
    assert unbalanced["load_before"] == unbalanced["load_after"] == exchanged["load_before"] > exchanged["load_after"]
    assert unbalanced["moved_tokens_percent"] == 0 < exchanged["moved_tokens_percent"] == own["moved_tokens_percent"]
    for segments, _ in (before, after, read):
        turns = (LIVE, PREPARED, EVEN, PREPARED, EVEN, LIVE)
        assert [(one.round, one.kind) for one in segments] == [*zip((0, 0, 0, 1, 1, 1), turns, strict=True)]
        for one in segments:
            assert one.batch.tolist() == [(4 + 5 * one.round + 1 + step) % 3 for step in range(4)]
            assert one.marks.shape == (2, 4, 5)
            assert (np.diff(one.marks, axis=2) >= 0).all()
            np.testing.assert_array_equal(one.marks[:, 1:, 0], one.marks[:, :-1, 4])


def _segment(kind: str, number: int, *steps: float) -> Segment:
    """Return a segment of two ranks: the second computes half of a step, the first half as long as that."""
    ends = np.cumsum(steps)
    begins = ends - steps
    compute = np.stack([0.25 * np.array(steps), 0.5 * np.array(steps)])
    marks = np.stack([*np.broadcast_arrays(begins, begins, begins, begins + compute, ends)], axis=-1)
    return Segment(kind, number, np.arange(len(steps)) % 2, marks)


def test_a_row_has_ratios_of_the_same_batches_for_each_round() -> None:
    steps = [(LIVE, 0, (10, 20, 10, 20, 40, 20)), (PREPARED, 0, (10, 10) * 3), (EVEN, 0, (5, 15) * 3)]
    steps += [(LIVE, 1, (20, 40) * 3), (PREPARED, 1, (20, 20) * 3), (EVEN, 1, (20, 10) * 3)]
    segments = [_segment(kind, number, *of_round) for kind, number, of_round in steps]
    counts = [[[300, 100], [100, 100]], [[9, 1], [1, 1]], [[1, 1], [1, 1]], [[30, 10], [10, 10]]]
    step: Any = type("Step", (), {"before": np.array([30, 10]), "moved_tokens": 60, "tokens": 600})
    flops: Any = {"per_token": 10**9, "per_pair": 10**8, "per_prediction": 10**10}
    row, divided = (  # samples, and heads
        summarize(segments, Work(*map(np.array, counts)), [step], data_ranks=ranks, flops=flops, peak_flops=1e13)
        for ranks in (2, 1)
    )
    assert row["live_over_even"] == [1.5, 2.0]  # medians 10 and 20 of the batches, over 5 and 15
    assert row["prepared_over_even"] == [1.0, pytest.approx(40 / 30, abs=1e-6)]
    assert row["exposed_percent"] == [50.0, 50.0]
    assert row["exposed_with_stalls_percent"] == [100.0, 50.0]  # the mean of batch 0 is 20
    assert ratios(segments, LIVE, EVEN, np.max) == [3.0, 2.0]
    assert (row["steps"], row["step_ms"], row["step_p95_ms"]) == (12, [20.0, 30.0], 40.0)
    assert row["idle_percent"] == [12.5, 12.5]  # half of a step and three eighths
    tokens, seconds = 3 * (400 + 200), (0.12, 0.18)
    assert row["tokens_per_s"] == [pytest.approx(tokens / each, rel=1e-6) for each in seconds]
    assert divided["tokens_per_s"] == [pytest.approx(tokens / each / 2, rel=1e-6) for each in seconds]
    tflops = [(1.8e12 + 3 * 1.2e9 + 3 * 4e10) / 2 / each / 1e12 for each in seconds]
    assert row["mfu_percent"] == [pytest.approx(10 * each, rel=1e-5) for each in tflops]
    assert (row["load_before"], row["load_after"], row["moved_tokens_percent"]) == (1.5, 1.25, 10.0)
