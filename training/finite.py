"""`FiniteCheck`: a loss that is NaN or infinite on one rank raises an error on all of them.

A rank that raised alone would leave the others waiting for its gradients. So in each step ranks reduce one flag on a
side stream, which each of them reads in the next step, while the GPU runs the next forward.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from evenrank.core.errors import RankError
from evenrank.dataloader.balance.ranks.agree import gather_checked
from evenrank.dataloader.balance.ranks.process_group import Group, process_group_of
from evenrank.dataloader.batches.batch import JaggedBatch

_MAX_NAMED = 64  # ids and losses in a message; further ones are counted only


class FiniteCheck:
    """Raises on all ranks once the loss of one of them is NaN or infinite.

        check = FiniteCheck()
        for batch in balancer:
            loss_sums = model(batch)
            check.update(loss_sums, batch)
            scale_loss(loss_sums, batch).sum().backward()
            ...
        check.finish()

    The error comes one step late, when the weights of all ranks may be NaN already, because gradients are averaged. The
    message names the first such step. Call `finish` before saving a checkpoint.

    It costs an all-reduce of 4 bytes per step, on a GPU on a side stream. The device is never synchronized: in step t
    the host waits at most for the forward of step t - 1 on all ranks, so it runs less than two steps ahead of the GPU.

    `group` has all ranks of the job, tensor-parallel ones included; None: the default process group or, without one,
    this process alone.
    """

    def __init__(self, *, group: Group | None = None) -> None:
        self._group = process_group_of(group)
        self._rank = 0 if self._group is None else dist.get_rank()
        self._pending: _Pending | None = None
        self._side_stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def update(self, loss_sums: Tensor, batch: JaggedBatch) -> None:
        """Check this step's loss, and raise if that of the last one was not finite. Collective.

        `loss_sums` are the argument or the result of `scale_loss`, of any shape.

        Raises:
            RankError: a loss was not finite on some rank; on every rank. The message names the first such rank, the
                epoch and step, the losses and, where batches have a field `sample_ids`, the samples.
        """
        self.finish()
        sample_ids = dict(batch.tensors()).get("sample_ids")
        # Copies, because the caller may overwrite its tensors, and a view would keep the whole batch allocated.
        losses = loss_sums.clone()
        ids = sample_ids[: batch.num_real].clone() if isinstance(sample_ids, Tensor) else None
        is_set, is_copied = self._reduce((~losses.isfinite()).any().to(torch.int32))
        place = f"rank {self._rank} in epoch {batch.epoch}, step {batch.step}"
        self._pending = _Pending(is_set, is_copied, losses, ids, batch.num_real, place)

    @torch.no_grad()
    def finish(self) -> None:
        """Check the last step too, like `update`: after training, and before a checkpoint. Collective."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.is_copied is not None:
            pending.is_copied.synchronize()
        if not pending.is_set.item():
            return
        reports = gather_checked({}, pending.report(), self._group)
        first, *others = [report for report in reports if report is not None]
        also = f"; it is one of {1 + len(others)} such ranks" if others else ""
        raise RankError(
            f"{first}{also}; load a checkpoint of an earlier step, as the weights may have been trained with it since"
        )

    def _reduce(self, flag: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        # Returns whether any rank's flag is 1, in host memory, and the event after which that is valid.
        if flag.is_cuda and self._side_stream is None:
            self._side_stream = torch.cuda.Stream(flag.device)
        stream = self._side_stream
        if stream is not None:
            # The training stream does not wait for ranks whose forward takes longer.
            stream.wait_stream(torch.cuda.current_stream(flag.device))
            flag.record_stream(stream)
        with torch.cuda.stream(stream):  # None changes nothing
            if self._group is not None:
                work = dist.all_reduce(flag, dist.ReduceOp.MAX, self._group, async_op=True)
                assert work is not None
                work.wait()
            on_host = torch.empty((), dtype=flag.dtype, device="cpu", pin_memory=flag.is_cuda)
            on_host.copy_(flag, non_blocking=True)
            return on_host, None if stream is None else stream.record_event()


class _Pending(NamedTuple):
    """A step of this rank whose flag has not been read."""

    is_set: Tensor  # int32 scalar in host memory: 1 if the loss of some rank is not finite
    is_copied: torch.cuda.Event | None  # after which that is valid; None: at once
    losses: Tensor
    sample_ids: Tensor | None  # without padding; None if batches have none
    num_samples: int
    place: str  # rank in the job, epoch and step

    def report(self) -> str | None:
        """Describe this rank's loss unless it is finite; synchronizes with the device."""
        num_bad = int((~self.losses.isfinite()).sum())
        if num_bad == 0:
            return None
        losses: object = self.losses.tolist()
        if (num_losses := self.losses.numel()) > _MAX_NAMED:
            losses = f"not finite in {num_bad} of {num_losses} entries"
        if self.sample_ids is None:
            samples = f"its {self.num_samples} samples have no ids"
        else:
            ids = self.sample_ids.tolist()
            more = f" and {len(ids) - _MAX_NAMED} more" if len(ids) > _MAX_NAMED else ""
            samples = f"its samples are {', '.join(map(str, ids[:_MAX_NAMED])) or 'none'}{more}"
        return f"the loss of {self.place} is {losses}; {samples}"
