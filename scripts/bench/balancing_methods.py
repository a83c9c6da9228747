"""Which samples share a step, and which rank trains them: as other projects decide it, and as evenrank does.

The methods of other projects follow their documented behaviour; docs/results/comparison.md says whose each one is. All
methods get the same samples in the same random order, W * B to a step:

    random               each rank takes the next B samples
    length-groups        50 B samples at a time are sorted by length; each rank takes the next B of them
    length-groups-strided    the same, but rank r takes the samples r, r + W, r + 2 W ... of a step
    contiguous           the samples of a step, sorted by length, are cut into W groups of about equal padded cost
    kk-tokens            Karmarkar-Karp with B samples per rank, on tokens
    kk-7b                the same on 24576 s + s^2 for s tokens, the cost of a language model that is 4,096 wide
    kk-per-head          the same on a cost whose attention counts 2 * heads times: not causal, each head at full width
    kk-cost              the same on the cost of the model that is trained
    lpt-swap, min-move   strategies of evenrank, on that cost
    window-8             lpt-swap after the samples of 8 steps were assigned to these, on that cost
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance import HSTUCost, SelfAttentionCost
from evenrank.dataloader.balance.config import PartitionSettings
from evenrank.dataloader.balance.partition.strategies import partition
from evenrank.dataloader.balance.step_windows import assign_to_steps

Ints = NDArray[np.int64]
BATCHES_PER_GROUP = 50
WINDOW = 8
_QUADRATIC = 0.001  # of a padded token's cost, per token of its row
_BISECTIONS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What is trained."""

    cost: HSTUCost | SelfAttentionCost
    """Of a sample."""
    projections: int
    """Operations of a layer's projections for a token in the forward pass, over its width squared."""

    def tokens(self, lengths: Ints) -> Ints:
        """Return the tokens of samples with so many events: int64 [n]."""
        return lengths * (2 if self.cost.interleave_actions else 1)

    def costs(self, lengths: Ints) -> Ints:
        """Return the costs of samples with so many events: int64 [n]."""
        return self.cost.of_tokens(self.tokens(lengths), np.zeros_like(lengths))

    def costs_per_head(self, lengths: Ints) -> Ints:
        """Return costs whose attention counts 2 * heads times as much: int64 [n]."""
        tokens, width = self.tokens(lengths), self.cost.heads * self.cost.head_dim
        return self.projections * tokens * width**2 + 4 * self.cost.heads * tokens**2 * width


MODELS = {
    "hstu": Model(cost=HSTUCost(hidden=1024, heads=4, head_dim=256, layers=8, interleave_actions=True), projections=10),
    "attention": Model(
        cost=SelfAttentionCost(hidden=256, heads=4, head_dim=64, layers=4, ffn_multiplier=4), projections=24
    ),
}


class Epoch(NamedTuple):
    """What a method assigns."""

    lengths: Ints
    """[S * W * B]: events of the samples, in a random order."""
    model: Model
    """That trains them."""
    world_size: int
    """W."""
    batch_size: int
    """B."""

    @property
    def samples(self) -> Ints:
        """The samples in their order, step by step: int64 [S, W * B]."""
        return np.arange(len(self.lengths)).reshape(-1, self.world_size * self.batch_size)


class Plan(NamedTuple):
    """What a method decides."""

    samples: Ints
    """[S, W * B]: which samples share a step."""
    rank_of: NDArray[np.int32]
    """[S, W * B]: the rank that trains each of them."""


def home(epoch: Epoch) -> NDArray[np.int32]:
    """Return the rank that loads each sample of a step if nothing is balanced: int32 [W * B]."""
    return np.repeat(np.arange(epoch.world_size, dtype=np.int32), epoch.batch_size)


def take_next(epoch: Epoch) -> Plan:
    """Each rank takes the next B samples."""
    return Plan(epoch.samples, np.broadcast_to(home(epoch), epoch.samples.shape))


