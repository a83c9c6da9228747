"""`FiniteCheck`: a loss that is NaN or infinite on one rank ends the training on all of them, with an explanation.

Ranks have to agree on the step in which they raise: a rank that raised alone would leave the others waiting for its
gradients. So in each step they reduce one flag, and each of them looks at it in the next step. By then the GPU has
computed it, and has the next forward to do: the host does not hold it up.

    step     t                                   t + 1
    device   forward, flag, backward, ...        forward, ...
    side     ......... all-reduce, copy to host
    host                                         is it raised?
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from evenrank.core.errors import RankError
from evenrank.dataloader.balance.ranks.process_group import Group, process_group_of
from evenrank.dataloader.batches.batch import JaggedBatch

# In an error's message; ids and losses beyond them are counted only.
_NAMED_SAMPLES = 64
_NAMED_LOSSES = 64


class FiniteCheck:
    """Raises on all ranks once the loss of one of them is NaN or infinite.

        check = FiniteCheck()
        for batch in balancer:
            loss_sums = model(batch)
            check.update(loss_sums, batch)
            scale_loss(loss_sums, batch).sum().backward()
            ...
        check.finish()

    The error comes one step late. By then the weights of all ranks may be NaN, because gradients are averaged; the
    message names the first such step. Call `finish` before saving a checkpoint, so that no useless one is saved.

    It costs an all-reduce of 4 bytes per step, on a GPU on a side stream. The device is never synchronized: in step t
    the host waits for the forward of step t - 1 on all ranks at most, so it runs less than two steps ahead of the GPU.

    Args:
        group: the ranks that end together: those of the whole job, tensor-parallel ones included; None: the default
            process group or, without one, this process alone.

    Raises:
        ConfigError: this process is not a rank of the group.

    """

    def __init__(self, *, group: Group | None = None) -> None:
        self._group = process_group_of(group)
        self._rank = 0 if self._group is None else dist.get_rank()
        self._pending: _Pending | None = None
        self._side_stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def update(self, loss_sums: Tensor, batch: JaggedBatch) -> None:
        """Check this step's loss, and raise if that of the last one was not finite.

        Collective: every rank must call this.

        Args:
            loss_sums: of any shape; what `scale_loss` is given or what it returns.
            batch: the batch that they were computed on.

        Raises:
            RankError: a loss was not finite on some rank; on every rank. The message has the first such rank, epoch and
                step, its losses and, where batches have a field `sample_ids`, the ids of its samples.

        """
        self.finish()
        sample_ids = dict(batch.tensors()).get("sample_ids")
        # Copies, because the caller may go on with the tensors; and a view of the batch would keep all of it allocated.
        losses = loss_sums.clone()
        ids = sample_ids[: batch.num_real].clone() if isinstance(sample_ids, Tensor) else None
        flag = (~losses.isfinite()).any().to(torch.int32)
        is_raised, is_copied = self._reduce(flag)
        self._pending = _Pending(
            is_raised=is_raised,
            is_copied=is_copied,
            rank=self._rank,
            losses=losses,
            sample_ids=ids,
            num_samples=batch.num_real,
            place=f"epoch {batch.epoch}, step {batch.step}",
        )

    @torch.no_grad()
    def finish(self) -> None:
        """Look at the last step too: after the training, and before a checkpoint.

        Collective: every rank must call this.

        Raises:
            RankError: see `update`.

        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.is_copied is not None:
            pending.is_copied.synchronize()
        if not pending.is_raised.item():
            return
        # All ranks are here, so they can take their time.
        reports = [pending.report()]
        if self._group is not None:
            reports = [None] * self._group.size()
            dist.all_gather_object(reports, pending.report(), self._group)
        first, *others = [report for report in reports if report is not None]
        also = f"; it is one of {1 + len(others)} such ranks" if others else ""
        raise RankError(
            f"{first}{also}; load a checkpoint of an earlier step, as the weights may have been trained with it since"
        )

    def _reduce(self, flag: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Return whether any rank's flag is 1, in host memory, and the event after which it is there."""
        if flag.is_cuda and self._side_stream is None:
            self._side_stream = torch.cuda.Stream(flag.device)
        stream = self._side_stream
        if stream is not None:
            # The training does not wait for the ranks whose forward takes longer.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pending:
    """A step whose flag has not been looked at."""

    is_raised: Tensor
    """int32 scalar in host memory: 1 if the loss of some rank is not finite."""
    is_copied: torch.cuda.Event | None
    """After which that is valid; None: at once."""
    rank: int
    """This process's rank in the job."""
    losses: Tensor
    """Of this rank."""
    sample_ids: Tensor | None
    """Of this rank's samples, padding left out; None if batches have none."""
    num_samples: int
    """Of this rank."""
    place: str
    """Epoch and step."""

    def report(self) -> str | None:
        """Return what is wrong with this rank's loss, if anything; it synchronizes with the device."""
        num_bad = int((~self.losses.isfinite()).sum())
        if num_bad == 0:
            return None
        num_losses = self.losses.numel()
        is_long = num_losses > _NAMED_LOSSES
        losses = f"not finite in {num_bad} of {num_losses} entries" if is_long else self.losses.tolist()
        if self.sample_ids is None:
            samples = f"its {self.num_samples} samples have no ids"
        else:
            ids = self.sample_ids.tolist()
            rest = f" and {len(ids) - _NAMED_SAMPLES} more" if len(ids) > _NAMED_SAMPLES else ""
            samples = f"its samples are {', '.join(map(str, ids[:_NAMED_SAMPLES])) or 'none'}{rest}"
        return f"the loss of rank {self.rank} in {self.place} is {losses}; {samples}"
