from .accumulation import accumulate as accumulate
from .averages import LossAverage as LossAverage
from .finite import FiniteCheck as FiniteCheck
from .labels import label_bits as label_bits
from .loss import scale_loss as scale_loss

__all__ = ["FiniteCheck", "LossAverage", "accumulate", "label_bits", "scale_loss"]