def group_by_length(epoch: Epoch) -> Ints:
    """Return the samples sorted by descending length within groups of 50 B, the longest of all first: int64 [n]."""
    num_samples, batch_size = len(epoch.lengths), epoch.batch_size
    group_size = batch_size * max(min(num_samples // (4 * batch_size), BATCHES_PER_GROUP), 1)
    group = np.arange(num_samples) // group_size
    grouped = np.lexsort((-epoch.lengths, group))
    firsts = np.arange(0, num_samples, group_size)
    longest = firsts[np.argmax(epoch.lengths[grouped[firsts]])]
    grouped[[0, longest]] = grouped[[longest, 0]]
    return grouped


def length_groups(epoch: Epoch) -> Plan:
    """Each rank takes the next B samples of a group, so ranks of a step have samples of other lengths."""
    samples = group_by_length(epoch).reshape(epoch.samples.shape)
    return Plan(samples, np.broadcast_to(home(epoch), samples.shape))


def length_groups_strided(epoch: Epoch) -> Plan:
    """The W next samples of a group go to W ranks, so ranks of a step have samples of about the same lengths."""
    samples = group_by_length(epoch).reshape(epoch.samples.shape)
    ranks = np.tile(np.arange(epoch.world_size, dtype=np.int32), epoch.batch_size)
    return Plan(samples, np.broadcast_to(ranks, samples.shape))


def padded_cost(count: int, longest: int) -> float:
    """Return the cost of so many samples, padded to the longest."""
    return count * (longest + _QUADRATIC * longest**2)


def cut_evenly(lengths: list[int], num_groups: int) -> list[int]:
    """Cut samples into groups, so that the padded cost of the costliest one is as small as can be.

    Args:
        lengths: of the samples, descending; at least as many as groups.
        num_groups: how many groups, of at least one sample each.

    Returns:
        How many samples each group has.

    """

    def cut(limit: float) -> list[int] | None:
        """Fill the groups up to a cost; return their numbers of samples, or None if samples are left."""
        counts, start = [], 0
        for groups_left in range(num_groups - 1, -1, -1):
            room = min(int(limit / padded_cost(1, lengths[start])), len(lengths) - start - groups_left)
            if room < 1:
                return None
            counts.append(room)
            start += room
        return counts if start == len(lengths) else None

    low, high = 0.0, padded_cost(len(lengths), lengths[0])
    best = cut(high)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if counts := cut(middle):
            best, high = counts, middle
        else:
            low = middle
    assert best is not None
    return best


def contiguous(epoch: Epoch) -> Plan:
    """The samples of a step, sorted by length, are cut into W groups: few long ones, or many short ones."""
    samples, rank_of = epoch.samples.copy(), np.empty(epoch.samples.shape, dtype=np.int32)
    ranks = np.arange(epoch.world_size, dtype=np.int32)
    for step, of_step in enumerate(epoch.samples):
        samples[step] = of_step[np.argsort(-epoch.lengths[of_step], kind="stable")]
        rank_of[step] = np.repeat(ranks, cut_evenly(epoch.lengths[samples[step]].tolist(), epoch.world_size))
    return Plan(samples, rank_of)


def partitioned(epoch: Epoch, strategy: str, costs: Ints, samples: Ints | None = None) -> Plan:
    """Each step is partitioned over the ranks; Karmarkar-Karp does not care which part a rank gets, ours do."""
    samples = epoch.samples if samples is None else samples
    rank_of = np.empty(samples.shape, dtype=np.int32)
    for step, of_step in enumerate(samples):
        tokens = None if strategy == "karmarkar-karp" else epoch.lengths[of_step]
        tolerance = 0.01 if strategy == "min-move" else 0.001
        assignment = partition(costs[of_step], epoch.world_size, strategy=strategy, tokens=tokens, tolerance=tolerance)
        rank_of[step] = assignment.rank_of.reshape(-1)
    return Plan(samples, rank_of)


def windowed(epoch: Epoch) -> Plan:
    """The samples of 8 steps are assigned to these steps first."""
    costs = epoch.model.costs(epoch.lengths)
    samples = epoch.samples.copy()
    for first in range(0, len(samples), WINDOW):
        of_window = epoch.samples[first : first + WINDOW]
        indices = assign_to_steps(
            costs[of_window.reshape(-1)],
            epoch.lengths[of_window.reshape(-1)],
            num_steps=len(of_window),
            world_size=epoch.world_size,
            settings=PartitionSettings(),
            seed=first,
            epoch=0,
        )
        samples[first : first + WINDOW] = of_window.reshape(-1)[indices].reshape(of_window.shape)
    return partitioned(epoch, "lpt-swap", costs, samples)


def _tokens_of_7b(epoch: Epoch) -> Ints:
    tokens = epoch.model.tokens(epoch.lengths)
    return 24576 * tokens + tokens**2


METHODS: dict[str, Callable[[Epoch], Plan]] = {
    "random": take_next,
    "length-groups": length_groups,
    "length-groups-strided": length_groups_strided,
    "contiguous": contiguous,
    "kk-tokens": lambda epoch: partitioned(epoch, "karmarkar-karp", epoch.lengths),
    "kk-7b": lambda epoch: partitioned(epoch, "karmarkar-karp", _tokens_of_7b(epoch)),
    "kk-per-head": lambda epoch: partitioned(epoch, "karmarkar-karp", epoch.model.costs_per_head(epoch.lengths)),
    "kk-cost": lambda epoch: partitioned(epoch, "karmarkar-karp", epoch.model.costs(epoch.lengths)),
    "lpt-swap": lambda epoch: partitioned(epoch, "lpt-swap", epoch.model.costs(epoch.lengths)),
    "min-move": lambda epoch: partitioned(epoch, "min-move", epoch.model.costs(epoch.lengths)),
    f"window-{WINDOW}": windowed,
}
# These assign samples that ranks have loaded. The others decide before that, and each rank loads what it trains.
AFTER_LOADING = frozenset({"random", "kk-tokens", "kk-7b", "kk-per-head", "kk-cost", "lpt-swap", "min-move"})
