"""Loaders that balance alone, with windows of steps or without; `balance/test_packing.py` has packed steps.

That chains of jobs, alone or together, train each sample once is a law.
"""

import dataclasses
import itertools
import multiprocessing
import os
import pickle
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader import LoaderConfig, Mixture, Negatives, TimeWindows, build_loader, random_codes
from evenrank.dataloader.balance import BalanceConfig, Balancer, PaddedCost, StepMetrics
from evenrank.dataloader.sampling import balanced_steps
from evenrank.dataloader.sampling.balanced_steps import Memo
from evenrank.dataloader.sampling.epoch_positions import _FORMAT
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.balance.costs import COST, Ints, Lengths, one_per_sample
from tests.dataloader.batch_helpers import all_ids, ids_of, with_changes
from tests.ranks import RankPool

Loaders = list[Any]


def _loaders(path: Path | Mixture, world_size: int, balance: Mapping[str, Any] | None, **options: Any) -> Loaders:
    """Return the loaders of all ranks."""
    config = LoaderConfig(**{"batch_size": 4, "seed": 3, **options})
    way = None if balance is None else BalanceConfig(**{"cost": COST, **balance})
    return [build_loader(path, config, rank=rank, world_size=world_size, balance=way) for rank in range(world_size)]


def _load(loaders: Loaders, state: Mapping[str, Any]) -> Loaders:
    for loader in loaders:
        loader.load_state_dict(state)
    return loaders


def _iterate(loaders: Loaders) -> list[list[list[int]]]:
    """Return the ids of each rank's samples, step by step."""
    return [[ids_of(batch) for batch in loader] for loader in loaders]


def _measured(metrics: StepMetrics) -> list[Any]:
    """Return the counts and loads of a step, without times."""
    values = {name: value for name, value in dataclasses.asdict(metrics).items() if not name.endswith("_seconds")}
    return [np.asarray(value).tolist() for value in values.values()]


