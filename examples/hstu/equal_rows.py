"""`EqualRows`: the ids of a batch in many rows of equal length, whatever the lengths of its samples.

    samples     a b c d e f | g            h i |                  2 keys, 2 samples
    equal rows  a b c | d e | f g          h | i |                3 rows

FBGEMM's and TorchRec's kernels divide their work by rows, so that a row of 4,096 ids takes one group of threads far
longer than all others need together. Ids are looked up one by one, in the same order, however they are divided.
"""

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ROWS = 1024
"""Of each key, on every rank: enough for all multiprocessors, and few enough for their lengths to be quickly sent."""


class EqualRows(nn.Module):
    """A module without parameters, which TorchRec's pipelines can run a batch ahead."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return features with the same values of each key, and `ROWS` rows instead of samples.

        With the lengths of the keys known to the host, this does not wait for the device.
        """
        counts = features.length_per_key()
        row = torch.arange(ROWS, device=features.values().device)
        # The first rows get what is left over.
        lengths = [(row < count % ROWS).to(features.lengths().dtype) + count // ROWS for count in counts]
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            lengths=torch.cat(lengths),
            stride=ROWS,
            length_per_key=counts,
            offset_per_key=features.offset_per_key(),
        )
