"""Windows and packed steps of a Balancer, in front of other people's loaders."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from evenrank.core.errors import ConfigError, RankError, StateError, one_line
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, LinearCost, PaddedCost, StepMetrics
from evenrank.dataloader.balance.config import EXCHANGES
from evenrank.dataloader.batches.schema import lengths_of
from tests.dataloader.balance.costs import COST, Ints, Lengths, item_tokens, one_per_sample, rich_tokens
from tests.dataloader.balance.test_balancer import Step, worlds
from tests.dataloader.batch_helpers import ids_of
from tests.dataloader.own_samples import COLLATE
from tests.dataloader.resuming import through_json
from tests.dataloader.rich_batch import RichBatch, rich_batch, samples_of
from tests.ranks import RankPool

WAYS: list[dict[str, Any]] = [
    {"window": 2},
    {"window": 8},
    {"pack": True, "max_tokens_per_rank": 200},
    {"pack": True, "max_tokens_per_rank": 40, "on_overflow": "warn"},
]


def _batches(rank: int, steps: list[Step]) -> list[RichBatch]:
    return [rich_batch(samples, first_id=1000 * rank + 10 * number) for number, samples in enumerate(steps)]


def _make(rank: int, world_size: int, steps: list[list[Step]], rows: int, exchange: str, way: dict[str, Any]) -> Any:
    metrics: list[StepMetrics] = []
    config = BalanceConfig(cost=rich_tokens, batch_size=rows, exchange=exchange, on_step=metrics.append, **way)
    seen = []
    with Balancer(_batches(rank, steps[rank]), config) as balancer:
        for batch in balancer:
            assert lengths_of(batch)[:, batch.num_real :].sum() == 0
            assert batch.ids[batch.num_real :].eq(-1).all()
            numbers = batch.batch_size, batch.epoch, batch.step, batch.position, batch.world_loss_tokens, batch.dp_size
            seen.append((samples_of(batch), batch.loss_tokens, numbers))
    return seen, metrics


@settings(max_examples=20)
@given(world=worlds(), way=st.sampled_from(WAYS), exchange=st.sampled_from(EXCHANGES))
def test_steps_of_several_batches_lose_duplicate_and_alter_no_sample(
    ranks: RankPool, world: tuple[int, list[list[Step]]], way: dict[str, Any], exchange: str
) -> None:
    rows, steps = world
    of_ranks = ranks.run(len(steps), _make, steps, rows, exchange, way)
    loaded = [
        sample
        for rank, of_rank in enumerate(steps)
        for batch in _batches(rank, of_rank)
        for sample in samples_of(batch)
    ]
    trained = [sample for seen, _ in of_ranks for samples, _, _ in seen for sample in samples]
    assert sorted(trained, key=lambda sample: sample["id"]) == sorted(loaded, key=lambda sample: sample["id"])
    num_trained = 0
    for number, of_step in enumerate(zip(*(seen for seen, _ in of_ranks), strict=True)):
        num_trained += sum(len(samples) for samples, _, _ in of_step)
        position = num_trained if "pack" in way else number + 1
        world_loss_tokens = sum(loss_tokens for _, loss_tokens, _ in of_step)
        assert {numbers for _, _, numbers in of_step} == {(rows, 0, number, position, world_loss_tokens, len(steps))}
        metrics = [of_rank[number] for _, of_rank in of_ranks]
        tokens = [
            sum(len(s[name]) for s in samples for name in s if name.endswith("values")) for samples, _, _ in of_step
        ]
        for of_rank in metrics:
            assert of_rank.rank_tokens.tolist() == tokens
            assert (of_rank.step, of_rank.samples) == (number, sum(len(samples) for samples, _, _ in of_step))
    if "window" in way:
        assert len(of_ranks[0][0]) == max(map(len, steps))
        loads = [[sum(map(rich_cost, batch)) for batch in of_rank] for of_rank in steps]
        before = [metrics.before.tolist() for metrics in of_ranks[0][1]]
        assert before == [list(of_step) for of_step in itertools.zip_longest(*loads, fillvalue=0)]


def rich_cost(sample: list[tuple[int, int]]) -> int:
    (a, b), (weighted_a, c) = sample
    return a + 2 * b + weighted_a + c


def _lognormal(count: int) -> list[dict[str, Any]]:
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1, count).astype(int), 1, 200).tolist()
    return [{"item_id": [*range(length)], "sample_ids": index} for index, length in enumerate(lengths)]


OWN = _lognormal(700)
TOKENS = {sample["sample_ids"]: len(sample["item_id"]) for sample in OWN}


def _own_loader(rank: int, world_size: int) -> Any:
    """Ranks have different numbers of samples."""
    own: Any = OWN[: 300 if rank else 400] if world_size == 1 else OWN[400 * (rank > 0) :][: 300 if rank else 400]
    return StatefulDataLoader(own, batch_size=8, collate_fn=COLLATE)


def squares(lengths: Lengths, num_candidates: Ints) -> Ints:
    return lengths["item_id"] ** 2


def _heaviest(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    heaviest: list[int] = []
    config = BalanceConfig(
        **{"cost": item_tokens, **options}, on_step=lambda step: heaviest.append(int(step.after.max()))
    )
    with Balancer(_own_loader(rank, world_size), config) as balancer:
        return [ids_of(batch) for batch in balancer], heaviest


def test_windows_wait_less_for_long_samples_and_group_similar_lengths_where_they_are_padded(ranks: RankPool) -> None:
    padded = PaddedCost(LinearCost(interleave_actions=False))
    for cost in (squares, padded):
        (_, plain), _ = ranks.run(2, _heaviest, {"cost": cost})
        (_, windows), _ = ranks.run(2, _heaviest, {"cost": cost, "window": 8})
        assert len(windows) == len(plain)
        assert sum(windows) < 0.95 * sum(plain)


def test_packed_steps_are_full_and_keep_the_limit(ranks: RankPool) -> None:
    (first, loads), (second, _) = ranks.run(2, _heaviest, {"pack": True, "max_tokens_per_rank": 260, "batch_size": 16})
    assert sorted(itertools.chain(*first, *second)) == sorted(TOKENS)
    assert max(loads) <= 260
    assert np.mean(loads[:-1]) > 0.9 * 260


def _resume(rank: int, world_size: int, options: list[dict[str, Any]], stop: int, state: Any) -> Any:
    seen: list[list[int]] = []
    first, second = (BalanceConfig(**{"cost": item_tokens, **each}) for each in options)
    with Balancer(_own_loader(rank, world_size), first) as balancer:
        batches = list(itertools.islice(balancer, stop + 2))[:stop]
        seen += [ids_of(batch) for batch in batches]
        state = through_json(balancer.state_dict(after=batches[-1]))
        assert (state["epoch"], state["position"]) == (0, batches[-1].position)
    with Balancer(_own_loader(rank, world_size), second) as balancer:
        try:
            balancer.load_state_dict(state)
        except StateError as error:
            return one_line(error)
        assert balancer.state_dict() == state
        if not second.pack:
            assert balancer.remaining_batches() == -(-(300 if rank else 400) // 8) - stop
        seen += [ids_of(batch) for batch in balancer]
    with Balancer(_own_loader(rank, world_size), first) as balancer:
        return seen, [ids_of(batch) for batch in balancer]


@pytest.mark.parametrize("way", [{"window": 4}, {"pack": True, "max_tokens_per_rank": 260}])
def test_a_state_in_the_middle_of_steps_of_any_loader_goes_on_there(ranks: RankPool, way: dict[str, Any]) -> None:
    for stop in (1, 4, 5, 17):
        for seen, epoch in ranks.run(2, _resume, [way, way], stop, None):
            assert seen == epoch


def test_a_window_that_another_cost_assigns_differently_is_trained_once(ranks: RankPool) -> None:
    ways = [{"window": 4}, {"window": 4, "cost": one_per_sample}]
    for stop in (1, 2, 3):
        of_ranks = ranks.run(2, _resume, ways, stop, None)
        assert sorted(itertools.chain(*(itertools.chain(*seen) for seen, _ in of_ranks))) == sorted(TOKENS)


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        ([{"window": 4}, {}], "several with window=4; load it with that"),
        ([{"window": 4}, {"window": 3}], "several with window=4; load it with that"),
        ([{"pack": True, "max_tokens_per_rank": 260}, {"window": 4}], "several with pack=True; load it with that"),
    ],
)
def test_a_state_in_the_middle_of_steps_needs_the_same_ones(
    ranks: RankPool, ways: list[dict[str, Any]], message: str
) -> None:
    for found in ranks.run(2, _resume, ways, 3, None):
        assert message in found


@pytest.mark.parametrize("stop", [1, 6, 11])
def test_pending_samples_of_a_window_are_trained_once_in_another_shape_or_with_another_cost(
    small_dataset: Path, stop: int
) -> None:
    def make(cost: Any, batch_size: int = 8) -> Balancer[Any]:
        loader = build_loader(small_dataset, LoaderConfig(batch_size=batch_size, seed=1), rank=0, world_size=1)
        return Balancer(loader, BalanceConfig(cost=cost, window=4))

    with make(COST) as first, make(one_per_sample) as second, make(COST, 6) as third:
        batches = [batch for batch, _ in zip(first, range(stop), strict=False)]
        state = through_json(first.state_dict(after=batches[-1]))
        assert state["pending"]
        trained = [sample for batch in batches for sample in ids_of(batch)]
        for other in (second, third):
            other.load_state_dict(state)
            again = other.state_dict()
            assert again == state or (other is third and again["position"] == state["position"])
            rest = [sample for batch in other for sample in ids_of(batch)]
            assert sorted(trained + rest) == list(range(state["num_samples"]))


class _WithPosition:
    """Someone else's loader, whose state tells the position after any of its batches."""

    def __init__(self, path: Path) -> None:
        self._loader = build_loader(path, LoaderConfig(batch_size=8, seed=1), rank=0, world_size=1)

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader

    def state_dict(self, *, after: Any = None) -> dict[str, Any]:
        return self._loader.state_dict(after=after)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("way", "stop"), [({"window": 4}, 2), ({"pack": True, "max_tokens_per_rank": 100, "on_overflow": "warn"}, 4)]
)
@pytest.mark.filterwarnings("ignore:some samples have more tokens")
def test_the_epoch_after_a_rest_in_the_middle_of_steps_is_whole(
    small_dataset: Path, way: dict[str, Any], stop: int
) -> None:
    first, second = (Balancer(_WithPosition(small_dataset), BalanceConfig(cost=item_tokens, **way)) for _ in range(2))
    with first, second:
        batches = list(itertools.islice(first, stop))
        state = through_json(first.state_dict(after=batches[-1]))
        assert state["left"]
        second.load_state_dict(state)
        rest, following = ([sample for batch in second for sample in ids_of(batch)] for _ in range(2))
    trained = [sample for batch in batches for sample in ids_of(batch)]
    assert sorted(trained + rest) == sorted(following)


