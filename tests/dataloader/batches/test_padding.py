from collections.abc import Sequence

import pytest
import torch

from evenrank.core.errors import ConfigError
from evenrank.dataloader import JaggedCollate, LossKey, dense, jagged
from evenrank.dataloader.batches.padding import PaddedBatches, empty_batch, pad_batch
from evenrank.dataloader.batches.schema import lengths_of, schema_of
from tests.dataloader.rich_batch import RichBatch, rich_batch, samples_of


def test_padding_adds_rows_of_length_zero_with_declared_fill_values() -> None:
    batch = rich_batch([[(0, 0), (0, 0)], [(2, 0), (1, 1)]])
    padded = pad_batch(batch, 4)
    assert (padded.batch_size, padded.num_real) == (4, 2)  # a sample with an empty history stays a sample
    assert samples_of(padded) == samples_of(batch)
    assert lengths_of(padded)[:, 2:].sum() == 0
    assert padded.ids[2:].tolist() == [-1, -1]
    assert padded.matrix[2:].tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert padded.nothing is None
    assert padded.first.lengths().dtype == batch.first.lengths().dtype == torch.int32
    assert pad_batch(rich_batch([]), 2).first.stride() == 2
    empty = empty_batch(schema_of(batch))
    assert schema_of(empty) == schema_of(batch)
    assert isinstance(empty, RichBatch)
    assert empty.num_real == 0
    assert empty.ids.tolist() == [-1, -1]


def test_a_batch_with_too_many_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="a batch of 2 rows cannot be padded to 1; raise batch_size"):
        pad_batch(rich_batch([[(1, 2), (0, 3)]] * 2), 1)


def _collate(samples: Sequence[int]) -> RichBatch:
    return rich_batch([[(sample, 0), (0, 0)] for sample in samples])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_batches", [None, 1, 4])
@pytest.mark.parametrize("num_samples", [0, 1, 4, 5])
def test_any_iterable_of_samples_is_cut_into_full_batches(
    num_samples: int, num_batches: int | None, drop_last: bool
) -> None:
    expected = [[1, 2], [3, 4]] if num_samples > 1 else []
    if num_samples % 2 and not drop_last:
        expected.append([num_samples, 0])
    expected += [[0, 0]] * ((num_batches or 0) - len(expected))
    batches = PaddedBatches(
        range(1, num_samples + 1), batch_size=2, collate=_collate, drop_last=drop_last, num_batches=num_batches
    )
    assert len(batches) == len(expected)
    for _ in range(2):
        found = [(batch.first["a"].lengths().tolist(), batch.num_real) for batch in batches]
        assert found == [(lengths, sum(length > 0 for length in lengths)) for lengths in expected]
    with pytest.raises(TypeError, match="'generator' has no len"):
        len(PaddedBatches((n for n in range(3)), batch_size=2, collate=_collate))


@pytest.mark.parametrize("num_samples", [1, 4, 5])
def test_empty_batches_are_like_the_others_whatever_is_declared(num_samples: int) -> None:
    declarations = {
        "items": jagged(max_length=9),
        "ratings": jagged(torch.float32, field="labels"),
        "number": dense(),
        "matrix": dense(fill=-1),
        "small": dense(dtype=torch.int16, shape=(3,)),
    }
    sample = {"items": [1, 2], "ratings": [0.5], "number": 7, "matrix": [[1.0, 2.0]], "small": [1, 2, 3]}
    collate = JaggedCollate(declarations, loss_key=LossKey("features", "items"))
    batches = list(PaddedBatches([sample] * num_samples, batch_size=2, collate=collate, num_batches=5))
    assert [batch.num_real for batch in batches] == ([2] * (num_samples // 2) + [1] * (num_samples % 2) + [0] * 5)[:5]
    assert len({schema_of(batch) for batch in batches}) == 1
    empty = batches[-1]
    assert empty.loss_tokens == 0
    assert empty.matrix.tolist() == [[[-1.0, -1.0]]] * 2
    assert empty.max_lengths == {"items": 0, "ratings": 0}
    assert empty.length_limits == {"items": 9}


def test_a_rank_without_samples_says_what_to_declare() -> None:
    with pytest.raises(
        ConfigError, match=r"a batch without samples needs dense\(dtype=..., shape=...\) of 'y'; declar"
    ):
        list(PaddedBatches([], batch_size=2, collate=JaggedCollate({"y": dense()}), num_batches=1))
    declared = JaggedCollate({"y": dense(dtype=torch.float32, shape=(2,))})
    (batch,) = PaddedBatches([], batch_size=2, collate=declared, num_batches=1)
    assert batch.y.tolist() == [[0.0, 0.0]] * 2
