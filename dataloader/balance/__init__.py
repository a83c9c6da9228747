"""Who trains what in each step, and getting it there."""

from evenrank.dataloader.balance.balancer import Balancer, Handle
from evenrank.dataloader.balance.cost import Cost, HSTUCost
from evenrank.dataloader.balance.metrics import EpochSummary, StepMetrics, summarize
from evenrank.dataloader.balance.partition import STRATEGIES, Assignment, lower_bound, partition

__all__ = [
    "STRATEGIES",
    "Assignment",
    "Balancer",
    "Cost",
    "EpochSummary",
    "HSTUCost",
    "Handle",
    "StepMetrics",
    "lower_bound",
    "partition",
    "summarize",
]
