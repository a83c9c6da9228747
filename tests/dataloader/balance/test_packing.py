"""Plans of many steps, and packed steps, which have as many samples as fit."""

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import (
    STRATEGIES,
    BalanceConfig,
    LinearCost,
    TokenLimitWarning,
    packing,
    partition,
    register_strategy,
)
from evenrank.dataloader.balance.packing import PackedSchedule, clip_tokens, pack
from evenrank.dataloader.balance.partition.strategies import PartitionProblem
from evenrank.dataloader.balance.plan import plan_steps
from tests.dataloader.balance.costs import COST, Ints
from tests.registrations import restored

LINEAR = LinearCost(interleave_actions=False)


def _in_place(problem: PartitionProblem) -> Any:
    """Assign in reverse, in the arrays that a strategy is given."""
    assert problem.tokens is not None
    for values in (problem.costs, problem.tokens, problem.order):
        values[:] = 0
    problem.home[:] = problem.home[::-1].copy()
    return problem.home


@pytest.mark.filterwarnings("ignore::evenrank.dataloader.balance.TokenLimitWarning")
@settings(max_examples=300)
@given(st.data(), st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.booleans(), st.booleans())
def test_many_steps_are_planned_as_each_alone(
    data: st.DataObject, num_steps: int, world_size: int, batch_size: int, is_full: bool, is_limited: bool
) -> None:
    shape = num_steps, world_size, batch_size
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    costs, tokens = rng.integers(0, 1000, shape) ** 2, rng.integers(0, 100, shape)
    num_real = None if is_full else rng.integers(0, batch_size + 1, shape[:2])
    with restored(STRATEGIES):
        register_strategy("in place")(_in_place)
        options: dict[str, Any] = {"strategy": data.draw(st.sampled_from(list(STRATEGIES)))}
        options["tolerance"] = data.draw(st.sampled_from([0.0, 0.01, 0.2]))
        if is_limited:
            options |= {"max_tokens_per_rank": int(tokens.sum(axis=2).max()), "on_overflow": "warn"}
        before, config = (costs.tolist(), tokens.tolist()), BalanceConfig(cost=LINEAR, **options)
        planned = plan_steps(costs, tokens, config, num_real=num_real, steps=range(num_steps))
        assert (costs.tolist(), tokens.tolist()) == before
        for step, rank_of in enumerate(planned):
            of_step = None if num_real is None else num_real[step]
            alone = partition(costs[step], world_size, tokens=tokens[step], num_real=of_step, **options)
            assert rank_of.tolist() == alone.rank_of.tolist()


def test_one_step_in_so_many_stays_unbalanced_and_others_stay_balanced() -> None:
    config = BalanceConfig(cost=LINEAR, compare_every=3)
    unbalanced = [[step for step in range(9) if not config.balances(epoch, step)] for epoch in range(3)]
    assert unbalanced == [[1, 4, 7], [0, 3, 6], [2, 5, 8]]
    costs = np.tile([[9, 9], [1, 1]], (6, 1, 1))
    planned = plan_steps(costs, costs, config, epoch=1, steps=range(10, 16))
    assert [bool((rank_of != [[0], [1]]).any()) for rank_of in planned] == [step % 3 > 0 for step in range(10, 16)]


def _pack(tokens: Ints, world_size: int, batch_size: int, budget: int, **options: Any) -> PackedSchedule:
    options = {"num_samples": len(tokens), "start": 0, "drop_last": False, **options}
    return pack(
        lambda positions: tokens[positions], world_size=world_size, batch_size=batch_size, max_tokens=budget, **options
    )


def _fits(tokens: Ints, world_size: int, batch_size: int, budget: int) -> bool:
    """Return whether LPT with room for `batch_size` samples per rank is within the budget: the rule, in Python."""
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    for sample in sorted(tokens.tolist(), reverse=True):
        min((rank for rank in ranks if len(rank) < batch_size), key=sum).append(sample)
    return max(map(sum, ranks)) <= budget


