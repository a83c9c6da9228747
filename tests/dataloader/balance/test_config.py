from datetime import timedelta
from pathlib import Path
from typing import Any

from evenrank.dataloader.balance import BalanceConfig, HSTUCost, LinearCost, MeasuredCost, PaddedCost
from evenrank.training import StepTimer
from tests.dataloader.balance.costs import one_per_sample


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
        assert (with_log.observer(1, exchanges=True, data=dict) is not None) == is_observed


def test_a_config_is_made_from_the_options_in_a_file(tmp_path: Path) -> None:
    shape: Any = {"hidden": 8, "heads": 1, "head_dim": 8, "layers": 2}
    others: Any = {"strategy": "min-move", "tolerance": 0, "max_tokens_per_rank": 10, "log_every": 1}
    cost = {"name": "hstu", "interleave_actions": True, "contextual": ["user_id"], **shape}
    options = {"cost": cost, "timeout": 2.5, "log_window": [0, 9], **others}
    given = dict(options)
    expected = HSTUCost(interleave_actions=True, contextual=("user_id",), **shape)
    others |= {"timeout": timedelta(seconds=2.5), "log_window": (0, 9)}
    assert BalanceConfig.from_dict(options) == BalanceConfig(cost=expected, **others)
    assert options == given
    padded = {"name": "padded", "row": {"name": "linear", "interleave_actions": False}}
    assert BalanceConfig.from_dict({"cost": padded}).cost == PaddedCost(LinearCost(interleave_actions=False))
    assert BalanceConfig.from_dict({"cost": one_per_sample, "window": 2}).cost is one_per_sample
    measured = MeasuredCost(
        interleave_actions=True, linear=1, quadratic=1, fraction_bits=1, seconds_per_step=0.5, steps=20, r2=0.9
    )
    measured.save(tmp_path / "cost.json")
    assert BalanceConfig.from_dict({"cost": {"name": "measured", "path": f"{tmp_path}/cost.json"}}).cost == measured