def _both_ways(rank: int, world_size: int, data: Any, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for options, of_balance in cases:
        config, ways = LoaderConfig(**{"batch_size": 4, "prefetch": 3, **options}), []
        for has_exchange in (False, True):
            metrics: list[StepMetrics] = []
            balance = BalanceConfig(**{"cost": COST, **of_balance}, on_step=metrics.append)
            build = partial(build_loader, data, config, rank=rank, world_size=world_size)
            batches: Any = Balancer(build(), balance) if has_exchange else build(balance=balance)
            steps = [bits_of(batch) for _ in range(2) for batch in batches]
            batches.close()
            ways.append(list(zip(steps, map(_measured, metrics), strict=True)))
        assert ways[0] == ways[1] != [], (options, of_balance)


CODES = {"codes": random_codes(501, levels=2, codebook_size=8), "max_history_length": 9}
OF_CODES = {"cost": dataclasses.replace(COST, history_key="semantic_id")}
Cases = list[tuple[dict[str, Any], dict[str, Any]]]
OF_STRATEGIES: Cases = [
    ({"user_id": True, "num_workers": 2, "max_history_length": 20}, {"strategy": "karmarkar-karp"}),
    ({}, {"strategy": "min-move", "tolerance": 0.1}),
    ({"max_history_length": 20}, {"max_tokens_per_rank": 75}),
    ({}, {"strategy": "none"}),
]
OF_SETTINGS: Cases = [
    ({"order": TimeWindows(every="1w"), "max_num_candidates": 3, "candidate_actions": True, "num_tasks": 2}, {}),
    ({"order": "rows", "drop_last": True, "max_history_length": 0}, {}),
    ({"split": "eval", "max_num_candidates": 1, "negatives": Negatives(count=5, by="popularity")}, {}),
    ({**CODES, "history_labels": True, "candidate_feature": True, "user_id": True}, OF_CODES),
]
OF_COLUMNS: Cases = [
    ({"max_num_candidates": 2, "label": ("dwell", "price"), "weight": "share", "context": ("tags",)}, {}),
    ({"label": "price", "weight": "price", "context": ("share",), "extra_events": ("price", "dwell")}, {}),
]


def test_batches_and_their_measures_are_a_balancers(ranks: RankPool, small_dataset: Path, rich_dataset: Path) -> None:
    ranks.run(4, _both_ways, small_dataset, OF_STRATEGIES)
    ranks.run(3, _both_ways, small_dataset, OF_SETTINGS)
    ranks.run(2, _both_ways, rich_dataset, OF_COLUMNS)
    ranks.run(3, _both_ways, Mixture(weights={small_dataset: 2.0, str(small_dataset): 1.0}), [({}, {})])


def test_steps_can_be_planned_together(small_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(**options: Any) -> list[Any]:
        metrics: list[StepMetrics] = []
        batches = list(_loaders(small_dataset, 3, {"on_step": metrics.append}, **options)[1])
        return [(bits_of(batch), _measured(of_step)) for batch, of_step in zip(batches, metrics, strict=True)]

    one_by_one = steps(prefetch=1)
    assert len(one_by_one) > 10
    for at_once in (1, 7, 29, 1 << 20):
        monkeypatch.setattr(balanced_steps, "_SAMPLES_AT_ONCE", at_once)
        assert steps(prefetch=5) == one_by_one


def _state(path: Path, world_size: int, stop: int, **options: Any) -> dict[str, Any]:
    """Return the state of ranks that stopped after some steps of a window of 4."""
    loader = _loaders(path, world_size, {"window": 4}, **options)[0]
    batches = list(itertools.islice(loader, stop))
    state: dict[str, Any] = loader.state_dict(after=batches[-1])
    return state


class _Large:
    """Costs that fill 62 bits in a step, and can be shifted so that those of a window do not exceed them."""

    max_cost = 1 << 59

    def __call__(self, lengths: Lengths, num_candidates: Ints) -> Ints:
        return np.minimum(lengths["item_id"] + 1, 32) << 54


OPTIONS = {"batch_size": st.integers(1, 9), "order": st.sampled_from(["shuffle", "rows"]), "drop_last": st.booleans()}
COSTS = st.sampled_from([COST, PaddedCost(COST), _Large()])


@settings(max_examples=20)
@given(st.integers(1, 8), st.integers(2, 9), COSTS, st.fixed_dictionaries(OPTIONS))
def test_each_window_has_its_samples_once(
    small_dataset: Path, world_size: int, window: int, cost: Any, options: Any
) -> None:
    def steps_of(loaders: Loaders) -> list[list[int]]:
        return [sorted(itertools.chain(*of_step)) for of_step in zip(*_iterate(loaders), strict=True)]

    unbalanced = steps_of(_loaders(small_dataset, world_size, None, **options))
    loaders = _loaders(small_dataset, world_size, {"window": window, "cost": cost}, **options)
    assert [len(loader) for loader in loaders] == [len(unbalanced)] * world_size
    steps = steps_of(loaders)
    assert [len(step) for step in steps] == [len(step) for step in unbalanced]
    num_full = sum(len(step) == world_size * options["batch_size"] for step in steps)
    assert steps[num_full:] == unbalanced[num_full:]
    for first in range(0, num_full, window):
        of_window = slice(first, min(first + window, num_full))
        assert sorted(itertools.chain(*steps[of_window])) == sorted(itertools.chain(*unbalanced[of_window]))


def test_chance_is_another_one_in_each_window_and_epoch(small_dataset: Path) -> None:
    (plain,), (loader,) = (_loaders(small_dataset, 1, way) for way in (None, {"window": 8, "cost": one_per_sample}))
    assigned = []
    for _ in range(2):
        place_of = {sample: place for place, sample in enumerate(all_ids(plain))}
        places = [place_of[sample] for sample in all_ids(loader)]
        assigned += [tuple(np.array(places[i : i + 32]) % 32) for i in range(0, len(places) - 31, 32)]
    # Samples of equal cost can only be told apart by their positions, so alike windows would be assigned alike.
    assert len(set(assigned)) == len(assigned) > 10


def test_states_have_nothing_pending_between_windows_and_those_before_a_load_are_known(small_dataset: Path) -> None:
    for window in (1, 3, 7):
        loader = _loaders(small_dataset, 2, {"window": window}, num_workers=2)[0]
        batches, num_full = list(loader), loader.num_samples // 8
        states = [loader.state_dict(after=batch) for batch in batches]
        has_pending = [(step + 1) % window > 0 and step + 1 < num_full for step in range(len(batches))]
        assert [state["pending"] != "" for state in states] == has_pending
        loader.load_state_dict(_state(small_dataset, 3, 3))
        assert [loader.state_dict(after=batch) for batch in batches[:4]] == states[:4]


def test_a_loader_that_has_planned_windows_plans_those_of_a_state_as_a_new_one_does(small_dataset: Path) -> None:
    states = _state(small_dataset, 2, 2), _state(small_dataset, 1, 4, seed=4)
    for state, balance in itertools.product(states, ({"window": 4}, {"pack": True, "max_tokens_per_rank": 90})):
        assert state["position"] == 16
        used, new = (_loaders(small_dataset, 1, balance) for _ in range(2))
        # Has planned the samples from position 16 on.
        _iterate(_load(used, with_changes(_FORMAT, state, seed=3, pending="")))
        assert _iterate(_load(used, state)) == _iterate(_load(new, state))
        epochs = [[loader.state_dict() for _ in loader] for loader in (*used, *new)]
        assert epochs[0] == epochs[1] != []


def test_steps_of_windows_keep_the_limit_of_tokens(small_dataset: Path) -> None:
    for batches in zip(*_loaders(small_dataset, 4, {"window": 4, "max_tokens_per_rank": 160}), strict=True):
        lengths = [batch.features["item_id"].lengths()[: batch.num_real].numpy() for batch in batches]
        assert max(int(of_rank.sum()) for of_rank in lengths) <= 160
        # A loss for each event but the first one of a history.
        losses = sum(int(np.maximum(of_rank - 1, 0).sum()) for of_rank in lengths)
        assert [batch.world_loss_tokens for batch in batches] == [losses] * 4


@pytest.mark.parametrize("cost", [COST, PaddedCost(COST)], ids=["sums", "padded"])
def test_loads_before_are_those_of_the_steps_without_windows(small_dataset: Path, cost: Any) -> None:
    for start in (None, _state(small_dataset, 3, 3)):
        measured: list[list[StepMetrics]] = [[], []]
        ways: tuple[dict[str, Any], ...] = ({"strategy": "none"}, {"window": 4})
        for balance, metrics in zip(ways, measured, strict=True):
            loaders = _loaders(small_dataset, 2, {**balance, "cost": cost, "on_step": metrics.append})
            lengths = [b.features["item_id"].lengths() for b in (_load(loaders, start) if start else loaders)[1]]
        unbalanced, windowed = measured
        assert len(windowed) > 10
        before = [step.before.tolist() for step in unbalanced]
        assert [step.before.tolist() for step in windowed] == before
        assert [step.after.tolist() for step in windowed] != before
        assert sum(step.tokens for step in windowed) == sum(step.tokens for step in unbalanced)
        if cost is not COST:  # the longest sample of a rank counts for all of its rows, and they are alike
            longest = [int(of_rank.max()) for of_rank in lengths]
            assert [step.rank_tokens.tolist()[1] for step in windowed] == [4 * one for one in longest]
            loads = [4 * int(COST.of_tokens(np.array(one), np.array(0))) for one in longest]
            assert [step.after.tolist()[1] for step in windowed] == loads
            assert sum(s.rank_tokens.sum() for s in windowed) < 1.7 * sum(s.tokens for s in windowed)


def test_threads_that_ask_for_one_value_wait_for_the_one_that_computes_it_but_a_forked_child_does_not() -> None:
    memo: Memo[int] = Memo(4)
    computed, has_begun, may_end = [], threading.Event(), threading.Event()

    def compute() -> int:
        computed.append(1)
        has_begun.set()
        may_end.wait()
        return 7

    with ThreadPoolExecutor(4) as threads:
        results = [threads.submit(memo.get, "key", compute) for _ in range(4)]
        try:
            has_begun.wait()
            assert memo.get("other", lambda: 1) == 1  # does not wait for them
            child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(memo.get("key", lambda: 5)))
            child.start()
            child.join(30)
            assert child.exitcode == 5
        finally:
            may_end.set()
        assert [result.result() for result in results] == [7] * 4
    assert computed == [1]


def test_the_latest_values_are_kept_but_no_errors_and_a_copy_through_pickle_begins_empty() -> None:
    memo: Memo[int] = Memo(2)
    computed: list[int] = []

    def get(memo: Memo[int], key: int) -> int:
        return memo.get(key, lambda: computed.append(key) or 10 * key)  # type: ignore[func-returns-value]

    for error in (KeyboardInterrupt, ZeroDivisionError):
        with pytest.raises(error):
            memo.get(1, lambda error=error: (_ for _ in ()).throw(error))  # type: ignore[misc]
    assert [get(memo, key) for key in (1, 2, 1, 2, 3, 2, 3, 1)] == [10, 20, 10, 20, 30, 20, 30, 10]
    assert computed == [1, 2, 3, 1]
    copy = pickle.loads(pickle.dumps(memo))
    assert [get(copy, key) for key in (1, 2, 3, 1)] == [10, 20, 30, 10]
    assert computed == [1, 2, 3, 1] * 2  # it keeps as many
