import numpy as np
import pytest
import torch

from evenrank.dataloader.batches.batch import keyed_jagged_tensor
from hstu.embeddings import ROWS, EqualRows


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_values_stay_where_they_are_and_rows_differ_by_one_at_most(dtype: type[np.integer]) -> None:
    lengths = np.array([[3000, 1, 0], [0, 0, 0], [2, 3, 5]], dtype=dtype)
    features = keyed_jagged_tensor(["item", "empty", "user"], torch.arange(lengths.sum()), lengths)
    divided = EqualRows()(features)
    assert divided.keys() == features.keys()
    assert divided.stride() == ROWS
    assert divided.lengths().dtype == features.lengths().dtype
    for key in features.keys():  # noqa: SIM118
        assert torch.equal(divided[key].values(), features[key].values())
        rows = divided[key].lengths()
        assert int(rows.sum()) == len(features[key].values())
        assert int(rows.max()) - int(rows.min()) <= 1
    assert divided["item"].lengths().tolist() == [3] * (3001 - 2 * ROWS) + [2] * (3 * ROWS - 3001)


def test_sizes_are_known_to_the_host() -> None:
    features = keyed_jagged_tensor(["item"], torch.arange(7), np.array([[7]]))
    divided = EqualRows()(features)
    assert divided.length_per_key_or_none() == [7]
    assert divided.offset_per_key_or_none() == [0, 7]
