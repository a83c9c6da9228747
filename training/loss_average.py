"""Averages of losses for the log: added up on the device, over ranks only when they are asked for."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from evenrank.core.errors import ConfigError, RankError
from evenrank.dataloader.balance.ranks.consistency import gather_checked
from evenrank.dataloader.balance.ranks.process_group import Group, process_group_of
from evenrank.dataloader.batches.batch import JaggedBatch

# Squares of numbers of so many bits are added up exactly in float64, over 32,768 ranks.
_COMPARED_BITS = 19


class LossAverage:
    """The mean loss per loss token of each task, over all data-parallel ranks and any number of steps.

        average = LossAverage(num_tasks, group=mesh["dp"], device=device)
        for step, batch in enumerate(balancer):
            loss_sums = model(batch)
            average.update(loss_sums, batch)
            ...
            if step % 100 == 99:
                print(average.compute())
                average.reset()

    Sums and counts are those of this rank's own samples, so a step may also be one of several that are accumulated, and
    ranks may have different numbers of steps, or none. Peers in tensor parallelism, which have equal losses, are in
    different groups, each of which counts every sample once.

    Where each rank plans its steps alone (`build_loader(balance=...)`), `compute` also compares these plans, if all
    ranks have added the same steps.

    Collective: every rank of the group must call the constructor.

    Args:
        num_tasks: entries of the loss sums.
        group: the data-parallel ranks, as a process group or a device mesh of one dimension such as `mesh["dp"]`; None:
            the default process group or, without one, this process alone.
        device: where losses are added up; over NCCL, this rank's GPU.

    Raises:
        ConfigError: `num_tasks` is below 1, or this process is not a rank of the group.
        RankError: `num_tasks` differs between ranks.

    """

    def __init__(self, num_tasks: int = 1, *, group: Group | None = None, device: torch.device | str = "cpu") -> None:
        if num_tasks < 1:
            raise ConfigError(f"num_tasks must be at least 1, got {num_tasks}")
        self._group = process_group_of(group)
        gather_checked({"num_tasks": num_tasks}, None, self._group)
        # Sums, then loss tokens. In float64, which adds up 2^53 tokens exactly.
        self._totals = torch.zeros(2, num_tasks, dtype=torch.float64, device=device)
        self._steps = 0  # sum of hashes of which steps they are, of those that this rank has planned alone
        self._plans = 0  # sum of hashes of their plans

    def reset(self) -> None:
        """Start over."""
        self._totals.zero_()
        self._steps = self._plans = 0

    @torch.no_grad()
    def update(self, loss_sums: Tensor, batch: JaggedBatch, *, task_tokens: Tensor | None = None) -> None:
        """Add this rank's losses in a step, without a synchronization.

        Args:
            loss_sums: [tasks], or a scalar if there is one task: what `scale_loss` is given, not what it returns.
            batch: the batch that they were computed on.
            task_tokens: [tasks], this rank's loss tokens of each task; None: each of the batch's counts for all tasks.

        Raises:
            ConfigError: there are other numbers of tasks, or the losses are on another kind of device.

        """
        sums = loss_sums.reshape(-1)
        num_tasks = self._totals.shape[1]
        for name, values in (("loss_sums", sums), ("task_tokens", task_tokens)):
            if values is not None and values.shape != (num_tasks,):
                raise ConfigError(f"{name} must have one entry per task, {num_tasks}, got {list(values.shape)}")
        if sums.device.type != self._totals.device.type:
            raise ConfigError(
                f"loss_sums are on {sums.device}, but added up on {self._totals.device}; pass its device="
            )
        self._totals[0] += sums
        self._totals[1] += batch.loss_tokens if task_tokens is None else task_tokens
        if batch.plan_hash is not None:
            self._steps += hash((batch.epoch, batch.position))
            self._plans += batch.plan_hash >> (63 - _COMPARED_BITS)  # the upper bits depend on all samples

    @torch.no_grad()
    def compute(self) -> list[float]:
        """Return the mean loss of each task since the last `reset`: the same on every rank.

        It is NaN for a task without loss tokens. It synchronizes with the device.

        Collective: every rank must call this, also without samples.

        Raises:
            RankError: ranks have planned these steps differently; on every rank.

        """
        totals = self._totals.clone()
        if self._group is not None:
            own = [value % (1 << _COMPARED_BITS) for value in (self._steps, self._plans)]
            compared = totals.new_tensor([own, [value * value for value in own]])
            flat = torch.cat([totals.flatten(), compared.flatten()])
            dist.all_reduce(flat, group=self._group)
            totals, (sums, squares) = flat[:-4].view_as(totals), flat[-4:].view(2, 2).tolist()
            # Values are all equal if and only if the mean of their squares is the square of their mean.
            has_same_steps, has_equal_plans = (
                self._group.size() * int(square) == int(total) ** 2 for total, square in zip(sums, squares, strict=True)
            )
            if has_same_steps and not has_equal_plans:
                raise RankError(
                    "ranks have planned the steps of this average differently: samples were left out or trained twice; "
                    "make the cost and the strategy return the same on all ranks, or use a Balancer, which gathers "
                    "costs, and resume from an earlier checkpoint with new loaders"
                )
        return [total / tokens if tokens else math.nan for total, tokens in zip(*totals.tolist(), strict=True)]
