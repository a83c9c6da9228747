"""What a training loop needs around the batches."""

from evenrank.training.labels import label_bits
from evenrank.training.loss import scale_loss

__all__ = ["label_bits", "scale_loss"]
