"""Law 3: a batch depends on the data, their order, the seed and the position, and on neither workers nor timing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws.kinds import Job, cells, has
from tests.laws.running import Part, Pool, Ran, run, run_rank, see_bits, state_of
from tests.ranks import RankPool


def batches_of(runs: list[Ran]) -> list[list[Any]]:
    return [ran.batches for ran in runs]


def check(pool: Pool, data: Path, job: Job, stop: int, ahead: int) -> None:
    whole = Part(epochs=2 if has(job.kind, "epochs") else 1)
    expected = batches_of(run(pool, data, job, whole, see_bits))
    assert any(expected)
    others = [(job, whole._replace(pause=1e-4)), (replace(job, pace=1 + stop), whole)]
    others.append((replace(job, prefetch=1 + stop, workers=2 if has(job.kind, "threads") else 0), whole))
    for other, part in others:
        assert batches_of(run(pool, data, other, part, see_bits)) == expected
    if pool is None:  # ranks take no turns
        assert batches_of([run_rank(rank, job.world_size, data, job, whole, see_bits) for rank in range(job.world_size)]) == expected
    cut = run(pool, data, job, Part(stop=stop, ahead=ahead), see_bits)
    state = state_of(job, cut)
    rest = batches_of(run(pool, data, job, whole._replace(state=state), see_bits))
    for before, after, of_rank in zip(batches_of(cut), rest, expected, strict=True):
        assert [*before, *after][: len(of_rank)] == of_rank


@pytest.mark.parametrize(("kind", "way"), cells("plain", "alone", "packed", "window"))
def test_batches_follow_from_seed_and_position(data: Path, kind: str, way: str) -> None:
    @settings(max_examples=3)
    @given(st.integers(1, 3), st.integers(2, 8), st.integers(0, 6), st.integers(0, 2))
    def of_shape(world_size: int, batch_size: int, stop: int, ahead: int) -> None:
        job = Job(kind=kind, way=way, world_size=world_size, batch_size=batch_size, seed=5)
        check(None, data, job, stop, ahead)

    of_shape()


@pytest.mark.parametrize(("kind", "way"), cells("Balancer"))
def test_batches_of_a_balancer_follow_from_seed_and_position(ranks: RankPool, data: Path, kind: str, way: str) -> None:
    check(ranks, data, Job(kind=kind, way=way, world_size=2), stop=3, ahead=1)


@pytest.mark.parametrize(("kind", "way"), cells("plain", "alone", "packed", "window"))
def test_another_seed_is_another_order(data: Path, kind: str, way: str) -> None:
    first, same, other = (
        batches_of(run(None, data, Job(kind=kind, way=way, seed=seed), Part(), see_bits)) for seed in (1, 1, 2)
    )
    assert first == same
    # The steps of a window come in an order by chance, those of rows too.
    assert (first != other) == (has(kind, "seeds") or way == "window")


@pytest.mark.processes
def test_worker_processes_change_nothing(data: Path) -> None:
    for way in ("plain", "window"):
        job = Job(kind="elastic", way=way, world_size=2)
        expected, found = (batches_of(run(None, data, replace(job, workers=workers), Part(), see_bits)) for workers in (0, 2))
        assert found == expected
