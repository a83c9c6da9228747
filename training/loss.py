"""Scaling of the loss that gives balanced training the gradient of unbalanced training."""

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from evenrank.core.errors import ConfigError
from evenrank.dataloader.batch import JaggedBatch


def scale_loss(loss_sums: Tensor, batch: JaggedBatch, *, dp_size: int | None = None) -> Tensor:
    """Scale a rank's sums of losses to its share of the step's mean losses.

    The loss of a step is the sum over the loss tokens of all ranks, divided by their number. DDP, FSDP and TorchRec
    average gradients over `dp_size` ranks, so a rank's share is loss_sums * dp_size / (loss tokens of all ranks). The
    batch carries the divisor: the loss tokens of the step or, behind `accumulate`, of all steps that are accumulated,
    and those of each task where tasks have different ones.

    A rank may have no sample in the last step of an epoch. Its loss must still depend on all parameters, or DDP waits
    for their gradients. A sum over zero rows of the model's output does so if the model runs on the padded batch.

    It never synchronizes with a GPU. It may be called in the forward of a model that torch.fx traces, as TorchRec's
    training pipelines do: it is one node of the graph.

    Args:
        loss_sums: of one task, a scalar, or of several, [tasks]: the sums (not the means) of the loss over this rank's
            loss tokens.
        batch: the batch that they were computed on, from a Balancer.
        dp_size: the number of data-parallel ranks whose gradients are averaged; None: the ranks of the Balancer's
            group.

    Returns:
        As many losses, on which to call `backward` after adding them up; zero for tasks of which no rank has loss
        tokens.

    Raises:
        ConfigError: `loss_sums` is no tensor, or the batch does not know the number of loss tokens of all ranks, as it
            is not from a Balancer, or it knows those of other tasks.

    """
    # While torch.fx traces, both are proxies, whose values cannot be looked at. `torch.fx.wrap` would not do here: it
    # applies to modules imported before tracing starts, and this one is imported at its first use.
    if has_torch_function((loss_sums, batch)):
        scaled: Tensor = handle_torch_function(scale_loss, (loss_sums, batch), loss_sums, batch, dp_size=dp_size)
        return scaled
    if not isinstance(loss_sums, Tensor):
        raise ConfigError(f"loss_sums must be a tensor, got {type(loss_sums).__name__}; pass the sums alone")
    if batch.world_loss_tokens is None:
        raise ConfigError("the batch has no world_loss_tokens; iterate over a Balancer instead of the loader")
    if dp_size is None:
        dp_size = batch.dp_size
    if dp_size is None:
        raise ConfigError("the batch has no dp_size; iterate over a Balancer, or pass dp_size to scale_loss")
    tokens = batch.world_task_tokens
    if tokens is not None:
        if loss_sums.shape != tokens.shape:
            raise ConfigError(
                f"loss_sums has the shape {list(loss_sums.shape)}, but the loss tokens of {len(tokens)} tasks were "
                "counted; pass one sum per task"
            )
        return loss_sums * (tokens > 0) * dp_size / tokens.clamp(min=1)
    if batch.world_loss_tokens == 0:
        return loss_sums * 0.0
    return loss_sums * (dp_size / batch.world_loss_tokens)
