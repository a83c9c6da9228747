"""`SCALING`: warns once in a process, on rank 0, of losses of balanced batches that are not scaled."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook


class _Scaling:
    is_watched = False  # the steps of all optimizers
    is_due = False  # a balanced batch was handed out where gradients are computed
    is_scaled = False  # `scale_loss` was called where gradients are computed
    is_sum = False  # its argument was looked at

    def watch(self) -> None:
        """Look at the steps of optimizers from now on; called where a balanced batch is handed out."""
        self.is_due |= torch.is_grad_enabled()  # else it is evaluated
        if not self.is_watched:
            self.is_watched = True
            register_optimizer_step_post_hook(self._check)  # the loss may be computed within the step, by its closure

    def scaled(self) -> None:
        """Record that `scale_loss` was called."""
        if torch.is_grad_enabled():
            self.is_scaled = True  # not read here, or torch.compile would compile again when it changes

    def _check(self, *_: Any) -> None:
        if self.is_due and not self.is_scaled:
            self.is_scaled = True
            self.warn(
                "an optimizer steps on balanced batches, and scale_loss was not called, though ranks differ in loss "
                "tokens; train on scale_loss(loss_sum, batch), unless you divide by batch.world_loss_tokens yourself"
            )

    def warn(self, text: str) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            logging.getLogger("evenrank").warning(text)


SCALING = _Scaling()
