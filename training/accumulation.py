"""Gradient accumulation: what the losses of several steps are divided by, if one optimizer step trains them all.

The mean of the steps' means would weigh the tokens of a step with few of them more. So each loss is divided by the loss
tokens of all ranks over all steps, which are known once the last of their batches is: the batches are pulled first.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.control.consistency import gather_checked
from evenrank.dataloader.balance.control.process_group import Group, process_group_of
from evenrank.dataloader.batch import JaggedBatch

Batch = TypeVar("Batch", bound=JaggedBatch)


def accumulate(
    batches: Iterable[Batch],
    num_steps: int,
    *,
    task_tokens: Callable[[Batch], Tensor] | None = None,
    group: Group | None = None,
) -> Iterator[list[Batch]]:
    """Yield the batches of each optimizer step, for which `scale_loss` then divides by the loss tokens of all of them.

        for batches in accumulate(balancer, 4):
            for batch in batches:
                is_last = batch is batches[-1]
                with contextlib.nullcontext() if is_last else model.no_sync():  # of DistributedDataParallel
                    scale_loss(model(batch), batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    The device holds the batches of one optimizer step at a time: integers, which need little memory next to the
    activations of one of them. Nothing is pulled before the next optimizer step is asked for, so `state_dict()` of the
    Balancer is the position after the one handed out last. The last one of an epoch may have fewer batches.

    Where tasks have loss tokens of their own, because labels of some are missing, `task_tokens` counts them; also
    without accumulation, with `num_steps=1`. Then each optimizer step begins with an all-reduce of one number per task,
    on the device, without a synchronization. A training pipeline, which steps the optimizer itself, takes
    `itertools.chain.from_iterable(accumulate(balancer, 1, task_tokens=...))`.

    Args:
        batches: of this rank, from a Balancer.
        num_steps: batches of an optimizer step, at least 1; the same on all ranks.
        task_tokens: returns the loss tokens of each task in this rank's batch: integers [tasks] on the device that
            trains, equally many on all ranks. It must not synchronize: `(batch.targets >= 0).sum(dim=0)`, where
            missing ones and the fill of padding rows are negative. None: each loss token counts for all tasks.
        group: the data-parallel ranks over which they are counted, those of the Balancer; None: the default process
            group or, without one, this process alone.

    Returns:
        An iterator over lists of 1 to `num_steps` batches, which differ from those given in `world_loss_tokens` and
        `world_task_tokens`. Iterating is collective: every rank of the group must do it.

    Raises:
        ConfigError: `num_steps` is below 1, this process is not a rank of the group, batches are not from a Balancer,
            or `task_tokens` returns something else.
        RankError: `num_steps`, or the tasks that are counted, differ between ranks; while iterating, on every rank.

    """
    if num_steps < 1:
        raise ConfigError(f"num_steps must be at least 1, got {num_steps}")
    return _optimizer_steps(batches, num_steps, task_tokens, process_group_of(group))


def _optimizer_steps(
    batches: Iterable[Batch],
    num_steps: int,
    task_tokens: Callable[[Batch], Tensor] | None,
    group: dist.ProcessGroup | None,
) -> Iterator[list[Batch]]:
    # A rank that pulls another number of batches waits in the Balancer for the others, and they for its gradients.
    settings = {"num_steps": num_steps, "task_tokens": "None" if task_tokens is None else "given"}
    gather_checked(settings, None, group)
    is_first = True
    iterator = iter(batches)
    while pulled := list(islice(iterator, num_steps)):
        world_loss_tokens = 0
        for batch in pulled:
            if batch.world_loss_tokens is None:
                raise ConfigError("a batch has no world_loss_tokens; pass a Balancer instead of the loader")
            world_loss_tokens += batch.world_loss_tokens
        counts = None
        if task_tokens is not None:
            counts = torch.stack([_counted(task_tokens(batch)) for batch in pulled]).sum(dim=0)
            if is_first:
                gather_checked({"the shape of task_tokens": list(counts.shape)}, None, group)
                is_first = False
            if group is not None:
                dist.all_reduce(counts, group=group)
        yield [batch.replace(world_loss_tokens=world_loss_tokens, world_task_tokens=counts) for batch in pulled]


def _counted(tokens: Any) -> Tensor:
    if isinstance(tokens, Tensor) and tokens.dim() == 1 and not tokens.is_floating_point():
        return tokens
    got = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
    raise ConfigError(f"task_tokens must return integers [tasks], got {got}; add up booleans over the samples")
