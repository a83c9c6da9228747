"""Loaders with windows; see `test_no_exchange.py` and `balance/test_packing.py` for other balanced steps."""

import itertools
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenrank.dataloader import Loader, LoaderConfig, Mixture, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, PaddedCost, StepMetrics
from evenrank.dataloader.balance.plan import assign_to_steps
from evenrank.dataloader.sampling import balanced_steps
from evenrank.dataloader.sampling.epoch_positions import _FORMAT
from tests.dataloader.balance.costs import COST, Ints, Lengths
from tests.dataloader.batch_helpers import ids_of
from tests.dataloader.resuming import with_changes

Loaders = list[Loader[SequenceBatch]]


def _loaders(path: Path | Mixture, world_size: int, balance: Mapping[str, Any] | None, **options: Any) -> Loaders:
    """Return the loaders of all ranks."""
    config = LoaderConfig(**{"batch_size": 4, "seed": 3, **options})
    way = None if balance is None else BalanceConfig(**{"cost": COST, **balance})
    return [build_loader(path, config, rank=rank, world_size=world_size, balance=way) for rank in range(world_size)]


def _iterate(loaders: Loaders, stop: int | None = None) -> list[list[list[int]]]:
    """Return the ids of each rank's samples, step by step, of the next `stop` steps of an epoch."""
    return [[ids_of(batch) for batch in itertools.islice(loader, stop)] for loader in loaders]


def _flat(*of_ranks: list[list[list[int]]]) -> list[int]:
    return [sample for ranks in of_ranks for steps in ranks for step in steps for sample in step]


def _steps(of_ranks: list[list[list[int]]]) -> list[list[int]]:
    """Return the samples of all ranks in each step, ascending."""
    return [sorted(itertools.chain(*of_step)) for of_step in zip(*of_ranks, strict=True)]


def _load(loaders: Loaders, state: Mapping[str, Any]) -> Loaders:
    for loader in loaders:
        loader.load_state_dict(state)
    return loaders


def _state(loaders: Loaders) -> dict[str, Any]:
    """Return the state of all ranks, which is the same."""
    first, *others = (loader.state_dict() for loader in loaders)
    assert all(state == first for state in others)
    return first


def _state_within_a_window(path: Path, world_size: int, stop: int) -> dict[str, Any]:
    """Return the state of ranks that stopped after some steps of a window of 4."""
    loaders = _loaders(path, world_size, {"window": 4})
    _iterate(loaders, stop)
    return _state(loaders)


@settings(max_examples=25)
@given(
    world_size=st.integers(1, 8),
    window=st.integers(2, 9),
    cost=st.sampled_from([COST, PaddedCost(COST)]),
    options=st.builds(
        dict, batch_size=st.integers(1, 9), order=st.sampled_from(["shuffle", "rows"]), drop_last=st.booleans()
    ),
)
def test_each_window_has_its_samples_once(
    small_dataset: Path, world_size: int, window: int, cost: Any, options: Any
) -> None:
    unbalanced = _steps(_iterate(_loaders(small_dataset, world_size, None, **options)))
    loaders = _loaders(small_dataset, world_size, {"window": window, "cost": cost}, **options)
    assert [len(loader) for loader in loaders] == [len(unbalanced)] * world_size
    steps = _steps(_iterate(loaders))
    assert [len(step) for step in steps] == [len(step) for step in unbalanced]
    num_full = sum(len(step) == world_size * options["batch_size"] for step in steps)
    assert steps[num_full:] == unbalanced[num_full:]
    for first in range(0, num_full, window):
        end = min(first + window, num_full)
        assert sorted(itertools.chain(*steps[first:end])) == sorted(itertools.chain(*unbalanced[first:end]))


def _ones(lengths: Lengths, num_candidates: Ints) -> Ints:
    return np.ones_like(num_candidates)


