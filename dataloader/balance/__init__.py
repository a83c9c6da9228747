"""Who trains what in each step, and getting it there."""

from evenrank.dataloader.balance.balancer import Balancer, Handle
from evenrank.dataloader.balance.cost import Cost, HSTUCost, SelfAttentionCost
from evenrank.dataloader.balance.measured_cost import MeasuredCost
from evenrank.dataloader.balance.metrics import MetricsSummary, StepMetrics, summarize
from evenrank.dataloader.balance.partition.strategies import (
    STRATEGIES,
    Assignment,
    TokenLimitWarning,
    lower_bound,
    partition,
)

__all__ = [
    "STRATEGIES",
    "Assignment",
    "Balancer",
    "Cost",
    "HSTUCost",
    "Handle",
    "MeasuredCost",
    "MetricsSummary",
    "SelfAttentionCost",
    "StepMetrics",
    "TokenLimitWarning",
    "lower_bound",
    "partition",
    "summarize",
]
