"""Scaling of the loss that gives balanced training the gradient of unbalanced training."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.ranks.consistency import gather_checked
from evenrank.dataloader.balance.ranks.process_group import Group, process_group_of
from evenrank.dataloader.batches.batch import JaggedBatch


def scale_loss(loss_sums: Tensor, batch: JaggedBatch, *, dp_size: int | None = None) -> Tensor:
    """Scale a rank's sums of losses to its share of the step's mean losses.

    The loss of a step is the sum over the loss tokens of all ranks, divided by their number. DDP, FSDP and TorchRec
    average gradients over `dp_size` ranks, so a rank's share is loss_sums * dp_size / (loss tokens of all ranks). The
    batch carries the divisor: the loss tokens of the step or, behind `accumulate`, of all steps that are accumulated,
    and those of each task where tasks have different ones.

    A rank may have no sample in the last step of an epoch. Its loss must still depend on all parameters, or DDP waits
    for their gradients. A sum over zero rows of the model's output does so if the model runs on the padded batch.

    It never synchronizes with a GPU. It may be called in the forward of a model that torch.fx traces, as TorchRec's
    training pipelines do: it is one node of the graph.

    Args:
        loss_sums: of one task, a scalar, or of several, [tasks]: the sums (not the means) of the loss over this rank's
            loss tokens.
        batch: the batch that they were computed on, from a Balancer.
        dp_size: the number of data-parallel ranks whose gradients are averaged; None: the ranks of the Balancer's
            group.

    Returns:
        As many losses, on which to call `backward` after adding them up; zero for tasks of which no rank has loss
        tokens.

    Raises:
        ConfigError: `loss_sums` is no tensor, or the batch does not know the number of loss tokens of all ranks, as it
            is not from a Balancer, or it knows those of other tasks.

    """
    # While torch.fx traces, both are proxies, whose values cannot be looked at. `torch.fx.wrap` would not do here: it
    # applies to modules imported before tracing starts, and this one is imported at its first use.
    if has_torch_function((loss_sums, batch)):
        scaled: Tensor = handle_torch_function(scale_loss, (loss_sums, batch), loss_sums, batch, dp_size=dp_size)
        return scaled
    if not isinstance(loss_sums, Tensor):
        raise ConfigError(f"loss_sums must be a tensor, got {type(loss_sums).__name__}; pass the sums alone")
    if batch.world_loss_tokens is None:
        raise ConfigError("the batch has no world_loss_tokens; iterate over a Balancer instead of the loader")
    if dp_size is None:
        dp_size = batch.dp_size
    if dp_size is None:
        raise ConfigError("the batch has no dp_size; iterate over a Balancer, or pass dp_size to scale_loss")
    tokens = batch.world_task_tokens
    if tokens is not None:
        if loss_sums.shape != tokens.shape:
            raise ConfigError(
                f"loss_sums has the shape {list(loss_sums.shape)}, but the loss tokens of {len(tokens)} tasks were "
                "counted; pass one sum per task"
            )
        return loss_sums * (tokens > 0) * dp_size / tokens.clamp(min=1)
    if batch.world_loss_tokens == 0:
        return loss_sums * 0.0
    return loss_sums * (dp_size / batch.world_loss_tokens)


# Labels of several binary tasks, packed into one integer.


def label_bits(labels: Tensor, num_tasks: int) -> Tensor:
    """Unpack labels into one binary label per task.

    Args:
        labels: int64 [n]; task t is bit t, as in the actions of KuaiRand (is_click 1, is_like 2, is_follow 4, ...).
        num_tasks: how many of the low bits are tasks, 1 to 31.

    Returns:
        float32 [n, num_tasks] of 0 and 1, on the device of the labels; a target for
        `binary_cross_entropy_with_logits`.

    """
    tasks = torch.arange(num_tasks, device=labels.device)
    return (labels.unsqueeze(-1) >> tasks).bitwise_and(1).float()


# Gradient accumulation: what the losses of several steps are divided by, if one optimizer step trains them all.
#
# The mean of the steps' means would weigh the tokens of a step with few of them more. So each loss is divided by the
# loss
# tokens of all ranks over all steps, which are known once the last of their batches is: the batches are pulled first.


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