def test_chance_is_another_one_in_each_window_and_epoch(small_dataset: Path) -> None:
    (plain,) = _loaders(small_dataset, 1, None)
    (loader,) = _loaders(small_dataset, 1, {"window": 8, "cost": _ones})
    assigned = []
    for _ in range(2):
        place_of = {sample: place for place, sample in enumerate(_flat(_iterate([plain])))}
        places = [place_of[sample] for sample in _flat(_iterate([loader]))]
        windows = [places[first : first + 32] for first in range(0, len(places) - 31, 32)]
        assigned += [tuple(place - min(window) for place in window) for window in windows]
    # Samples of equal cost can only be has_pending apart by their positions, so alike windows would be assigned alike.
    assert len(set(assigned)) == len(assigned) > 10


class _Large:
    """Costs that fill 62 bits in a step, and can be shifted so that those of a window do not exceed them."""

    max_cost = 1 << 59

    def __call__(self, lengths: Lengths, num_candidates: Ints) -> Ints:
        return np.minimum(lengths["item_id"] + 1, 32) << 54


def test_windows_of_mixtures_and_of_large_costs_have_each_sample_once(small_dataset: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(small_dataset)
    mixture = Mixture(weights={small_dataset: 2.0, other: 1.0})
    for path, balance in ((small_dataset, {"window": 8, "cost": _Large()}), (mixture, {"window": 4})):
        unbalanced, windowed = (_flat(_iterate(_loaders(path, 2, way))) for way in (None, balance))
        assert sorted(windowed) == sorted(unbalanced)


SHAPES = st.fixed_dictionaries(
    {
        "world_size": st.integers(1, 5),
        "batch_size": st.integers(1, 9),
        "balance": st.one_of(
            st.none(),
            st.just({"window": 1}),
            st.just({"pack": True, "max_tokens_per_rank": 90}),
            st.fixed_dictionaries({"window": st.integers(2, 6)}),
            st.fixed_dictionaries({"window": st.integers(2, 6), "strategy": st.just("min-move")}),
            st.fixed_dictionaries({"window": st.integers(2, 6), "cost": st.just(PaddedCost(COST))}),
        ),
    }
)


@settings(max_examples=40)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=4),
    stops=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    order=st.sampled_from(["shuffle", "rows"]),
)
@example(  # what is left of the first window is more than the second one has
    shapes=[
        {"world_size": 5, "batch_size": 4, "balance": {"window": 6}},
        {"world_size": 1, "batch_size": 1, "balance": {"window": 4}},
        {"world_size": 2, "batch_size": 3, "balance": {"window": 2}},
    ],
    stops=[2, 2, 1, 0],
    order="shuffle",
)
@example(  # what is left of the first window ends within one of the second job, and has no gap after three of its steps
    shapes=[
        {"world_size": 1, "batch_size": 8, "balance": {"window": 2}},
        {"world_size": 1, "batch_size": 1, "balance": {"window": 3}},
    ],
    stops=[7, 3, 0, 0],
    order="shuffle",
)
def test_any_chain_of_jobs_trains_each_sample_once(
    small_dataset: Path, shapes: Any, stops: list[int], order: str
) -> None:
    everything = sorted(_flat(_iterate(_loaders(small_dataset, 1, None))))
    seen: list[int] = []
    state = None
    for shape, stop in zip(shapes, stops, strict=False):
        # What would have come, had it not stopped, comes in a job of the same shape that resumes.
        loaders, uninterrupted = (_loaders(small_dataset, **shape, order=order) for _ in range(2))
        if state is not None:
            _load(loaders, state)
            _load(uninterrupted, state)
        if loaders[0].epoch:
            break
        expected = _iterate(uninterrupted)
        before = _iterate(loaders, stop)
        state = _state(loaders)
        resumed = pickle.loads(pickle.dumps(_load(loaders, state)))
        if not resumed[0].epoch:
            assert resumed[0].remaining_batches() == len(expected[0]) - len(before[0])
            assert [a + b for a, b in zip(before, _iterate(resumed), strict=True)] == expected
        seen += _flat(before)
        plain = _load(_loaders(small_dataset, 1, None, order=order), state)
        left = _flat(_iterate(plain)) if plain[0].epoch == state["epoch"] else []
        assert sorted([*seen, *left]) == everything
    assert len(set(seen)) == len(seen)


