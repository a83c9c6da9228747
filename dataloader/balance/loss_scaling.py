"""`SCALING`: whether losses of balanced batches are scaled, which nothing else would tell."""

import logging
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

_log = logging.getLogger("evenrank")


class Scaling:
    """Warns once in a process, on rank 0, of an optimizer that steps on balanced batches without `scale_loss`."""

    is_scaled = False
    """Whether `scale_loss` was called."""
    is_sum = False
    """Whether that was looked at."""
    _is_watched = False

    def watch(self) -> None:
        """Look at the next step of any optimizer; called before balanced batches are handed out."""
        if not self._is_watched:
            self._is_watched = True
            register_optimizer_step_pre_hook(self._check)

    def _check(self, *_: Any) -> None:
        if not self.is_scaled:
            self.is_scaled = True
            warn(
                "an optimizer steps on balanced batches, and scale_loss was not called: ranks have other numbers of "
                "loss tokens, so the mean of their losses is not that of all samples; train on "
                "scale_loss(loss_sum, batch), unless you divide by batch.world_loss_tokens yourself"
            )


def warn(text: str) -> None:
    """Log a warning on rank 0 of the job."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log.warning(text)


SCALING = Scaling()
