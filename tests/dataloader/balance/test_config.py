from typing import Any

import pytest

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import BalanceConfig, LinearCost, PaddedCost
from tests.dataloader.balance.costs import one_per_sample

WINDOW = "log_window must be (start, stop) with 0 <= start < stop"
COMPARE = "compare_every must be an integer of at least 2, without window and max_tokens_per_rank, which change which "
COMPARE += "samples a step has or may have"
PADDED = PaddedCost(LinearCost(interleave_actions=False))
PACK: dict[str, Any] = {"pack": True, "max_tokens_per_rank": 10}


# Whether the options are of a Balancer; None: of either.
@pytest.mark.parametrize(
    ("exchanges", "options", "message"),
    [
        (None, {"strategy": "best"}, "no strategy is called 'best'; known are none, karmarkar-karp, lpt-swap, min"),
        (None, {"tolerance": -0.1}, "tolerance must be at least 0 and below 1, got -0.1"),
        (None, {"max_tokens_per_rank": 0}, "max_tokens_per_rank must be at least 1, got 0"),
        (None, {"on_overflow": "ignore"}, "on_overflow must be one of raise, warn, got 'ignore'"),
        (None, {"log_every": -2}, "log_every must be at least 1, got -2"),
        (None, {"log_every": 1, "log_window": (5, 5)}, f"{WINDOW}, got (5, 5)"),
        (None, {"log_every": 1, "log_window": (-1, 5)}, f"{WINDOW}, got (-1, 5)"),
        (None, {"log_window": (2, 5)}, "log_window=(2, 5) needs log_every; log_every=1 logs each step"),
        (None, {"log_loads": True}, "log_loads=True needs log_every; log_every=1 logs each step"),
        (None, {"compare_every": 1}, f"{COMPARE}, got 1"),
        (None, {"compare_every": 2.0}, f"{COMPARE}, got 2.0"),
        (None, {"compare_every": 4, "max_tokens_per_rank": 9}, f"{COMPARE}, got 4"),
        (False, {"compare_every": 4, "window": 2}, f"{COMPARE}, got 4"),
        (None, {"cost": PADDED, "max_tokens_per_rank": 9}, "max_tokens_per_rank = 9 limits sums of tokens, but a Pad"),
        (True, {"exchange": "pigeon"}, "exchange must be one of all-to-all, all-gather, got 'pigeon'"),
        (True, {"lookahead": 0}, "lookahead must be at least 1, got 0"),
        (True, {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (True, {"window": 4}, "window=4 is an option of build_loader, not of Balancer; leave it out, or use build_l"),
        (True, PACK, "pack=True is an option of build_loader, not of Balancer; leave it out, or use build_loader"),
        (False, {"lookahead": 3}, "lookahead=3 is an option of Balancer, not of build_loader; leave it out, or use B"),
        (False, {"exchange": "all-gather"}, "exchange='all-gather' is an option of Balancer, not of build_loader"),
        (False, {"window": 0}, "window must be an integer of at least 1, got 0"),
        (False, {"window": 1.5}, "window must be an integer of at least 1, got 1.5"),
        (False, {"window": 2, "strategy": "none"}, "window=2 needs a strategy that assigns samples to ranks"),
        (False, PACK | {"strategy": "none"}, "pack=True needs a strategy that assigns samples to ranks, got 'none'"),
        (False, PACK | {"window": 2}, "pack=True decides which samples a step has; leave out window=2"),
        (False, {"pack": True}, "pack=True needs max_tokens_per_rank, the tokens that fit a rank, got None; pass it"),
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
    common = {"cost", "strategy", "tolerance", "max_tokens_per_rank", "on_overflow", "compare_every"}
    for exchanges, own in ((True, {"exchange", "lookahead", "batch_size"}), (False, {"window", "pack"})):
        compared = plain.rank_invariants(exchanges=exchanges)
        assert compared.keys() == common | own
        assert compared["cost"] == "one_per_sample"
        assert per_rank.rank_invariants(exchanges=exchanges) == compared


def test_one_step_in_so_many_stays_unbalanced() -> None:
    config = BalanceConfig(cost=one_per_sample, strategy="min-move", compare_every=3)
    config.check(exchanges=True)
    unbalanced = [[step for step in range(9) if not config.balances(epoch, step)] for epoch in range(3)]
    assert unbalanced == [[1, 4, 7], [0, 3, 6], [2, 5, 8]]
    assert [config.options_of_step(0, step)["strategy"] for step in (1, 2)] == ["none", "min-move"]
    assert all(BalanceConfig(cost=one_per_sample).balances(0, step) for step in range(9))
