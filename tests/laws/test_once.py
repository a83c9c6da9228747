"""Laws 1 and 6: every sample comes exactly once per epoch, whatever is padding, with its values, bit for bit."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenrank.dataloader.balance.config import EXCHANGES
from tests.laws.kinds import ALONE, BALANCED, KINDS, cells, epoch_counts, has
from tests.laws.making import Job
from tests.laws.running import Part, Pool, Seen, run, see, see_values
from tests.ranks import RankPool

SHAPES = st.fixed_dictionaries(
    {
        "world_size": st.integers(1, 6),  # more than a stream has lanes
        "batch_size": st.integers(1, 9),
        "workers": st.sampled_from([0, 2]),
        "drop_last": st.booleans(),
        "seed": st.integers(0, 3),
    }
)


def see_all(batch: Any) -> tuple[Seen, Any]:
    return see(batch), see_values(batch)


def check(pool: Pool, data: Path, job: Job) -> None:
    num_epochs = 2 if has(job.kind, "epochs") else 1
    runs = run(pool, data, job, Part(epochs=num_epochs), see_all)
    for epoch in range(num_epochs):
        of_ranks = [[batch for batch, _ in ran.batches if batch.epoch == epoch] for ran in runs]
        seen = Counter(sample for batches in of_ranks for batch in batches for sample in batch.ids)
        expected = epoch_counts(data, job, epoch)
        if job.drop_last and has(job.kind, "drop_last"):
            assert seen <= expected
            assert expected.total() - seen.total() < job.world_size * job.batch_size
            if job.way == "plain" and has(job.kind, "full steps"):
                assert all(len(batch.ids) == job.batch_size for batches in of_ranks for batch in batches)
        else:
            assert seen == expected
        assert len({ran.lengths[epoch][1] for ran in runs}) == 1
        assert len({tuple(batch.position for batch in batches) for batches in of_ranks}) == 1
        for ran, batches in zip(runs, of_ranks, strict=True):
            announced, came = ran.lengths[epoch]
            is_known = has(job.kind, "length") and job.way != "Balancer, packed"
            assert announced == came if is_known else announced is None
            assert [batch.step for batch in batches] == [*range(came)]
            assert sorted({batch.position for batch in batches}) == [batch.position for batch in batches]
            for batch in batches:
                assert len(batch.ids) + len(batch.ids_of_padding) == batch.num_rows
                if has(job.kind, "padding") or job.way in BALANCED:
                    assert batch.num_rows == job.batch_size + KINDS[job.kind].further_rows
                assert {*batch.ids_of_padding} <= {-1}
        samples = KINDS[job.kind].samples(data, job, epoch)
        of_epoch = [row for ran in runs for batch, rows in ran.batches if batch.epoch == epoch for row in rows]
        for sample, values in of_epoch:
            assert values == samples[sample] if sample >= 0 else not any(map(any, values.values()))


@pytest.mark.parametrize(("kind", "way"), cells(*ALONE))
def test_every_sample_comes_once_per_epoch_with_its_values(data: Path, kind: str, way: str) -> None:
    @settings(max_examples=4)
    @given(SHAPES)
    def of_shape(shape: dict[str, Any]) -> None:
        workers = shape["workers"] if has(kind, "threads") else 0
        check(None, data, Job(kind=kind, way=way, **{**shape, "workers": workers}))

    of_shape()


@pytest.mark.parametrize(("kind", "way"), cells(*BALANCED))
def test_every_sample_comes_once_from_a_balancer_with_the_bytes_sent(
    ranks: RankPool, data: Path, kind: str, way: str
) -> None:
    @settings(max_examples=1)
    @example({"world_size": 3}, EXCHANGES[0])
    @example({"world_size": 2}, EXCHANGES[1])
    @given(SHAPES.map(lambda shape: {**shape, "world_size": 2 + shape["world_size"] % 2}), st.sampled_from(EXCHANGES))
    def of_shape(shape: dict[str, Any], exchange: str) -> None:
        shape = {**shape, "workers": 2 if shape.get("workers") and has(kind, "threads") else 0}
        check(ranks, data, Job(kind=kind, way=way, exchange=exchange, **shape))

    of_shape()