def _fail(rank: int, world_size: int, way: dict[str, Any], step: int) -> tuple[list[int], str]:
    def batches() -> Iterator[RichBatch]:
        for number in range(12):
            if rank == 1 and number == step:
                raise OSError("cannot read row 17")
            yield rich_batch([[(1, 1), (1, 1)]], first_id=100 * rank + number)

    ids: list[int] = []
    try:
        with Balancer(batches(), BalanceConfig(cost=rich_tokens, **way)) as balancer:
            for batch in balancer:
                ids += batch.ids[: batch.num_real].tolist()
    except RankError as error:
        return ids, one_line(error)
    return ids, "no error"


@pytest.mark.parametrize("way", [{"window": 4}, {"pack": True, "max_tokens_per_rank": 10}])
@pytest.mark.parametrize("step", [0, 5, 9])
def test_steps_before_an_error_are_trained_and_it_is_the_same_on_all_ranks(
    ranks: RankPool, way: dict[str, Any], step: int
) -> None:
    (first, line), (second, other) = ranks.run(2, _fail, way, step)
    assert line == other == "rank 1 failed: OSError: cannot read row 17"
    trained = [100 * rank + number for rank in range(2) for number in range(step)]
    assert {*first, *second} <= {*trained}
    assert len(first + second) >= len(trained) - 2  # the step that is launched before the error is not handed out


