from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import (
    COSTS,
    BalanceConfig,
    HSTUCost,
    LinearCost,
    MeasuredCost,
    PaddedCost,
    register_cost,
)
from evenrank.training import StepTimer
from tests.dataloader.balance.costs import one_per_sample
from tests.registrations import restored

WINDOW = "log_window must be (start, stop) with 0 <= start < stop"
COMPARE = "compare_every=4 needs the same samples in each step; leave it out, or window and max_tokens_per_rank, which "
COMPARE += "change which samples a step has or may have"
PADDED = PaddedCost(LinearCost(interleave_actions=False))
PACK: dict[str, Any] = {"pack": True, "max_tokens_per_rank": 10}


# Whether the options are of a Balancer; None: of either.
@pytest.mark.parametrize(
    ("exchanges", "options", "message"),
    [
        (
            None,
            {"strategy": "best"},
            "BalanceConfig: strategy must be one of none, karmarkar-karp, lpt-swap, min-move, got 'best'",
        ),
        (None, {"tolerance": -0.1}, "BalanceConfig: tolerance must be at least 0 and below 1, got -0.1"),
        (None, {"max_tokens_per_rank": 0}, "BalanceConfig: max_tokens_per_rank must be at least 1, got 0"),
        (
            None,
            {"on_overflow": "ignore"},
            "BalanceConfig: on_overflow must be one of raise, warn, got 'ignore'",
        ),
        (None, {"log_every": -2}, "BalanceConfig: log_every must be at least 1, got -2"),
        (None, {"log_every": 1, "log_window": (5, 5)}, f"{WINDOW}, got (5, 5)"),
        (None, {"log_every": 1, "log_window": (-1, 5)}, f"{WINDOW}, got (-1, 5)"),
        (
            None,
            {"log_window": (2, 5)},
            "BalanceConfig: log_window=(2, 5) has no effect without log_every; give both, or leave it out",
        ),
        (
            None,
            {"log_loads": True},
            "BalanceConfig: log_loads=True has no effect without log_every; give both, or leave it out",
        ),
        (None, {"compare_every": 1}, "BalanceConfig: compare_every must be at least 2, got 1"),
        (None, {"compare_every": 2.0}, "BalanceConfig: compare_every must be of type int | None, got 2.0"),
        (None, {"log_every": float("nan")}, "BalanceConfig: log_every must be of type int | None, got nan"),
        (
            None,
            {"on_step": 3},
            "BalanceConfig: on_step must be of type Callable[[",
        ),
        (None, {"cost": "hstu"}, "BalanceConfig: cost must be of type Cost, got 'hstu'"),
        (None, {"timeout": 60}, "BalanceConfig: timeout must be of type timedelta, got 60"),
        (None, {"timeout": timedelta()}, "BalanceConfig: timeout must be above 0:00:00, got 0:00:00"),
        (None, {"compare_every": 4, "max_tokens_per_rank": 9}, COMPARE),
        (False, {"compare_every": 4, "window": 2}, COMPARE),
        (None, {"cost": PADDED, "max_tokens_per_rank": 9}, "max_tokens_per_rank = 9 limits sums of tokens, but a Pad"),
        (True, {"exchange": "pigeon"}, "BalanceConfig: exchange must be one of all-to-all, all-gather, got 'pigeon'"),
        (True, {"lookahead": 0}, "BalanceConfig: lookahead must be at least 1, got 0"),
        (True, {"batch_size": 0}, "BalanceConfig: batch_size must be at least 1, got 0"),
        (
            True,
            {"window": 9},
            "a Balancer has windows of at most 8 steps, whose metadata it gathers at once, got window=9",
        ),
        (
            False,
            {"lookahead": 3},
            "BalanceConfig: lookahead=3 is an option of Balancer, not of build_loader; leave it out, or",
        ),
        (
            False,
            {"exchange": "all-gather"},
            "BalanceConfig: exchange='all-gather' is an option of Balancer, not of build_loader",
        ),
        (None, {"window": 0}, "BalanceConfig: window must be at least 1, got 0"),
        (None, {"window": 1.5}, "BalanceConfig: window must be of type int, got 1.5"),
        (None, {"window": 2, "strategy": "none"}, "window=2 needs a strategy that assigns samples to ranks"),
        (None, PACK | {"strategy": "none"}, "pack=True needs a strategy that assigns samples to ranks, got 'none'"),
        (None, PACK | {"window": 2}, "pack=True decides which samples a step has; leave out window=2"),
        (
            None,
            {"pack": True},
            "BalanceConfig: pack=True has no effect without max_tokens_per_rank; give both, or leave it out",
        ),
    ],
)
def test_options_out_of_range_or_without_effect_are_errors(exchanges: bool | None, options: Any, message: str) -> None:
    for either in (True, False) if exchanges is None else (exchanges,):
        with pytest.raises(ConfigError) as raised:
            BalanceConfig(**{"cost": one_per_sample, **options}).check(exchanges=either)
        assert str(raised.value).startswith(message)


