"""Weighting the loss so that balanced training has the gradient of unbalanced training."""

from torch import Tensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader.batch import JaggedBatch


def scale_loss(local_sum: Tensor, batch: JaggedBatch, *, dp_size: int) -> Tensor:
    """Turn a rank's sum of losses into its share of the step's mean loss.

    The loss of a step is the sum over all ranks' loss tokens divided by their global number. DDP, FSDP and TorchRec
    average gradients over `dp_size` ranks, so a rank's share is local_sum * dp_size / global number. A rank may have no
    sample in an epoch's last step: its loss has to depend on all parameters all the same, as a sum over no rows does
    where the model runs on the padded batch, or DDP waits for their gradients.

    Args:
        local_sum: scalar, the sum (not the mean) of the loss over this rank's loss tokens.
        batch: what it was computed on, from a Balancer.
        dp_size: the number of data-parallel ranks whose gradients are averaged.

    Returns:
        A scalar to call `backward` on; zero where no rank has loss tokens.

    Raises:
        ConfigError: the batch does not know the global number, because it has not been through a Balancer.

    """
    if batch.world_loss_tokens is None:
        raise ConfigError("the batch does not know the world's loss tokens; put a Balancer in front of the loop")
    if batch.world_loss_tokens == 0:
        return local_sum * 0.0
    return local_sum * (dp_size / batch.world_loss_tokens)