def test_between_windows_a_state_has_nothing_pending(small_dataset: Path) -> None:
    loader = _loaders(small_dataset, 2, {"window": 3})[0]
    has_pending = [loader.state_dict()["pending"] != "" for _ in loader]
    assert len(has_pending) > 20
    num_full = loader.num_samples // 8
    assert has_pending == [step % 3 != 2 and step + 1 < num_full for step in range(len(has_pending))]


def test_the_state_after_any_batch_is_that_of_a_loader_that_stops_there(small_dataset: Path) -> None:
    ahead = _loaders(small_dataset, 2, {"window": 4}, num_workers=2)[0]
    batches = [*ahead, *itertools.islice(ahead, 7)]  # in two epochs
    step_by_step = _loaders(small_dataset, 2, {"window": 4})[0]
    states = [step_by_step.state_dict() for _ in itertools.chain(step_by_step, itertools.islice(step_by_step, 7))]
    assert [ahead.state_dict(after=batch) for batch in batches] == states


@pytest.mark.parametrize("window", [1, 4, 7])
def test_states_of_batches_from_before_a_load_are_known(small_dataset: Path, window: int) -> None:
    loader = _loaders(small_dataset, 1, {"window": window})[0]
    batches = list(itertools.islice(loader, 4))
    states = [loader.state_dict(after=batch) for batch in batches]
    later = _state_within_a_window(small_dataset, 3, 3)  # up to position 36
    loader.load_state_dict(later)
    assert [loader.state_dict(after=batch) for batch in batches] == states
    own = {name: loader.state_dict()[name] for name in ("pending", "checksum")}
    assert loader.state_dict() == later | own


