"""Law 4: what a rank plans alone is what all plan together, and as a Balancer does where that is promised."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws.kinds import cells
from tests.laws.making import Job
from tests.laws.running import Part, run, see_bits
from tests.ranks import RankPool


@pytest.mark.parametrize(("kind", "way"), cells("alone", "packed", "window"))
def test_all_ranks_come_to_the_same_plan_alone(data: Path, kind: str, way: str) -> None:
    @settings(max_examples=3)
    @given(st.integers(1, 5), st.integers(1, 9), st.booleans())
    def of_shape(world_size: int, batch_size: int, drop_last: bool) -> None:
        job = Job(kind=kind, way=way, world_size=world_size, batch_size=batch_size, drop_last=drop_last)
        first, *others = ([batch.plan_hash for batch in ran.batches] for ran in run(None, data, job, Part(epochs=2)))
        assert None not in first
        assert all(other == first for other in others)
        assert len(first) < 3 or len(set(first)) > 1

    of_shape()


def see_samples(batch: Any) -> list[Any]:
    return see_bits(batch.slice(0, batch.num_real))  # a DataLoader does not pad


@pytest.mark.parametrize(("kind", "way"), cells("alone", "packed", "window"))
def test_a_plan_made_alone_is_the_one_made_together(ranks: RankPool, data: Path, kind: str, way: str) -> None:
    """By ranks that know of no others, by ranks of a process group and by a Balancer.

    In windows and packed steps of a Balancer, samples come from several batches, so it may number the ranks otherwise.
    """
    job = Job(kind=kind, way=way, world_size=3, batch_size=3)
    part = Part(epochs=2)
    alone, together = ([ran.batches for ran in run(pool, data, job, part, see_samples)] for pool in (None, ranks))
    assert any(alone)
    assert together == alone
    if way == "alone":
        balanced = run(ranks, data, replace(job, way="Balancer"), part, see_samples)
        assert [ran.batches for ran in balanced] == alone
        return
    steps, balanced_steps = (
        [(*batches[0][:3], sorted(sample for batch in batches for sample in batch.ids)) for batches in of_ranks]
        for of_ranks in (
            zip(*(ran.batches for ran in run(pool, data, replace(job, way=other), part)), strict=True)
            for pool, other in ((None, way), (ranks, f"Balancer, {way}"))
        )
    )
    assert balanced_steps == steps
