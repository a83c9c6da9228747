"""Methods of other projects decide as these do: checked on samples whose assignment follows from the description."""

import itertools

import balancing_methods as methods
import numpy as np
import pytest

HSTU = methods.MODELS["hstu"]


def epoch_of(lengths: list[int], world_size: int, batch_size: int) -> methods.Epoch:
    return methods.Epoch(np.array(lengths), HSTU, world_size, batch_size)


@pytest.fixture(scope="module")
def drawn() -> methods.Epoch:
    return methods.Epoch(np.random.default_rng(0).integers(1, 500, 8 * 4 * 8), HSTU, 4, 8)


@pytest.mark.parametrize("method", methods.METHODS)
def test_every_sample_is_trained_once_and_ranks_have_equally_many(method: str, drawn: methods.Epoch) -> None:
    plan = methods.METHODS[method](drawn)
    assert np.array_equal(np.sort(plan.samples.reshape(-1)), np.arange(len(drawn.lengths)))
    counts = [np.bincount(ranks, minlength=4).tolist() for ranks in plan.rank_of]
    assert method == "contiguous" or counts == [[8] * 4] * 8
    assert min(map(min, counts)) >= 1


@pytest.mark.parametrize(
    "method", [name for name in methods.METHODS if not name.startswith(("length-groups", "window"))]
)
def test_samples_stay_in_their_step(method: str, drawn: methods.Epoch) -> None:
    assert np.array_equal(np.sort(methods.METHODS[method](drawn).samples, axis=1), drawn.samples)


def test_samples_of_a_window_stay_in_it() -> None:
    epoch = methods.Epoch(np.random.default_rng(0).integers(1, 500, 16 * 4), HSTU, 2, 2)
    samples = methods.windowed(epoch).samples
    assert np.array_equal(np.sort(samples.reshape(2, -1), axis=1), np.arange(64).reshape(2, -1))
    assert not np.array_equal(np.sort(samples, axis=1), epoch.samples)


def test_groups_are_sorted_and_the_longest_sample_of_all_comes_first() -> None:
    # With 8 samples a group is one batch of 2: at most a quarter of the samples.
    epoch = epoch_of([1, 2, 5, 3, 9, 7, 6, 8], world_size=2, batch_size=2)
    assert epoch.lengths[methods.group_by_length(epoch)].tolist() == [9, 1, 5, 3, 2, 7, 8, 6]


def test_groups_have_50_batches() -> None:
    lengths = np.random.default_rng(0).permutation(500)
    grouped = lengths[methods.group_by_length(methods.Epoch(lengths, HSTU, 1, 2))]
    firsts = np.flatnonzero(np.diff(grouped) > 0) + 1
    assert set(range(100, 500, 100)) <= {*firsts.tolist()}
    assert len(firsts) <= 6  # the longest has changed places with the first


def test_ranks_take_batches_or_every_other_sample_of_a_group() -> None:
    epoch = epoch_of([8, 7, 6, 5, 4, 3, 2, 1] * 4, world_size=2, batch_size=2)
    batches, strided = methods.length_groups(epoch), methods.length_groups_strided(epoch)
    assert np.array_equal(batches.samples, strided.samples)
    assert batches.rank_of[0].tolist() == [0, 0, 1, 1]
    assert strided.rank_of[0].tolist() == [0, 1, 0, 1]


def test_cuts_are_as_even_as_can_be() -> None:
    lengths = np.sort(np.random.default_rng(0).integers(1, 4000, 12))[::-1].tolist()

    def costliest(counts: list[int]) -> float:
        starts = [0, *itertools.accumulate(counts)]
        return max(methods.padded_cost(count, lengths[start]) for start, count in zip(starts, counts, strict=False))

    possible = [
        [second - first for first, second in itertools.pairwise((0, *cuts, 12))]
        for cuts in itertools.combinations(range(1, 12), 3)
    ]
    counts = methods.cut_evenly(lengths, 4)
    assert (len(counts), sum(counts)) == (4, 12)
    assert costliest(counts) == min(map(costliest, possible))


def test_groups_are_never_empty() -> None:
    assert methods.cut_evenly([4096, 1, 1, 1], 4) == [1, 1, 1, 1]
    assert methods.cut_evenly([10, 10], 1) == [2]


def test_costs_per_head_weigh_attention_by_its_heads() -> None:
    tokens, width = 2 * 100, 1024
    assert HSTU.costs_per_head(np.array([100])).tolist() == [10 * tokens * width**2 + 4 * 4 * tokens**2 * width]
    # 24 layers' worth of forward passes: 8 layers, and twice a forward pass for the backward one.
    assert HSTU.costs(np.array([100])).tolist() == [24 * (10 * tokens * width**2 + 2 * tokens**2 * width)]
    attention = methods.MODELS["attention"]
    assert attention.costs(np.array([100])).tolist() == [12 * (24 * 100 * 256**2 + 2 * 100**2 * 256)]
    assert attention.costs_per_head(np.array([100])).tolist() == [24 * 100 * 256**2 + 16 * 100**2 * 256]
