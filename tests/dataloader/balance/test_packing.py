import itertools
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError
from evenrank.dataloader import Loader, LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig, StepMetrics, TokenLimitWarning, packing, partition
from evenrank.dataloader.balance.packing import PackedSchedule, pack
from tests.dataloader.balance.costs import COST, Ints
from tests.dataloader.batch_helpers import ids_of

Tokens = dict[int, int]  # by sample
Problem = tuple[Ints, int, int, int]  # tokens of all samples, world size, batch size and budget


def _pack(tokens: Ints, world_size: int, batch_size: int, budget: int, **options: Any) -> PackedSchedule:
    options = {"num_samples": len(tokens), "start": 0, "drop_last": False, **options}
    limits: dict[str, Any] = {"world_size": world_size, "batch_size": batch_size, "max_tokens": budget}
    return pack(lambda positions: tokens[positions], **limits, **options)


def _fits(tokens: Ints, world_size: int, batch_size: int, budget: int) -> bool:
    """Return whether LPT with room for `batch_size` samples per rank is within the budget: the rule, in Python."""
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    for sample in sorted(tokens.tolist(), reverse=True):
        min((rank for rank in ranks if len(rank) < batch_size), key=sum).append(sample)
    return max(map(sum, ranks)) <= budget


@st.composite
def _problems(draw: st.DrawFn) -> Problem:
    budget = draw(st.integers(1, 60))
    lengths = st.one_of(st.integers(0, budget), st.sampled_from([0, 1, budget, budget // 2, budget // 2 + 1]))
    tokens = draw(st.lists(lengths, min_size=1, max_size=80))
    return np.array(tokens, dtype=np.int64), draw(st.integers(1, 6)), draw(st.integers(1, 12)), budget


@settings(max_examples=200)
@given(_problems(), st.data())
def test_steps_are_full_and_ranks_would_load_equal_shares(problem: Problem, data: st.DataObject) -> None:
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
        counts = [len(share) for share in shares]
        assert np.concatenate(shares).tolist() == list(range(first, end))
        assert schedule.positions_of_all(range(step, step + 1)).tolist() == list(range(first, end))
        assert schedule.num_loaded(step).tolist() == counts
        assert max(counts) <= min(batch_size, min(counts) + 1)


@settings(max_examples=200)
@given(_problems(), st.sampled_from(["lpt-swap", "karmarkar-karp", "min-move"]), st.integers(0, 3))
def test_any_strategy_can_assign_every_packed_step(problem: Problem, strategy: str, seed: int) -> None:
    tokens, world_size, batch_size, budget = problem
    schedule = _pack(tokens, world_size, batch_size, budget)
    for step in range(schedule.num_steps):
        num_real = schedule.num_loaded(step)
        rows = np.zeros((world_size, batch_size), dtype=np.int64)
        rows[np.arange(batch_size) < num_real[:, np.newaxis]] = tokens[schedule.positions_of_all(range(step, step + 1))]
        costs = np.random.default_rng(seed).permutation(rows.reshape(-1)) if seed else rows
        options: dict[str, Any] = {"num_real": num_real, "strategy": strategy, "max_tokens_per_rank": budget}
        assignment = partition(costs, world_size, tokens=rows, **options)
        assert assignment.loads(rows).max() <= budget


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
    whole = _pack(tokens, 3, 5, 100).ends
    monkeypatch.setattr(packing, "_SAMPLES_PER_BLOCK", 1)
    monkeypatch.setattr(packing, "_STEPS_PER_BLOCK", 1)
    assert len(whole) > 200
    assert _pack(tokens, 3, 5, 100).ends.tolist() == whole.tolist()


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


def _loaders(path: Path, world_size: int, *, budget: int = 100, **options: Any) -> list[Loader[SequenceBatch]]:
    balance = {name: options.pop(name) for name in ("on_overflow", "strategy", "on_step") if name in options}
    config = LoaderConfig(**{"batch_size": 16, **options})
    packed = BalanceConfig(cost=COST, max_tokens_per_rank=budget, pack=True, **balance)
    return [build_loader(path, config, rank=rank, world_size=world_size, balance=packed) for rank in range(world_size)]


@pytest.fixture(scope="module")
def tokens_of(small_dataset: Path) -> Tokens:
    """Return the tokens of each sample by its id."""
    loader = build_loader(small_dataset, LoaderConfig(batch_size=1), rank=0, world_size=1)
    tokens = {ids_of(batch)[0]: int(batch.features["item_id"].lengths().sum()) for batch in loader}
    assert max(tokens.values()) == 60  # so that budgets from 60 on are enough
    return tokens


@settings(max_examples=25)
@given(
    world_size=st.integers(1, 6),
    options=st.builds(
        dict,
        batch_size=st.integers(1, 24),
        budget=st.integers(60, 400),
        strategy=st.sampled_from(["lpt-swap", "karmarkar-karp", "min-move"]),
        num_workers=st.integers(0, 2),
    ),
)
def test_each_sample_comes_once(small_dataset: Path, tokens_of: Tokens, world_size: int, options: Any) -> None:
    metrics: list[StepMetrics] = []
    loaders = _loaders(small_dataset, world_size, **options, on_step=metrics.append)
    for epoch in range(2):
        num_steps = len(loaders[0])
        assert loaders[0].remaining_batches() == num_steps
        ranks = [list(loader) for loader in loaders]
        assert [len(batches) for batches in ranks] == [num_steps] * world_size
        batches = list(itertools.chain(*ranks))
        assert sorted(sample for batch in batches for sample in ids_of(batch)) == sorted(tokens_of)
        for batch in batches:
            assert sum(tokens_of[sample] for sample in ids_of(batch)) <= options["budget"]
            assert batch.num_real <= batch.batch_size == options["batch_size"]
            assert (batch.dp_size, batch.epoch) == (world_size, epoch)
        consumed = 0
        for step in zip(*ranks, strict=True):
            consumed += sum(batch.num_real for batch in step)
            world_loss_tokens = sum(batch.loss_tokens for batch in step)
            assert {(batch.position, batch.world_loss_tokens) for batch in step} == {(consumed, world_loss_tokens)}
    assert sum(step.tokens for step in metrics) == 2 * world_size * sum(tokens_of.values())


@settings(max_examples=8)
@given(
    world_size=st.integers(1, 4),
    budget=st.integers(60, 300),
    other=st.builds(dict, world_size=st.integers(1, 4), budget=st.integers(60, 300), batch_size=st.integers(2, 20)),
)
def test_it_resumes_on_other_ranks(
    small_dataset: Path, tokens_of: Tokens, world_size: int, budget: int, other: Any
) -> None:
    loaders, same = (_loaders(small_dataset, world_size, budget=budget) for _ in range(2))
    others = _loaders(small_dataset, **other)
    steps = list(zip(*loaders, strict=True))
    states = [[loader.state_dict(after=batch) for loader, batch in zip(loaders, step, strict=True)] for step in steps]
    trained: list[int] = []
    for index, (step, of_ranks) in enumerate(zip(steps, states, strict=True)):
        assert all(state == of_ranks[0] for state in of_ranks)
        trained += [sample for batch in step for sample in ids_of(batch)]
        if index + 1 == len(steps):
            break
        for loader in [*same, *others]:
            loader.load_state_dict(of_ranks[0])
        assert same[0].remaining_batches() == len(steps) - index - 1
        for resumed, rest in zip(zip(*same, strict=True), steps[index + 1 :], strict=True):
            assert [ids_of(batch) for batch in resumed] == [ids_of(batch) for batch in rest]
        rest_of_others = [sample for loader in others for batch in loader for sample in ids_of(batch)]
        assert sorted(trained + rest_of_others) == sorted(tokens_of)
    assert sorted(trained) == sorted(tokens_of)


def test_an_epoch_is_planned_once(small_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Mock(wraps=pack)
    monkeypatch.setattr("evenrank.dataloader.sampling.balanced_steps.pack", planned)
    loader = _loaders(small_dataset, 2, drop_last=True)[0]
    length = len(loader)
    assert len(list(loader)) == length
    assert planned.call_count == 1
    for _ in loader:  # the second epoch; its own length, and that of the third
        assert len(loader) > 0
        assert loader.remaining_batches() == len(loader)
    assert planned.call_count == 3
    loader.load_state_dict(loader.state_dict())  # after the last step, although samples were left out
    assert loader.epoch == 2
    assert next(iter(loader)).epoch == 2


def test_a_sample_above_the_budget_is_an_error_that_names_it(small_dataset: Path, tokens_of: Tokens) -> None:
    longest = min(row for row, tokens in tokens_of.items() if tokens == 60)
    message = rf"^row {longest} of \S+ has 60 tokens, more than max_tokens_per_rank = 59; raise the .*$"
    with pytest.raises(ConfigError, match=message):
        len(_loaders(small_dataset, 2, budget=59, order="rows")[0])


def test_a_sample_above_the_budget_can_have_a_rank_of_its_own(small_dataset: Path, tokens_of: Tokens) -> None:
    loaders = _loaders(small_dataset, 3, budget=40, on_overflow="warn")
    with pytest.warns(TokenLimitWarning, match="some samples have more tokens than max_tokens_per_rank = 40"):
        len(loaders[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TokenLimitWarning)
        batches = [batch for loader in loaders for batch in loader]
    assert len(caught) == 2  # of the other ranks; that of rank 0 has planned the epoch before
    assert sorted(sample for batch in batches for sample in ids_of(batch)) == sorted(tokens_of)
    above = 0
    for batch in batches:
        tokens = [tokens_of[sample] for sample in ids_of(batch) if tokens_of[sample]]
        assert sum(tokens) <= 40 or len(tokens) == 1
        above += sum(tokens) > 40
    assert above == sum(tokens > 40 for tokens in tokens_of.values()) > 0