@pytest.mark.parametrize("options", [{"num_workers": 3, "prefetch": 2}, {"prefetch": 1}, {"prefetch": 50}], ids=str)
def test_threads_plan_each_window_once(small_dataset: Path, monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    expected = _iterate(_loaders(small_dataset, 2, {"window": 7}))
    assigned = []

    def assign_and_count(costs: Any, tokens: Any, num_steps: int, *arguments: Any, **named: Any) -> Any:
        assigned.append(num_steps)
        return assign_to_steps(costs, tokens, num_steps, *arguments, **named)

    monkeypatch.setattr(balanced_steps, "assign_to_steps", assign_and_count)
    loader = _loaders(small_dataset, 2, {"window": 7}, **options)[1]
    assert _iterate([loader]) == expected[1:]
    num_full = loader.num_samples // 8
    assert assigned == [7] * (num_full // 7) + [num_full % 7]


def test_a_loader_that_has_planned_windows_plans_those_of_a_state_as_a_new_one_does(small_dataset: Path) -> None:
    other_seed = _loaders(small_dataset, 1, {"window": 4}, seed=4)
    _iterate(other_seed, 4)
    states = _state_within_a_window(small_dataset, 2, 2), _state(other_seed)
    for state, balance in itertools.product(states, ({"window": 4}, {"pack": True, "max_tokens_per_rank": 90})):
        assert state["position"] == 16
        used, new = (_loaders(small_dataset, 1, balance) for _ in range(2))
        # Has planned the samples from position 16 on.
        _iterate(_load(used, with_changes(_FORMAT, state, seed=3, pending="")))
        assert _iterate(_load(used, state)) == _iterate(_load(new, state))


def test_the_states_of_epochs_after_a_resumed_one_are_those_of_any_epoch(small_dataset: Path) -> None:
    (resumed,) = _load(_loaders(small_dataset, 1, {"window": 4}), _state_within_a_window(small_dataset, 2, 2))
    batches = [*resumed, *itertools.islice(resumed, 7)]
    states = [resumed.state_dict(after=batch) for batch in batches]
    fresh = _loaders(small_dataset, 1, {"window": 4})[0]
    _iterate([fresh])
    assert states[-7:] == [fresh.state_dict() for _ in itertools.islice(fresh, 7)]
    # Also of the first of them, after a state of the second was loaded.
    resumed.load_state_dict(states[-1])
    assert [resumed.state_dict(after=batch) for batch in batches] == states


@pytest.mark.parametrize(
    "options",
    [{"strategy": "karmarkar-karp"}, {"max_tokens_per_rank": 160}, {"strategy": "min-move", "tolerance": 0.1}],
    ids=str,
)
def test_each_step_is_balanced_like_any_other(small_dataset: Path, options: dict[str, Any]) -> None:
    metrics: list[list[StepMetrics]] = [[] for _ in range(4)]
    balances = [{"window": 4, **options, "on_step": of_rank.append} for of_rank in metrics]
    loaders = [_loaders(small_dataset, 4, balance)[rank] for rank, balance in enumerate(balances)]
    batches = [list(loader) for loader in loaders]
    for step, of_ranks in enumerate(zip(*batches, strict=True)):
        # A loss for each event but the first one of a history.
        lengths = np.concatenate([batch.features["item_id"].lengths().numpy() for batch in of_ranks])
        assert [batch.world_loss_tokens for batch in of_ranks] == [np.maximum(lengths - 1, 0).sum()] * 4
        for rank, batch in enumerate(of_ranks):
            lengths = batch.features["item_id"].lengths()[: batch.num_real].numpy()
            load = int(COST({"item_id": lengths, "action": lengths}, np.zeros_like(lengths)).sum())
            assert [of_rank[step].after[rank] for of_rank in metrics] == [load] * 4
            assert int(lengths.sum()) <= options.get("max_tokens_per_rank", 1 << 62)


@pytest.mark.parametrize("cost", [COST, PaddedCost(COST)], ids=["sums", "padded"])
def test_loads_before_are_those_of_the_steps_without_windows(small_dataset: Path, cost: Any) -> None:
    state = _state_within_a_window(small_dataset, 3, 3)
    for start in (None, state):
        measured: list[list[StepMetrics]] = [[], []]
        ways: tuple[dict[str, Any], ...] = ({"strategy": "none"}, {"window": 4})
        for balance, metrics in zip(ways, measured, strict=True):
            loaders = _loaders(small_dataset, 2, {**balance, "cost": cost, "on_step": metrics.append})
            list(_load(loaders, start)[1] if start else loaders[1])
        unbalanced, windowed = measured
        assert len(windowed) > 10
        assert [step.before.tolist() for step in windowed] == [step.before.tolist() for step in unbalanced]
        assert [step.after.tolist() for step in windowed] != [step.before.tolist() for step in unbalanced]
        assert sum(step.tokens for step in windowed) == sum(step.tokens for step in unbalanced)


def test_padded_ranks_train_on_samples_of_similar_length(small_dataset: Path) -> None:
    metrics: list[StepMetrics] = []
    balance = {"window": 4, "cost": PaddedCost(COST), "on_step": metrics.append}
    loaders = [_loaders(small_dataset, 2, {**balance, "on_step": None})[1], _loaders(small_dataset, 2, balance)[0]]
    of_ranks = [[batch.features["item_id"].lengths().numpy() for batch in loader] for loader in reversed(loaders)]
    for lengths, of_step in zip(zip(*of_ranks, strict=True), metrics, strict=True):
        longest = [int(of_rank.max()) for of_rank in lengths]
        assert of_step.rank_tokens.tolist() == [4 * one for one in longest]
        assert of_step.after.tolist() == [4 * int(COST.of_tokens(np.array(one), np.array(0))) for one in longest]
        assert of_step.longest == max(longest)
        assert of_step.lower_bound == int(of_step.after.max())
    padding = [sum(int(step.rank_tokens.sum()) for step in metrics), sum(step.tokens for step in metrics)]
    assert padding[0] < 1.7 * padding[1]
