"""Balanced batches: assign the samples of a step to ranks, and move them there.

Start at `balancer.py`. A step's lengths become costs (`costs/`), ranks all-gather them (`ranks/`), every rank
computes the same assignment (`partition/`), and one collective moves the samples (`exchange/`). Where every rank can
read every sample, nothing moves (`dataloader/sampling/balanced_steps.py`).
"""

import importlib
from typing import TYPE_CHECKING, Any

from evenrank.core.optional_imports import naming_extras
from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.costs.cost import COSTS, Cost, register_cost
from evenrank.dataloader.balance.costs.measured_cost import MeasuredCost
from evenrank.dataloader.balance.costs.model_costs import HSTUCost, LinearCost, PaddedCost, SelfAttentionCost
from evenrank.dataloader.balance.metrics.step_metrics import MetricsSummary, StepMetrics, summarize
from evenrank.dataloader.balance.partition.strategies import (
    STRATEGIES,
    Assignment,
    PartitionProblem,
    TokenLimitWarning,
    lower_bound,
    partition,
    register_strategy,
)

if TYPE_CHECKING:
    from evenrank.dataloader.balance.balancer import Balancer
    from evenrank.dataloader.balance.exchange.exchange import Handle

__all__ = [
    "COSTS",
    "STRATEGIES",
    "Assignment",
    "BalanceConfig",
    "Balancer",
    "Cost",
    "HSTUCost",
    "Handle",
    "LinearCost",
    "MeasuredCost",
    "MetricsSummary",
    "PaddedCost",
    "PartitionProblem",
    "SelfAttentionCost",
    "StepMetrics",
    "TokenLimitWarning",
    "lower_bound",
    "partition",
    "register_cost",
    "register_strategy",
    "summarize",
]


def __getattr__(name: str) -> Any:
    # Imported when they are used: they need torch, which takes seconds to import, and planning and costs do without.
    if (module := {"Balancer": "balancer", "Handle": "exchange.exchange"}.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with naming_extras():
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