@st.composite
def _problems(draw: st.DrawFn) -> tuple[Ints, int, int, int]:
    """Draw the tokens of all samples, world size, batch size and budget."""
    budget = draw(st.integers(1, 60))
    lengths = st.one_of(st.integers(0, budget), st.sampled_from([0, 1, budget, budget // 2, budget // 2 + 1]))
    tokens = draw(st.lists(lengths, min_size=1, max_size=80))
    return np.array(tokens, dtype=np.int64), draw(st.integers(1, 6)), draw(st.integers(1, 12)), budget


@settings(max_examples=250)
@given(_problems(), st.data(), st.sampled_from(["lpt-swap", "karmarkar-karp", "min-move"]), st.integers(0, 3))
def test_steps_are_full_shared_equally_and_assigned_within_the_budget_by_any_strategy(
    problem: tuple[Ints, int, int, int], data: st.DataObject, strategy: str, seed: int
) -> None:
    tokens, *limits = problem
    world_size, batch_size, budget = limits
    start = data.draw(st.integers(0, len(tokens)))
    schedule = _pack(tokens, *limits, start=start)
    ends = [start, *schedule.ends.tolist()]
    assert ends[-1] == len(tokens)
    for step, (first, end) in enumerate(itertools.pairwise(ends)):
        assert first < end
        assert _fits(tokens[first:end], *limits)
        longer = tokens[first : end + 1]
        is_full = len(longer) > world_size * batch_size or longer.sum() > world_size * budget
        assert end == len(tokens) or is_full or not _fits(longer, *limits)
        assert _pack(tokens, *limits, start=end).ends.tolist() == ends[step + 2 :]  # the rest of the epoch
        shares = [schedule.positions(step, rank) for rank in range(world_size)]
        num_real = schedule.num_loaded(step)
        assert np.concatenate(shares).tolist() == [*range(first, end)]
        assert schedule.positions_of_all(range(step, step + 1)).tolist() == [*range(first, end)]
        assert num_real.tolist() == [len(share) for share in shares]
        assert num_real.max() <= min(batch_size, num_real.min() + 1)
        rows = np.zeros((world_size, batch_size), dtype=np.int64)
        rows[np.arange(batch_size) < num_real[:, np.newaxis]] = tokens[first:end]
        costs = np.random.default_rng(seed).permutation(rows.reshape(-1)) if seed else rows
        options: dict[str, Any] = {"num_real": num_real, "strategy": strategy, "max_tokens_per_rank": budget}
        assert partition(costs, world_size, tokens=rows, **options).loads(rows).max() <= budget


def test_a_step_ends_where_samples_no_longer_fit_however_many_are_too_many() -> None:
    tokens = np.full(50, 6)  # each needs a rank, but ten have no more tokens than the six ranks may have
    assert _pack(tokens, 6, 12, 10).ends.tolist() == [6, 12, 18, 24, 30, 36, 42, 48, 50]
    # A step that swaps do not bring within the budget is assigned without.
    tokens = np.array([20, 3, 7, 7, 7, 3, 2, 10, 13, 9, 2, 9, 2, 1, 10])
    assert _pack(tokens, 3, 5, 36).ends.tolist() == [15]
    costs = np.ones_like(tokens)
    assert partition(costs, 3, tokens=tokens, max_tokens_per_rank=36).loads(tokens).max() == 36


def test_steps_do_not_depend_on_the_blocks_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(0).integers(0, 90, 3000)
    whole = _pack(tokens, 3, 5, 100).ends.tolist()
    monkeypatch.setattr(packing, "_SAMPLES_PER_BLOCK", 1)
    monkeypatch.setattr(packing, "_STEPS_PER_BLOCK", 1)
    assert _pack(tokens, 3, 5, 100).ends.tolist() == whole
    assert len(whole) > 200


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        ([4, 4, 4, 4, 9], [4]),  # 9 tokens fit one rank only: room for more
        ([4, 4, 4, 4, 10, 10], [4, 6]),  # as many tokens as fit
        ([4, 4, 4, 4, 0, 0, 0, 0, 0, 0], [6]),  # four samples in the last step
        ([4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0], [6, 12]),  # as many samples as fit
        ([1], []),
    ],
)
def test_drop_last_leaves_out_a_last_step_with_room(tokens: list[int], ends: list[int]) -> None:
    assert _pack(np.array(tokens), 2, 3, 10, drop_last=True).ends.tolist() == ends


def test_an_epoch_is_planned_once(small_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Mock(wraps=pack)
    monkeypatch.setattr("evenrank.dataloader.sampling.balanced_steps.pack", planned)
    balance = BalanceConfig(cost=COST, max_tokens_per_rank=100, pack=True)
    loader = build_loader(
        small_dataset, LoaderConfig(batch_size=16, drop_last=True), rank=0, world_size=3, balance=balance
    )
    for _ in range(2):  # the second epoch: its own length, and that of the third
        assert len(list(loader)) > 0
        assert len(loader) == loader.remaining_batches() > 0
    assert planned.call_count == 3
    loader.load_state_dict(loader.state_dict())  # after the last step, although samples were left out
    assert loader.epoch == next(iter(loader)).epoch == 2


def test_a_sample_above_the_limit_is_an_error_that_names_it_or_fills_a_rank_of_its_own() -> None:
    tokens = np.array([10, 41, 40, 60, 3])
    message = "^row 103 has 60 tokens, more than max_tokens_per_rank = 40; raise the limit, train on shorter histories"
    with pytest.raises(ConfigError, match=message):
        clip_tokens(tokens, 40, "raise", lambda index: f"row {100 + index}")
    with pytest.warns(TokenLimitWarning, match="some samples have more tokens than max_tokens_per_rank = 40; each g"):
        clipped = clip_tokens(tokens, 40, "warn", str)
    assert clipped.tolist() == [10, 40, 40, 40, 3]
    assert clip_tokens(tokens, 60, "raise", str) is tokens
