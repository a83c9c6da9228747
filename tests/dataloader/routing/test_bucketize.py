from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.routing import KeyMap, Routing, bucketize, map_features
from tests.dataloader.routing.reference import Batch, batches, bucketized

ROUNDROBIN = Routing(mode="roundrobin")
int_dtypes = st.sampled_from([torch.int32, torch.int64])


def make_kjt(
    batch: Batch, lengths_dtype: torch.dtype = torch.int64, weights: Tensor | None = None, device: str = "cpu"
) -> tuple[KeyedJaggedTensor, dict[str, Routing]]:
    names = [f"feature_{number}" for number in range(len(batch.rows))]
    values = torch.tensor(batch.keys, dtype=torch.int32 if batch.bits == 32 else torch.int64)
    kjt = KeyedJaggedTensor(
        keys=names,
        values=values,
        lengths=torch.tensor(batch.lengths, dtype=lengths_dtype),
        weights=weights,
        stride=len(batch.rows[0]),
    )
    return kjt.to(torch.device(device)), dict(zip(names, batch.routings, strict=True))


def weights_of(batch: Batch) -> Tensor:
    return torch.arange(len(batch.keys), dtype=torch.float32) + 0.5


def assert_same(result: tuple[KeyedJaggedTensor, Tensor], expected: tuple[KeyedJaggedTensor, Tensor]) -> None:
    """Values, dtypes and metadata are the same, of tensors on any device."""
    (ours, permutation), (theirs, expected_permutation) = result, expected
    assert ours.keys() == theirs.keys()
    assert ours.stride() == theirs.stride()
    pairs = [
        (ours.values(), theirs.values()),
        (ours.lengths(), theirs.lengths()),
        (ours.weights_or_none(), theirs.weights_or_none()),
        (permutation, expected_permutation.to(torch.int64)),
    ]
    for tensor, other in pairs:
        assert (tensor is None) == (other is None)
        if tensor is not None and other is not None:
            assert tensor.dtype == other.dtype
            assert torch.equal(tensor.cpu(), other.cpu())


extras = st.sampled_from(["none", "weights", "positions"])
ITEMS = KeyMap(num_embeddings=100, world_size=4, mode="hash_roundrobin")


@settings(max_examples=150)
@given(batches(), int_dtypes)
def test_values_are_grouped_by_rank_and_row_in_their_order(batch: Batch, lengths_dtype: torch.dtype) -> None:
    expected = bucketized(batch)
    kjt, routings = make_kjt(batch, lengths_dtype, weights_of(batch))
    # Routings of other keys are ignored.
    result, permutation = bucketize(kjt, batch.world_size, routings | {"another": ROUNDROBIN})
    assert (kjt.values().tolist(), kjt.lengths().tolist()) == (batch.keys, batch.lengths)  # left as it is
    assert torch.equal(kjt.weights(), weights_of(batch))
    assert result.keys() == kjt.keys() * batch.world_size
    assert result.stride() == kjt.stride()
    assert result.lengths().dtype == lengths_dtype
    assert result.lengths().tolist() == expected.lengths
    assert result.values().dtype == kjt.values().dtype
    assert result.values().tolist() == expected.values
    assert result.weights().tolist() == [source + 0.5 for source in expected.sources]
    assert permutation.dtype == torch.int64
    assert permutation.tolist() == expected.permutation
    assert torch.equal(result.weights()[permutation], kjt.weights())
    positions, _ = bucketize(make_kjt(batch, lengths_dtype)[0], batch.world_size, routings, bucketize_pos=True)
    assert positions.weights().dtype == kjt.values().dtype
    assert positions.weights().tolist() == expected.positions


