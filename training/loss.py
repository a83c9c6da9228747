"""Losses of balanced training: scaling to the gradient of unbalanced training, accumulation, averages, labels, masks.

The loss of an optimizer step is the sum over the loss tokens of all ranks, divided by their number.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from evenrank.core.errors import ConfigError, RankError
from evenrank.core.rules import Count
from evenrank.core.settings import check_types
from evenrank.dataloader.balance.ranks.agree import compare_settings
from evenrank.dataloader.balance.ranks.connection import SCALING
from evenrank.dataloader.balance.ranks.process_group import Group, process_group_of
from evenrank.dataloader.batches.batch import JaggedBatch, SequenceBatch

# Squares of numbers of so many bits are added up exactly in float64, over 32,768 ranks.
_COMPARED_BITS = 19

Batch = TypeVar("Batch", bound=JaggedBatch)


def scale_loss(loss_sums: Tensor, batch: JaggedBatch, *, dp_size: int | None = None) -> Tensor:
    """Scale a rank's sums of losses to its share of the step's mean losses.

    DDP, FSDP and TorchRec average gradients over `dp_size` ranks, so a rank's share is loss_sums * dp_size / (loss
    tokens of all ranks). The batch carries the divisor: the loss tokens of the step or, behind `accumulate`, of all
    steps that are accumulated, and those of each task where tasks have different ones. Add up the result for
    `backward`; it is zero for tasks of which no rank has loss tokens.

    A rank may have no sample in the last step of an epoch. Its loss must still depend on all parameters, or DDP waits
    for their gradients. A sum over zero rows of the model's output does so if the model runs on the padded batch.

    It never synchronizes with a GPU. Where torch.fx traces, as in TorchRec's pipelines, it is one node of the graph.

    Args:
        loss_sums: a scalar for one task, [tasks] for several: the sums (not the means) of the loss over the loss tokens
            of this rank's batch.
        dp_size: number of data-parallel ranks whose gradients are averaged; None: the ranks that are balanced.

    Raises:
        ConfigError: the batch is not balanced, or has the loss tokens of other tasks.
    """
    # While torch.fx traces, both are proxies, whose values cannot be looked at. `torch.fx.wrap` would not do here: it
    # applies to modules imported before tracing starts, and this one is imported at its first use.
    if has_torch_function((loss_sums, batch)):
        scaled: Tensor = handle_torch_function(scale_loss, (loss_sums, batch), loss_sums, batch, dp_size=dp_size)
        return scaled
    if not isinstance(loss_sums, Tensor):
        raise ConfigError(f"loss_sums must be a tensor, got {type(loss_sums).__name__}; pass the sums alone")
    SCALING.scaled()
    if not (torch.compiler.is_compiling() or SCALING.is_sum) and loss_sums.requires_grad and batch.num_real > 1:
        SCALING.is_sum = True
        if _is_mean(loss_sums, batch.num_real):
            SCALING.warn("scale_loss was given the mean of losses, and divides them again; pass the sum of them")
    if batch.world_loss_tokens is None:
        raise ConfigError("the batch has no world_loss_tokens; pass balance to build_loader, or use a Balancer")
    if (dp_size := batch.dp_size if dp_size is None else dp_size) is None:
        raise ConfigError("the batch has no dp_size; balance the loader, or pass dp_size to scale_loss")
    tokens = batch.world_task_tokens
    if tokens is not None:
        if loss_sums.shape != tokens.shape:
            raise ConfigError(
                f"loss_sums has the shape {list(loss_sums.shape)}, but the loss tokens of {len(tokens)} tasks were "
                "counted; pass one sum per task"
            )
        scaled = loss_sums * (tokens > 0) * dp_size / tokens.where(tokens > 0, 1)
        return scaled.to(loss_sums.dtype)  # of float64 weights
    if batch.world_loss_tokens == 0:
        return loss_sums * 0.0
    return loss_sums * (dp_size / batch.world_loss_tokens)


def _is_mean(loss_sums: Tensor, num_samples: int) -> bool:
    """Return whether losses of that many samples were averaged last, as far as the graph tells, on any device."""
    node: Any = loss_sums.grad_fn
    while type(node).__name__.startswith(("View", "Reshape", "Squeeze", "Unsqueeze", "ToCopy")):
        node = node.next_functions[0][0]
    averaged = getattr(node, "_saved_self_sym_numel", 0) if type(node).__name__.startswith("MeanBackward") else 0
    return averaged >= num_samples * loss_sums.numel() or getattr(node, "_saved_reduction", 0) == 1


def label_bits(labels: Tensor, num_tasks: int) -> Tensor:
    """Unpack labels into float32 [n, num_tasks] of 0 and 1, a target for `binary_cross_entropy_with_logits`.

    Args:
        labels: int64 [n]; task t is bit t, as in the actions of KuaiRand (is_click 1, is_like 2, is_follow 4, ...).
        num_tasks: number of low bits that are tasks, 1 to 31.
    """
    tasks = torch.arange(num_tasks, device=labels.device)
    return (labels.unsqueeze(-1) >> tasks).bitwise_and(1).float()


def in_batch_mask(batch: SequenceBatch) -> Tensor:
    """Return for which targets (rows) which targets (columns) are negatives: bool [N, N].

    The N targets are the candidates or, in batches without labels, the items but the first of each row, in the order of
    `log_q["positive"]`. All are negatives of each other, except for a sample's own targets and items of its row in the
    batch. It takes 8 * batch_size * N bytes, and does not wait for a GPU.
    """
    history = batch.features["item_id"]
    items, lengths = history.values(), history.lengths().long()
    labels = None if batch.any_labels is None else batch.any_labels["label"]
    rows = torch.arange(len(lengths), device=items.device)
    targets = (lengths - 1).clamp(min=0) * (rows < batch.num_real) if labels is None else labels.lengths().long()
    num_targets = batch.loss_tokens if labels is None else len(labels.values())  # which may be more, see `known`
    row_of_target = torch.repeat_interleave(rows, targets, output_size=num_targets)
    from_end = targets.cumsum(0)[row_of_target] - torch.arange(num_targets, device=items.device)
    items = torch.searchsorted(items.sort().values, items)  # because ids of 63 bits leave no room for the row
    target_items = items[lengths.cumsum(0)[row_of_target] - from_end]
    # Pairs of an item, by its place in order, and a row that has it, as single numbers, sorted to be found.
    row_of_item = torch.repeat_interleave(rows, lengths, output_size=len(items))
    pairs = (items * len(rows) + row_of_item).sort().values
    asked = target_items * len(rows) + rows[:, None]  # [batch_size, N]
    found = torch.searchsorted(pairs, asked).clamp(max=max(len(pairs) - 1, 0))
    mask: Tensor = (pairs[found] != asked)[row_of_target]
    return mask


def accumulate(
    batches: Iterable[Batch],
    num_steps: Count,
    *,
    task_tokens: Callable[[Batch], Tensor] | None = None,
    group: Group | None = None,
) -> Iterator[list[Batch]]:
    """Yield the batches of each optimizer step; `scale_loss` then divides by the loss tokens of all of them.

        for batches in accumulate(loader, 4):
            for batch in batches:
                is_last = batch is batches[-1]
                with contextlib.nullcontext() if is_last else model.no_sync():  # of DistributedDataParallel
                    scale_loss(model(batch), batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    All batches of an optimizer step are pulled first, and held on the device: integers, small next to the activations
    of one of them. Nothing is pulled before the next optimizer step is asked for, so `state_dict()` of the loader is
    the position after the last one. The last optimizer step of an epoch may have fewer batches.

    Where labels of some tasks are missing, `task_tokens` counts the loss tokens of each task; also without
    accumulation, with `num_steps=1`. Each optimizer step then begins with an all-reduce of one number per task, without
    a synchronization. A training pipeline, which steps the optimizer itself, takes
    `itertools.chain.from_iterable(accumulate(loader, 1, task_tokens=...))`.

    Where loss tokens have weights, `task_tokens` returns their sums instead of counts, and the loss sums are weighted:

        accumulate(loader, 1, task_tokens=lambda batch: batch.weights.values().sum().view(1))
        loss_sums = (losses * batch.weights.values()).sum().view(1)

    The loss is then the weighted mean over all ranks, and the gradient that of one process.

    Iterating is collective: every rank of the group must do it.

    Args:
        num_steps: batches of an optimizer step, the same on all ranks.
        task_tokens: returns the loss tokens of each task in this rank's batch, or the sums of their weights: integers
            or floats [tasks] on the device that trains, equally many on all ranks. It must not synchronize:
            `(batch.ratings >= 0).sum(dim=0)`, where missing ones and the fill of padding rows are negative. None: each
            loss token counts for all tasks.
        group: the data-parallel ranks, as a process group or a device mesh of one dimension such as `mesh["dp"]`; None:
            the default process group or, without one, this process alone.

    Raises:
        ConfigError: batches are not balanced, or `task_tokens` returns something else.
        RankError: `num_steps` or the tasks differ between ranks; while iterating, on every rank.
    """
    process_group = process_group_of(group)

    def optimizer_steps() -> Iterator[list[Batch]]:
        counts: Tensor | None = None

        def count() -> dict[str, Any]:
            nonlocal counts
            assert task_tokens is not None
            counts = torch.stack([_checked_counts(task_tokens(batch)) for batch in pulled]).sum(dim=0)
            return {"the shape of task_tokens": list(counts.shape), "the dtype of task_tokens": str(counts.dtype)}

        # A rank that pulls another number of batches would wait for the others, and they for its gradients.
        given = {"task_tokens": "None" if task_tokens is None else "given"}
        compare_settings(lambda: check_types(accumulate, {"num_steps": num_steps}) | given, process_group)
        iterator = iter(batches)
        while pulled := list(islice(iterator, num_steps)):
            world_loss_tokens = 0
            for batch in pulled:
                if batch.world_loss_tokens is None:
                    raise ConfigError("a batch has no world_loss_tokens; balance the loader, or use a Balancer")
                world_loss_tokens += batch.world_loss_tokens
            if task_tokens is not None:
                compare_settings(count, process_group) if counts is None else count()
                if process_group is not None:
                    dist.all_reduce(counts, group=process_group)
            yield [batch.replace(world_loss_tokens=world_loss_tokens, world_task_tokens=counts) for batch in pulled]

    return optimizer_steps()


def _checked_counts(tokens: Any) -> Tensor:
    if isinstance(tokens, Tensor) and tokens.dim() == 1:
        return tokens.double() if tokens.is_floating_point() else tokens
    got = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
    raise ConfigError(f"task_tokens must return a tensor [tasks], got {got}; add up booleans over the samples")


class LossAverage:
    """The mean loss per loss token of each task, over all data-parallel ranks and any number of steps, for the log.

        average = LossAverage(num_tasks, group=mesh["dp"], device=device)
        for step, batch in enumerate(loader):
            loss_sums = model(batch)
            average.update(loss_sums, batch)
            ...
            if step % 100 == 99:
                print(average.compute())
                average.reset()

    Sums and counts of this rank's own samples are added up on the device, so steps may be accumulated, and ranks may
    have different numbers of steps, or none. Where each rank plans its steps alone (`build_loader(balance=...)`),
    `compute` also compares these plans, if all ranks have added the same steps.

    Collective: every rank of the group must call the constructor.

    Args:
        num_tasks: entries of the loss sums, the same on all ranks.
        group: as for `accumulate`.
        device: where losses are added up; over NCCL, this rank's GPU.
    """

    def __init__(self, num_tasks: Count = 1, *, group: Group | None = None, device: torch.device | str = "cpu") -> None:
        self._group = process_group_of(group)
        compare_settings(lambda: check_types(LossAverage, {"num_tasks": num_tasks}), self._group)
        # Sums, then loss tokens. In float64, which adds up 2^53 tokens exactly.
        self._totals = torch.zeros(2, num_tasks, dtype=torch.float64, device=device)
        self.reset()

    def reset(self) -> None:
        """Start over."""
        self._totals.zero_()
        # Sums of hashes of the steps that this rank has planned alone, and of their plans.
        self._steps = self._plans = 0

    @torch.no_grad()
    def update(self, loss_sums: Tensor, batch: JaggedBatch, *, task_tokens: Tensor | None = None) -> None:
        """Add this rank's losses in a step, the argument of `scale_loss`, without a synchronization.

        `task_tokens` are this rank's loss tokens of each task, [tasks], or sums of their weights; None: each of the
        batch's counts for all tasks.
        """
        sums = loss_sums.reshape(-1)
        num_tasks = self._totals.shape[1]
        for name, values in (("loss_sums", sums), ("task_tokens", task_tokens)):
            if values is not None and values.shape != (num_tasks,):
                raise ConfigError(f"{name} must have one entry per task, {num_tasks}, got {list(values.shape)}")
        if sums.device.type != (device := self._totals.device).type:
            raise ConfigError(f"loss_sums are on {sums.device}, but added up on {device}; pass its device=")
        self._totals[0] += sums
        self._totals[1] += batch.loss_tokens if task_tokens is None else task_tokens
        if batch.plan_hash is not None:
            self._steps += hash((batch.epoch, batch.position))
            self._plans += batch.plan_hash >> (63 - _COMPARED_BITS)  # the upper bits depend on all samples

    @torch.no_grad()
    def compute(self) -> list[float]:
        """Return the mean loss of each task since the last `reset`, over all ranks; NaN without loss tokens.

        It synchronizes with the device. Collective: every rank must call this, also without samples. Every rank raises
        a RankError if ranks have planned these steps differently.
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
                    "ranks have planned the steps of this average differently: samples were left out or trained on "
                    "twice; make the cost, the strategy and the files of a followed log the same on all ranks, or use "
                    "a Balancer, which gathers costs, and resume from an earlier checkpoint with new loaders"
                )
        return [total / tokens if tokens else math.nan for total, tokens in zip(*totals.tolist(), strict=True)]
