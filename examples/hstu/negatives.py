"""Random items to tell the next one from, looked up together with the items of the batch."""

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader import SequenceBatch
from hstu.tables import NEGATIVE_ID


class UniformNegatives(nn.Module):
    """Draws the negatives of a step, and adds them to the batch's features.

    They depend on the seed and on where in the data the step is, which all ranks have in common. So a sample is trained
    against the same items on whichever rank, and a resumed job draws as if it had never stopped.

    They are rows of the table of the items: where a KeyMap has renumbered these, other items, just as uniform.

    It has no parameters: with `pipeline_postproc=True` TorchRec's pipelines run it ahead, with the lookup.

    Args:
        num_items: negatives are drawn from 0..num_items-1, uniformly and with repetition.
        count: negatives of a step.
        seed: of the draws; the same on all ranks.

    """

    def __init__(self, num_items: int, count: int, seed: int) -> None:
        super().__init__()
        for name, value in (("num_items", num_items), ("num_negatives", count)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self.num_items = num_items
        self.count = count
        self.seed = seed

    def forward(self, batch: SequenceBatch) -> KeyedJaggedTensor:
        """Return the features of the batch, and the negatives as `negative_id`."""
        device = batch.features.values().device
        entropy = np.random.SeedSequence((self.seed, batch.epoch, batch.position)).generate_state(1, np.uint64)
        generator = torch.Generator(device).manual_seed(int(entropy[0] >> 1))
        negatives = torch.randint(self.num_items, (self.count,), generator=generator, device=device)
        return with_items(batch.features, negatives)


def with_items(features: KeyedJaggedTensor, items: Tensor) -> KeyedJaggedTensor:
    """Return features and, as the values of a further key `negative_id`, items [n], all in the first row."""
    in_first_row = torch.zeros_like(features.lengths()[: features.stride()])
    in_first_row[:1] = len(items)
    length_per_key = [*features.length_per_key(), len(items)]
    return KeyedJaggedTensor(
        keys=[*features.keys(), NEGATIVE_ID],
        values=torch.cat([features.values(), items]),
        lengths=torch.cat([features.lengths(), in_first_row]),
        stride=features.stride(),
        length_per_key=length_per_key,
        offset_per_key=[0, *accumulate(length_per_key)],
    )


def without_values(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return features of the same keys whose rows are all empty."""
    num_keys = len(features.keys())
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values()[:0],
        lengths=torch.zeros_like(features.lengths()),
        stride=features.stride(),
        length_per_key=[0] * num_keys,
        offset_per_key=[0] * (num_keys + 1),
    )