def test_ranks_compare_the_options_that_decide_on_batches() -> None:
    plain = BalanceConfig(cost=one_per_sample)
    per_rank = BalanceConfig(cost=one_per_sample, on_step=print, log_every=5, log_window=(0, 3), log_loads=True)
    common = {"window", "pack", "cost", "strategy", "tolerance", "max_tokens_per_rank", "on_overflow"}
    common |= {"compare_every", "refit_every"}
    for exchanges, own in ((True, {"exchange", "lookahead", "batch_size"}), (False, set[str]())):
        compared = plain.rank_invariants(exchanges=exchanges)
        assert compared.keys() == common | own
        assert compared["cost"] == "one_per_sample"
        assert per_rank.rank_invariants(exchanges=exchanges) == compared


def test_nobody_observes_steps_on_a_rank_whose_timer_takes_none() -> None:
    for timer, is_observed in ((StepTimer(), False), (StepTimer(print), True)):
        config = BalanceConfig(cost=one_per_sample, on_step=timer)
        assert (config.observer(1, exchanges=True, data=dict) is not None) == is_observed
        with_log = BalanceConfig(cost=one_per_sample, on_step=timer, log_every=5)
        assert with_log.observer(0, exchanges=True, data=dict) is not None


def test_one_step_in_so_many_stays_unbalanced() -> None:
    config = BalanceConfig(cost=one_per_sample, strategy="min-move", compare_every=3)
    config.check(exchanges=True)
    unbalanced = [[step for step in range(9) if not config.balances(epoch, step)] for epoch in range(3)]
    assert unbalanced == [[1, 4, 7], [0, 3, 6], [2, 5, 8]]
    assert [config.balances(0, step) for step in (1, 2)] == [False, True]
    assert all(BalanceConfig(cost=one_per_sample).balances(0, step) for step in range(9))


LINEAR = {"name": "linear", "interleave_actions": False}


