"""Law 2: whatever is cut anywhere goes on anywhere: on any number of ranks, the rest of the epoch comes, once."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dataloader.batch_helpers import through_json, through_torch
from tests.laws.kinds import ALONE, BALANCED, WAYS, cells, epoch_counts, has
from tests.laws.making import Job
from tests.laws.running import Part, Pool, run, state_of
from tests.ranks import RankPool


class Link(NamedTuple):
    """A job that stops."""

    way: str
    world_size: int
    batch_size: int
    stop: int
    ahead: int
    workers: int


def links(kind: str, *ways: str) -> st.SearchStrategy[Link]:
    of_kind = [way for way in ways if has(kind, way)]
    sizes = st.integers(1, 5), st.integers(1, 9)
    if not has(kind, "other shapes"):
        sizes = st.just(2), st.just(3)
    workers = st.sampled_from([0, 2]) if has(kind, "threads") else st.just(0)
    return st.builds(Link, st.sampled_from(of_kind), *sizes, st.integers(0, 6), st.integers(0, 3), workers)


def check(pool: Pool, data: Path, kind: str, chain: list[Link], seed: int) -> None:
    state: Any = None
    trained: defaultdict[int, Counter[int]] = defaultdict(Counter)
    through = [through_json, through_torch][seed % 2]
    # What follows the last job is not cut: the rest of its epoch, and the next one.
    for link in [*chain, None]:
        shape = (chain[-1] if link is None else link)._asdict()
        stop, ahead = shape.pop("stop"), shape.pop("ahead")
        part = Part(state, epochs=2 if has(kind, "epochs") else 1) if link is None else Part(state, 1, stop, ahead)
        job = Job(kind=kind, seed=seed, **shape)
        runs = run(pool if job.way in BALANCED and job.world_size > 1 else None, data, job, part)
        for ran in runs:
            for announced, came in ran.lengths:
                assert announced is None or came == (
                    announced if link is None else min(announced, stop and stop + ahead)
                )
            for batch in ran.batches:
                trained[batch.epoch].update(batch.ids)
        state = through(state_of(runs))
    for epoch, samples in trained.items():
        assert samples == epoch_counts(data, job, epoch), f"epoch {epoch}"
    assert sorted(trained) == [*range(len(trained))]


@pytest.mark.parametrize(("num_chains", "num_jobs"), [(4, 5), pytest.param(300, 30, marks=pytest.mark.long)])
@pytest.mark.parametrize(("kind", "way"), cells(*ALONE))
def test_any_chain_of_jobs_trains_each_sample_once(
    data: Path, kind: str, way: str, num_chains: int, num_jobs: int
) -> None:
    """The first one in this way, the others in any."""
    others_of_kind = st.lists(links(kind, "plain", "alone", "packed", "window"), max_size=num_jobs - 1)

    @settings(max_examples=num_chains)
    @given(links(kind, way), others_of_kind, st.integers(0, 3))
    def of_chain(first: Link, others: list[Link], seed: int) -> None:
        check(None, data, kind, [first, *others], seed)

    of_chain()


@pytest.mark.parametrize(("kind", "way"), cells(*BALANCED))
def test_any_chain_of_jobs_with_balancers_trains_each_sample_once(
    ranks: RankPool, data: Path, kind: str, way: str
) -> None:
    others = [other for other in WAYS if has(kind, f"{other} other shapes")]
    same = links(kind, way)
    second = links(kind, *others) if way in others else same

    @settings(max_examples=2)
    @given(same, second, same, st.integers(0, 3))
    def of_chain(first: Link, second: Link, last: Link, seed: int) -> None:
        chain = [link._replace(world_size=min(link.world_size, 3)) for link in (first, second, last)]
        if way not in others:
            chain = [link._replace(world_size=chain[0].world_size, batch_size=first.batch_size) for link in chain]
        check(ranks, data, kind, chain, seed)

    of_chain()
