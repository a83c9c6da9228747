"""Laws 4 and 5: ranks come to the same plan, alone and together, and to the same error, long before the timeout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws.kinds import ALONE, BALANCED, cells, has
from tests.laws.making import Job
from tests.laws.running import Part, failure_of, run, see_bits
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


FAULTS = {
    "seed": "seed differs between ranks: 0 on rank 0, 1 on rank 1",
    "cost": "the cost is not known",
    "read": "a file cannot be read",
}
# Ranks that wait for the end of an epoch look for errors once a second, so some of these cases are enough.
_SLOW = {(kind, way, fault) for kind, way in cells("packed", "window") for fault in ("cost", "read")}
_SLOW -= {("shuffle", "packed", "cost"), ("windows of time", "window", "cost"), ("elastic", "window", "read")}
CASES = [
    (kind, way, fault)
    for kind, way in cells(*ALONE[1:], *BALANCED)
    for fault in FAULTS
    if has(kind, fault) and has(kind, f"{way} {fault}") and (kind, way, fault) not in _SLOW
]


@pytest.mark.parametrize(("kind", "way", "fault"), CASES)
def test_an_error_on_one_rank_is_the_same_line_on_all(
    ranks: RankPool, data: Path, kind: str, way: str, fault: str
) -> None:
    """A rank that only waited would have another one: that the others were lost, or did not answer in time."""
    job = Job(kind=kind, way=way, batch_size=1, prefetch=1, fault=fault)
    lines = ranks.run(3, failure_of, data, job)
    assert {line.removeprefix("rank 1 failed: ") for line in lines} == {FAULTS[fault]}
