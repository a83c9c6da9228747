from .labels import label_bits as label_bits
from .loss import scale_loss as scale_loss

__all__ = ["label_bits", "scale_loss"]
