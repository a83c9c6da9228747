"""Scaling of the loss that gives balanced training the gradient of unbalanced training."""

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from evenrank.core.errors import ConfigError
from evenrank.dataloader.batch import JaggedBatch


def scale_loss(local_sum: Tensor, batch: JaggedBatch, *, dp_size: int | None = None) -> Tensor:
    """Scale a rank's sum of losses to its share of the step's mean loss.

    The loss of a step is the sum over the loss tokens of all ranks, divided by their number. DDP, FSDP and TorchRec
    average gradients over `dp_size` ranks, so a rank's share is local_sum * dp_size / (loss tokens of all ranks).

    A rank may have no sample in the last step of an epoch. Its loss must still depend on all parameters, or DDP waits
    for their gradients. A sum over zero rows of the model's output does so if the model runs on the padded batch.

    It never synchronizes with a GPU. It may be called in the forward of a model that torch.fx traces, as TorchRec's
    training pipelines do: it is one node of the graph.

    Args:
        local_sum: scalar, the sum (not the mean) of the loss over this rank's loss tokens.
        batch: the batch that it was computed on, from a Balancer.
        dp_size: the number of data-parallel ranks whose gradients are averaged; None: the ranks of the Balancer's
            group.

    Returns:
        A scalar to call `backward` on; zero if no rank has loss tokens.

    Raises:
        ConfigError: the batch does not know the number of loss tokens of all ranks, as it is not from a Balancer.

    """
    # While torch.fx traces, both are proxies, whose values cannot be looked at. `torch.fx.wrap` would not do here: it
    # applies to modules imported before tracing starts, and this one is imported at its first use.
    if has_torch_function((local_sum, batch)):
        scaled: Tensor = handle_torch_function(scale_loss, (local_sum, batch), local_sum, batch, dp_size=dp_size)
        return scaled
    if batch.world_loss_tokens is None:
        raise ConfigError("the batch has no world_loss_tokens; iterate over a Balancer instead of the loader")
    if dp_size is None:
        dp_size = batch.dp_size
    if dp_size is None:
        raise ConfigError("the batch has no dp_size; iterate over a Balancer, or pass dp_size to scale_loss")
    if batch.world_loss_tokens == 0:
        return local_sum * 0.0
    return local_sum * (dp_size / batch.world_loss_tokens)