def test_a_config_is_made_from_the_options_in_a_file(tmp_path: Path) -> None:
    shape: Any = {"hidden": 8, "heads": 1, "head_dim": 8, "layers": 2}
    options = {
        "cost": {"name": "hstu", "interleave_actions": True, "contextual": ["user_id"], **shape},
        "strategy": "min-move",
        "tolerance": 0,
        "max_tokens_per_rank": 10,
        "timeout": 2.5,
        "log_every": 1,
        "log_window": [0, 9],
    }
    given = dict(options)
    cost = HSTUCost(interleave_actions=True, contextual=("user_id",), **shape)
    others: Any = {
        "strategy": "min-move",
        "tolerance": 0,
        "max_tokens_per_rank": 10,
        "log_every": 1,
        "log_window": (0, 9),
    }
    assert BalanceConfig.from_dict(options) == BalanceConfig(cost=cost, timeout=timedelta(seconds=2.5), **others)
    assert options == given
    assert BalanceConfig.from_dict({"cost": {"name": "padded", "row": LINEAR}}).cost == PADDED
    assert BalanceConfig.from_dict({"cost": one_per_sample, "window": 2}).cost is one_per_sample
    measured = MeasuredCost(
        interleave_actions=True, linear=1, quadratic=1, fraction_bits=1, seconds_per_step=0.5, steps=20, r2=0.9
    )
    measured.save(tmp_path / "cost.json")
    assert BalanceConfig.from_dict({"cost": {"name": "measured", "path": f"{tmp_path}/cost.json"}}).cost == measured


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "BalanceConfig: missing a required argument: 'cost'; its settings are cost, strategy, tolerance, max_"),
        ({"cost": LINEAR, "windows": 2}, "BalanceConfig has the unknown key 'windows'; did you mean window"),
        ({"cost": LINEAR, "window": "2"}, "BalanceConfig: window must be of type int, got '2'"),
        ({"cost": LINEAR, "window": True}, "BalanceConfig: window must be of type int, got True"),
        ({"cost": LINEAR, "tolerance": "1"}, "BalanceConfig: tolerance must be of type float, got '1'"),
        ({"cost": LINEAR, "batch_size": 1.5}, "BalanceConfig: batch_size must be of type int | None, got 1.5"),
        ({"cost": LINEAR, "strategy": ["none"]}, "BalanceConfig: strategy must be of type str, got ['none']"),
        (
            {"cost": LINEAR, "on_overflow": "skip"},
            "BalanceConfig: on_overflow must be one of raise, warn, got 'skip'",
        ),
        ({"cost": LINEAR, "timeout": "1h"}, "BalanceConfig: timeout must be of type timedelta, got '1h'"),
        ({"cost": LINEAR, "timeout": float("inf")}, "BalanceConfig: timeout must be of type timedelta, got i"),
        ({"cost": LINEAR, "log_window": [1, 2, 3]}, "BalanceConfig: log_window must be of type tuple[int, int] | None"),
        ({"cost": LINEAR, "log_window": [1, "2"]}, "BalanceConfig: log_window must be of type tuple[int, int] | None"),
        ({"cost": LINEAR, "on_step": 3}, "BalanceConfig: on_step must be of type Callable[["),
        ({"cost": "mine"}, "no cost is called 'mine'; known are hstu, self-attention, linear, padded, measured"),
        ({"cost": 7}, "no cost is called 7; known are hstu, self-attention, linear, padded, measured"),
        ({"cost": {"hidden": 8}}, "no cost is called None; known are hstu, self-attention, linear, padded, measured"),
        ({"cost": "linear"}, "the cost 'linear': missing a required argument: 'interleave_actions'; its settings are"),
        (
            {"cost": LINEAR | {"wide": 1}},
            "the cost 'linear' has the unknown key 'wide'; known keys are interleave_actions, ",
        ),
        ({"cost": LINEAR | {"max_tokens": 1.5}}, "the cost 'linear': max_tokens must be of type int, got 1.5"),
        ({"cost": LINEAR | {"max_tokens": 0}}, "the cost 'linear': max_tokens must be at least 1, got 0"),
        ({"cost": LINEAR | {"contextual": ["a", 1]}}, "the cost 'linear': contextual must be of type tuple[str, ...]"),
        (
            {"cost": {"name": "padded", "row": "linear"}},
            "the cost 'padded': row must be of type TokenCost, got 'linear'",
        ),
        ({"cost": {"name": "ones", "power": 2}}, "the cost 'ones' is a function, without settings; leave out power"),
    ],
)
def test_wrong_options_are_errors_of_one_line(options: Any, message: str) -> None:
    with restored(COSTS):
        register_cost("ones")(one_per_sample)
        with pytest.raises(ConfigError) as raised:
            BalanceConfig.from_dict(options)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
