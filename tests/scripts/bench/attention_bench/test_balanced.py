"""Attention of each rank before and after balancing: who trains what, medians by hand, tables and plots."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.patches import Rectangle

from attention_bench.balanced import (
    STRATEGIES,
    Draw,
    assigned,
    draw_tokens,
    equal_length,
    load,
    markdown_table,
    measure_draw,
    save,
    summarize,
)
from attention_bench.bars import rank_bars
from attention_bench.timing import Heads, Passes, Times
from evenrank.core.errors import DataError
from evenrank.datasets.distributions import ClippedZipf, Lognormal

HEADS = Heads(count=1, head_dim=250, dtype=torch.bfloat16)  # 1,000 operations per pair in the forward
TOKENS = draw_tokens(Lognormal(mean=512, std=512), 4, 8, seed=0)


def _measure(batch: Sequence[int]) -> Passes:
    """Time a batch on a device that computes a pair in a microsecond, forward and backward each."""
    ms = sum(length * (length + 1) / 2 for length in batch) / 1e3
    return Passes(forward=Times(ms=ms, runs=50), backward=Times(ms=ms, runs=7))


def _draws(tokens: np.ndarray = TOKENS, *, draw: int = 0, attention: str = "triton") -> list[Draw]:
    return measure_draw(
        _measure,
        HEADS,
        tokens,
        device="a GPU",
        lengths="lognormal",
        attention=attention,
        draw=draw,
        on_batch=lambda: None,
    )


def test_events_are_two_tokens_each_and_drawn_the_same_every_time() -> None:
    tokens = draw_tokens(ClippedZipf(exponent=1.2, high=4096), 8, 32, seed=3)
    assert tokens.shape == (8, 32)
    assert (tokens % 2 == 0).all()
    assert (tokens.min(), tokens.max()) == (2, 8192)
    assert np.array_equal(tokens, draw_tokens(ClippedZipf(exponent=1.2, high=4096), 8, 32, seed=3))


def test_equal_lengths_have_the_mean_cost() -> None:
    assert equal_length(np.array([[7, 7], [7, 7]])) == 7
    assert equal_length(np.array([2, 5])) == 4  # 3 and 15 pairs; 4 tokens have 10, 3 have 6
    assert equal_length(np.array([0, 0])) == 1
    length = equal_length(TOKENS)
    mean = (TOKENS * (TOKENS + 1) / 2).mean()
    assert (length - 1) * length / 2 < mean < (length + 1) * (length + 2) / 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_sample_is_trained_once(strategy: str) -> None:
    ranks = assigned(TOKENS, strategy)
    assert [len(rank) for rank in ranks] == [8] * 4
    assert sorted(np.concatenate(ranks).tolist()) == sorted(TOKENS.reshape(-1).tolist())
    if strategy == "none":
        assert ranks == TOKENS.tolist()


def test_balanced_ranks_take_as_long_as_equal_lengths() -> None:
    draws = {draw.strategy: draw for draw in _draws()}
    assert list(draws) == list(STRATEGIES)
    over_equal = {name: max(draw.rank_ms) / draw.equal_ms for name, draw in draws.items()}
    assert over_equal["none"] > 1.2
    assert over_equal["lpt-swap"] < 1.01
    assert over_equal["min-move"] < 1.02
    assert {draw.equal_ms for draw in draws.values()} == {draws["none"].equal_ms}


def test_rates_are_those_by_hand() -> None:
    batches: list[None] = []
    rows = measure_draw(
        _measure,
        HEADS,
        np.array([[1, 2], [3, 4]]),
        device="a GPU",
        lengths="few",
        attention="triton",
        draw=5,
        on_batch=lambda: batches.append(None),
    )
    identity = rows[0]
    assert identity.rank_ms == pytest.approx((2 * 4 / 1e3, 2 * 16 / 1e3))  # 4 and 16 pairs
    # 1,000 operations and 2.5 times as many for a pair, in two microseconds.
    assert identity.rank_tflops == pytest.approx((3500 / 2e-6 / 1e12,) * 2, abs=0.005)
    assert identity.equal_ms == pytest.approx(2 * 12 / 1e3)  # 2 samples of 3 tokens: 5 pairs on average, so 6 each
    assert identity.least_imbalance == 1.1  # 10 + 1 pairs on the heaviest rank, at least, of 20 on two
    assert (identity.runs, identity.draw, identity.lengths) == (7, 5, "few")
    assert len(batches) == 2 * len(STRATEGIES) + 1


def _made_up(draw: int, rank_ms: tuple[float, ...], *, strategy: str = "none") -> Draw:
    return Draw(
        device="a GPU",
        lengths="lognormal",
        attention="triton",
        strategy=strategy,
        draw=draw,
        rank_ms=rank_ms,
        rank_tflops=tuple(100 * ms for ms in rank_ms),
        equal_ms=2.0,
        equal_tflops=300.0,
        least_imbalance=1.25,
        runs=50,
    )


def test_summaries_are_medians_over_the_draws() -> None:
    draws = [_made_up(0, (1.0, 3.0)), _made_up(1, (2.0, 2.0)), _made_up(2, (1.0, 7.0))]
    (row,) = summarize(draws)
    assert (row.slowest_ms, row.mean_ms, row.imbalance, row.over_equal, row.tflops) == (3.0, 2.0, 1.5, 1.5, 300.0)
    lines = markdown_table([row]).splitlines()
    assert lines[2] == "| lognormal | triton | none | 3.00 | 2.00 | 1.500 | 1.250 | 1.500 | 300 | 2.00 | 300 |"
    assert {line.count("|") for line in lines} == {12}


def test_strategies_are_summarized_apart() -> None:
    rows = summarize([*_draws(draw=0), *_draws(draw=1, attention="triton-by-sample")])
    assert [row.strategy for row in rows] == [*STRATEGIES] * 2


def test_draws_are_the_same_after_they_were_saved(tmp_path: Path) -> None:
    path = tmp_path / "new" / "balanced.jsonl"
    save(_draws(), path)
    assert load(path) == _draws()
    assert len(path.read_text().splitlines()) == len(STRATEGIES)


@pytest.mark.parametrize("text", ["", "{}\n", "[]\n", "not JSON\n"])
def test_a_damaged_file_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "balanced.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=r"balanced.jsonl .*without --report-only"):
        load(path)


def test_bars_show_the_first_draw_before_and_after_beside_equal_lengths(tmp_path: Path) -> None:
    draws = [
        _made_up(0, (1.0, 3.0)),
        _made_up(0, (2.1, 2.0), strategy="lpt-swap"),
        _made_up(1, (5.0, 9.0)),
        _made_up(1, (7.0, 7.0), strategy="lpt-swap"),
    ]
    figure = rank_bars(draws)
    (axes,) = figure.axes
    assert [patch.get_height() for patch in axes.patches if isinstance(patch, Rectangle)] == [1.0, 3.0, 2.1, 2.0]
    assert np.array_equal(axes.lines[0].get_ydata(), [2.0, 2.0])
    figure.savefig(tmp_path / "balanced.png")
    assert matplotlib.image.imread(tmp_path / "balanced.png").std() > 0.05