def _too_long(rank: int, world_size: int) -> str:
    steps = [rich_batch([[(2, 0), (0, 0)], [(30 if rank else 3, 0), (0, 0)]], first_id=10 * n) for n in range(3)]
    config = BalanceConfig(cost=one_per_sample, pack=True, max_tokens_per_rank=20)
    with pytest.raises(ConfigError) as raised, Balancer(steps, config) as balancer:
        list(balancer)
    return one_line(raised.value)


def test_a_sample_above_the_limit_is_named_on_all_ranks(ranks: RankPool) -> None:
    lines = ranks.run(2, _too_long)
    assert lines[0] == lines[1]
    assert lines[0].startswith("row 1 of the batch of rank 1 in step 0 of epoch 0 has 30 tokens, more than ")


def _leave(rank: int, world_size: int, way: dict[str, Any]) -> list[list[int]]:
    with Balancer(_own_loader(rank, world_size), BalanceConfig(cost=item_tokens, **way)) as balancer:
        for stop in (1, 5):
            for _ in zip(balancer, range(stop), strict=False):
                pass
        return [ids_of(batch) for batch in balancer]


@pytest.mark.parametrize("way", WAYS[:3])
def test_loops_that_are_left_leave_nothing_for_the_next_one(ranks: RankPool, way: dict[str, Any]) -> None:
    left = ranks.run(2, _leave, way)
    assert sorted(itertools.chain(*(itertools.chain(*of_rank) for of_rank in left))) == sorted(TOKENS)


def test_what_steps_of_several_batches_cannot_do_is_an_error() -> None:
    batches = [rich_batch([[(1, 1), (1, 1)]])]
    with Balancer(batches, BalanceConfig(cost=rich_tokens, window=2)) as balancer:
        assert len(balancer) == 1
        with pytest.raises(ConfigError, match=r"^start\(\) plans one step alone; iterate over the Balancer, or leave"):
            balancer.start(batches[0])
    with Balancer(batches, BalanceConfig(cost=rich_tokens, pack=True, max_tokens_per_rank=9)) as balancer:
        for count in (len, lambda each: each.remaining_batches()):
            with pytest.raises(TypeError, match="packed steps have as many samples as fit"):
                count(balancer)
