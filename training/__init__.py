"""What a training loop needs around the batches."""

from evenrank.training.loss import scale_loss

__all__ = ["scale_loss"]
