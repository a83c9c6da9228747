"""Labels of several binary tasks, packed into one integer."""

import torch
from torch import Tensor


def label_bits(labels: Tensor, num_tasks: int) -> Tensor:
    """Unpack labels into one binary label per task.

    Args:
        labels: int64 [n]; task t is bit t, as in the actions of KuaiRand (is_click 1, is_like 2, is_follow 4, ...).
        num_tasks: how many of the low bits are tasks, 1 to 31.

    Returns:
        float32 [n, num_tasks] of 0 and 1, on the device of the labels; a target for
        `binary_cross_entropy_with_logits`.

    """
    tasks = torch.arange(num_tasks, device=labels.device)
    return (labels.unsqueeze(-1) >> tasks).bitwise_and(1).float()