def check_like_torchrec(batch: Batch, lengths_dtype: torch.dtype, extra: str, device: str) -> None:
    # fbgemm takes block sizes in the dtype of the keys, so larger tables do not fit there.
    sizes = [min(routing.num_embeddings or 0, 2**30) for routing in batch.routings]
    batch = replace(batch, routings=tuple(Routing(mode="continuous", num_embeddings=size) for size in sizes))
    kjt, routings = make_kjt(batch, lengths_dtype, weights_of(batch) if extra == "weights" else None, device)
    if device == "cuda" and not kjt.values().numel():
        return  # some releases of fbgemm refuse empty batches
    blocks = torch.tensor([-(-size // batch.world_size) for size in sizes], device=device)
    positions = extra == "positions"
    result, permutation = bucketize_kjt_before_all2all(
        kjt, batch.world_size, blocks, output_permute=True, bucketize_pos=positions
    )
    assert permutation is not None
    assert_same(bucketize(kjt, batch.world_size, routings, bucketize_pos=positions), (result, permutation))


@settings(max_examples=150)
@given(batches(modes=["continuous"]), int_dtypes, extras)
def test_ranges_are_bucketized_as_by_torchrec(batch: Batch, lengths_dtype: torch.dtype, extra: str) -> None:
    check_like_torchrec(batch, lengths_dtype, extra, "cpu")


@pytest.mark.gpu
@settings(max_examples=50)
@given(batches(modes=["continuous"], max_length=40), int_dtypes, extras)
def test_on_a_gpu_ranges_are_bucketized_as_by_fbgemm(batch: Batch, lengths_dtype: torch.dtype, extra: str) -> None:
    check_like_torchrec(batch, lengths_dtype, extra, "cuda")


@pytest.mark.parametrize("stride", [0, 3])
def test_batches_without_values_have_no_lengths(stride: int) -> None:
    batch = Batch(rows=[[[]] * stride] * 2, routings=(ROUNDROBIN, Routing(mode="hash_roundrobin")), world_size=4)
    kjt, routings = make_kjt(batch)
    result, permutation = bucketize(kjt, 4, routings, bucketize_pos=True)
    assert result.lengths().tolist() == [0] * 8 * stride
    assert result.values().numel() == result.weights().numel() == permutation.numel() == 0
    empty = torch.empty(0, dtype=torch.int64)
    result, permutation = bucketize(KeyedJaggedTensor(keys=[], values=empty, lengths=empty, stride=2), 4, {})
    assert result.keys() == []
    assert permutation.numel() == result.values().numel() == 0
    features = KeyedJaggedTensor(keys=["item_id"], values=empty, lengths=torch.zeros(3, dtype=torch.int64))
    assert map_features(features, {"item_id": ITEMS}).lengths().tolist() == [0, 0, 0]


def kjt_of(values: Tensor, **others: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["user", "item"], values=values, lengths=torch.tensor([1, 1]), **others)


UNEVEN = KeyedJaggedTensor(
    keys=["item", "user"],
    values=torch.tensor([3, 4, 5, 6]),
    lengths=torch.tensor([1, 2, 1]),
    stride_per_key_per_rank=[[2], [1]],
    inverse_indices=(["item", "user"], torch.tensor([[0, 1], [0, 0]])),
)


@pytest.mark.parametrize(
    ("kjt", "arguments", "message"),
    [
        (kjt_of(torch.tensor([1, 2])), {"routings": {"user": ROUNDROBIN}}, r"'item' has no routing.*\['user'\]"),
        (kjt_of(torch.tensor([1.0, 2.0])), {}, "int32 or int64, got torch.float32"),
        (kjt_of(torch.tensor([1, 2])), {"world_size": 0}, "world_size must be .* got 0"),
        (
            kjt_of(torch.ones(2).int(), weights=torch.ones(2)),
            {"bucketize_pos": True},
            "replace the weights of the batch",
        ),
        (UNEVEN, {}, r"same stride for all keys, got \[2, 1\]"),
    ],
)
def test_mistakes_are_refused(kjt: KeyedJaggedTensor, arguments: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"world_size": 2, "routings": {"user": ROUNDROBIN, "item": ROUNDROBIN}}
    with pytest.raises(ConfigError, match=message):
        bucketize(kjt, **(defaults | arguments))


@pytest.mark.gpu
@settings(max_examples=150)
@given(batches(max_length=40), int_dtypes, extras)
def test_on_a_gpu_batches_are_grouped_as_on_the_cpu(batch: Batch, lengths_dtype: torch.dtype, extra: str) -> None:
    weights = weights_of(batch) if extra == "weights" else None
    results = []
    for device in ("cpu", "cuda"):
        kjt, routings = make_kjt(batch, lengths_dtype, weights, device)
        results.append(bucketize(kjt, batch.world_size, routings, bucketize_pos=extra == "positions"))
    assert results[1][0].values().is_cuda
    assert_same(results[1], results[0])


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
