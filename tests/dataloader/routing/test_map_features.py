import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.routing import KeyMap, map_features

ITEMS = KeyMap(num_embeddings=100, world_size=4, mode="hash_roundrobin")
UNEVEN = KeyedJaggedTensor(
    keys=["item", "user"],
    values=torch.tensor([3, 4, 5, 6]),
    lengths=torch.tensor([1, 2, 1]),
    stride_per_key_per_rank=[[2], [1]],
    inverse_indices=(["item", "user"], torch.tensor([[0, 1], [0, 0]])),
)


def _features(values: torch.Tensor, *, weights: torch.Tensor | None = None) -> KeyedJaggedTensor:
    lengths = torch.tensor([2, 0, 1, 1, 3, 0])
    return KeyedJaggedTensor(keys=["user_id", "item_id", "action"], values=values, lengths=lengths, weights=weights)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_only_the_keys_of_the_mapped_feature_change(dtype: torch.dtype) -> None:
    values, weights = torch.tensor([1, 2, 90, 7, 5, 6, 7], dtype=dtype), torch.rand(7)
    mapped = map_features(_features(values, weights=weights), {"item_id": ITEMS})
    assert mapped.keys() == ["user_id", "item_id", "action"]
    assert mapped.values().dtype == dtype
    assert mapped["item_id"].values().tolist() == ITEMS(values[2:4]).tolist() != [90, 7]
    assert mapped["user_id"].values().tolist() == [1, 2]
    assert mapped["action"].values().tolist() == [5, 6, 7]
    assert mapped.lengths().tolist() == [2, 0, 1, 1, 3, 0]
    assert mapped.weights().tolist() == weights.tolist()
    assert mapped.stride() == 2
    assert values.tolist() == [1, 2, 90, 7, 5, 6, 7]


def test_features_whose_rows_differ_in_number_keep_them() -> None:
    mapped = map_features(UNEVEN, {"item": ITEMS})
    assert mapped.values().tolist() == [*ITEMS(torch.tensor([3, 4, 5])).tolist(), 6]
    assert mapped.stride_per_key() == [2, 1]
    assert mapped.inverse_indices()[1].tolist() == [[0, 1], [0, 0]]


def test_unknown_features_and_keys_are_refused() -> None:
    features = _features(torch.tensor([1, 2, 100, 7, 5, 6, 7]))
    with pytest.raises(ConfigError) as raised:
        map_features(features, {"video_id": ITEMS})
    assert str(raised.value) == "key_maps has 'video_id', which is no feature; there are user_id, item_id, action"
    with pytest.raises(DataError, match="are 0 to 99, got 100; "):
        map_features(features, {"item_id": ITEMS})


def test_batches_without_values_stay_empty() -> None:
    empty, lengths = torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    features = KeyedJaggedTensor(keys=["item_id"], values=empty, lengths=lengths)
    assert map_features(features, {"item_id": ITEMS}).lengths().tolist() == [0, 0, 0]
