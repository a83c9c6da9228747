"""Law 3: a batch depends on the data, their order, the seed and the position, and on neither workers nor timing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws.kinds import ALONE, BALANCED, cells, has
from tests.laws.making import Job
from tests.laws.running import Part, Pool, Ran, run, run_rank, see_bits, state_of
from tests.ranks import RankPool


def batches_of(runs: list[Ran]) -> list[list[Any]]:
    return [ran.batches for ran in runs]


def check(pool: Pool, data: Path, job: Job, stop: int, ahead: int) -> None:
    whole = Part(epochs=2 if has(job.kind, "epochs") else 1)
    expected = batches_of(run(pool, data, job, whole, see_bits))
    assert any(expected)
    # Read ahead by threads, in other groups of batches, by a slow consumer and, of a log, as it grows.
    other = replace(job, pace=1 + stop, prefetch=1 + stop, workers=2 if has(job.kind, "threads") else 0)
    assert batches_of(run(pool, data, other, whole._replace(pause=1e-4), see_bits)) == expected
    if pool is None:
        one_by_one = [run_rank(rank, job.world_size, data, job, whole, see_bits) for rank in range(job.world_size)]
        assert batches_of(one_by_one) == expected
    cut = run(pool, data, job, Part(stop=stop, ahead=ahead), see_bits)
    state = state_of(cut)
    rest = batches_of(run(pool, data, job, whole._replace(state=state), see_bits))
    for before, after, of_rank in zip(batches_of(cut), rest, expected, strict=True):
        assert [*before, *after][: len(of_rank)] == of_rank


@pytest.mark.parametrize(("kind", "way"), cells(*ALONE))
def test_batches_follow_from_seed_and_position(data: Path, kind: str, way: str) -> None:
    @settings(max_examples=2)
    @given(st.integers(1, 3), st.integers(2, 8), st.integers(0, 6), st.integers(0, 2))
    def of_shape(world_size: int, batch_size: int, stop: int, ahead: int) -> None:
        job = Job(kind=kind, way=way, world_size=world_size, batch_size=batch_size, seed=5)
        check(None, data, job, stop, ahead)

    of_shape()


@pytest.mark.parametrize(("kind", "way"), cells(*BALANCED))
def test_batches_of_a_balancer_follow_from_seed_and_position(ranks: RankPool, data: Path, kind: str, way: str) -> None:
    stop = 3 if way == "Balancer" else 2  # in the middle of a window
    check(ranks, data, Job(kind=kind, way=way, world_size=2), stop=stop, ahead=1)


@pytest.mark.parametrize(("kind", "way"), cells(*ALONE))
def test_another_seed_or_epoch_is_another_order(data: Path, kind: str, way: str) -> None:
    epochs = Part(epochs=2 if has(kind, "epochs") else 1)
    first, same, other = (
        batches_of(run(None, data, Job(kind=kind, way=way, seed=seed), epochs, see_bits)) for seed in (1, 1, 2)
    )
    assert first == same
    # The steps of a window come in an order by chance, those of rows too.
    assert (first != other) == (has(kind, "seeds") or way == "window")
    if has(kind, "epochs"):
        ids = [[batch[0].ids for batch in first[0] if batch[0].epoch == epoch] for epoch in range(2)]
        assert (ids[0] != ids[1]) == (has(kind, "other epochs") or way == "window")
