import itertools
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader import JaggedCollate, dense, jagged
from evenrank.dataloader.batches.batch import JaggedBatch, LossKey, host
from evenrank.dataloader.batches.padding import PaddedBatches, empty_batch, pad_batch
from evenrank.dataloader.batches.schema import check_contents, lengths_of, schema_of
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.rich_batch import RichBatch, rich_batch, samples_of

BATCH = rich_batch([[(1, 2), (0, 3)], [(2, 0), (1, 1)]])


def test_moving_a_batch_keeps_samples_and_host_side_caches() -> None:
    moved = BATCH.to("cpu", non_blocking=True)
    assert samples_of(moved) == samples_of(BATCH)
    assert (moved.first._length_per_key, moved.num_real) == ([3, 2], 2)
    batch = BATCH.clone().replace(world_task_tokens=torch.tensor([3, 4]))
    assert batch.first.to_dict()["a"].values().device.type == "cpu"  # also keeps these views by key
    on_meta: Any = batch.to("meta")
    assert {jagged.values().device.type for jagged in on_meta.first.to_dict().values()} == {"meta"}
    assert on_meta.world_task_tokens.device.type == "meta"
    begin = "RichBatch(num_real=2/2, epoch=0, step=0, first=[a: 3, b: 2], weighted=[a: 1, c: 4], ids=[2]"
    assert repr(batch).startswith(begin)
    assert repr(batch).isprintable()
    counts, stream = Mock(), Mock()
    JaggedBatch(batch_size=1, num_real=0).record_stream(stream)  # nothing to keep
    JaggedBatch(batch_size=1, num_real=0).replace(world_task_tokens=counts).record_stream(stream)
    counts.record_stream.assert_called_once_with(stream)


def test_schemas_name_the_keys_and_the_fields_in_which_they_differ() -> None:
    schema = schema_of(BATCH)
    assert schema.differences(schema_of(rich_batch([[(0, 0), (0, 0)]] * 2))) == []
    other = replace(BATCH, ids=BATCH.ids.int(), matrix=BATCH.matrix[:, :1], nothing=torch.zeros(2))
    assert schema.differences(schema_of(other)) == [
        "nothing: None and torch.float32",
        "ids: torch.int64 and torch.int32",
        "matrix: torch.bfloat16[2] and torch.bfloat16[1]",
    ]
    assert schema.jagged_keys == (("first", "a"), ("first", "b"), ("weighted", "a"), ("weighted", "c"))
    named = schema.lengths_by_key(np.arange(8).reshape(4, 2))  # a key of two fields has the second one's name
    expected = {"a": [0, 1], "b": [2, 3], "weighted.a": [4, 5], "c": [6, 7]}
    assert [(key, lengths.tolist()) for key, lengths in named.items()] == [*expected.items()]


def test_rows_longer_than_their_limit_are_refused_until_it_is_raised_in_all_batches() -> None:
    batch = JaggedCollate({"item_id": jagged(max_length=9), "more": jagged()})([{"item_id": [1] * 9, "more": []}])
    lower, higher, unlimited = (
        batch.replace(length_limits=of) for of in ({"item_id": 8}, {"item_id": 10, "more": 20}, None)
    )
    with pytest.raises(ValueError, match="item_id has a row of 9 values, more than its limit, 8; a transform"):
        check_contents(lower, schema_of(lower))
    for raised in (higher, unlimited):
        check_contents(raised, schema_of(raised))
        with pytest.raises(ValueError, match=r"^a batch differs from the first one: length limit of item_id: "):
            check_contents(raised, schema_of(batch))
    assert "length limit of more: None and 20" in schema_of(batch).differences(schema_of(higher))


@dataclass(kw_only=True, eq=False, repr=False)
class WithList(JaggedBatch):
    names: list[str]


@dataclass(kw_only=True, eq=False, repr=False)
class WithLossKey(RichBatch):
    given: Any = host(None)

    def loss_key(self) -> Any:
        return self.given


def _with(loss_key: Any) -> Any:
    fields = {name: getattr(BATCH, name) for name in ("first", "weighted", "ids", "matrix", "flags")}
    return WithLossKey(batch_size=2, num_real=2, given=loss_key, **fields)


NO_KEYS = keyed_jagged_tensor([], torch.empty(0), np.empty((0, 2), dtype=np.int64))
WRONG: list[tuple[JaggedBatch, str]] = [
    (replace(BATCH, ids=torch.arange(3)), r"ids must have batch_size = 2 rows, its shape is \(3,\)"),
    (replace(BATCH, batch_size=3), "first must have batch_size = 3 rows in every key"),
    (replace(BATCH, first=NO_KEYS), "first must have at least one key; set the field to None if batches lack it"),
    (WithList(batch_size=1, num_real=1, names=["x"]), r"names must be .* with host\(\); got <class 'list'>"),
    (BATCH.to("meta"), "first must be on the CPU .*, but it is on meta; move it, or leave out the device of the loa"),
    (replace(BATCH, matrix=BATCH.matrix.clone().requires_grad_()), ".*, but it requires a gradient; detach it$"),
    (_with(("weighted", "c")), r"must be a LossKey with a skip of 0 or 1, or None; got \('weighted', 'c'\)"),
    (_with(LossKey("weighted", "c", skip=2)), "must be a LossKey with a skip of 0 or 1, or None; got LossKey"),
    (_with(LossKey("x", "y")), r"no LossKey\(.*; its jagged keys are first.a, first.b, weighted.a, weighted.c"),
]


@pytest.mark.parametrize(("batch", "message"), WRONG)
def test_fields_and_loss_keys_that_no_batch_can_have_are_named(batch: JaggedBatch, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        schema_of(batch)


@pytest.mark.gpu
def test_pinned_batches_are_copied_to_the_gpu_without_synchronization() -> None:
    pinned = BATCH.pin_memory()
    assert pinned.ids.is_pinned()
    assert pinned.first.values().is_pinned()
    assert pinned.weighted.weights().is_pinned()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        moved = pinned.to("cuda", non_blocking=True)
        moved.record_stream(torch.cuda.current_stream())
        assert moved.first.length_per_key() == [3, 2]
        assert moved.weighted.offset_per_key() == [0, 1, 5]
        assert moved.first.stride() == 2
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert moved.first.values().is_cuda
    assert samples_of(moved.to("cpu")) == samples_of(BATCH)


@st.composite
def _batches_and_rows(draw: st.DrawFn) -> tuple[RichBatch, list[int]]:
    length = st.integers(0, 5)
    samples = draw(st.lists(st.tuples(length, length, length, length), min_size=1, max_size=5))
    batch = pad_batch(rich_batch([[(a, b), (c, d)] for a, b, c, d in samples]), len(samples) + draw(st.integers(0, 2)))
    real = draw(st.lists(st.integers(0, len(samples) - 1), min_size=1, max_size=7))
    padding = [batch.batch_size - 1] * draw(st.integers(0, 2)) if batch.batch_size > len(samples) else []
    return batch, real + padding


@given(_batches_and_rows())
def test_index_select_takes_rows_of_all_fields(case: tuple[RichBatch, list[int]]) -> None:
    batch, rows = case
    samples = samples_of(batch)
    for kind in (list, np.array, torch.tensor):
        chosen = batch.index_select(kind(rows))
        expected = [samples[row] for row in rows if row < batch.num_real]
        assert samples_of(chosen) == expected
        assert (chosen.batch_size, chosen.num_real) == (len(rows), len(expected))
        assert chosen.loss_tokens == sum(len(sample["weighted c values"]) for sample in expected)
        assert chosen.max_lengths == dict(
            zip(schema_of(chosen).key_names, lengths_of(chosen).max(axis=1, initial=0), strict=True)
        )
        assert chosen.ids[chosen.num_real :].tolist() == [-1] * (len(rows) - len(expected))
        check_contents(chosen, schema_of(chosen))


def test_slice_takes_bounds_like_python_and_wrong_rows_are_an_error() -> None:
    batch = pad_batch(rich_batch([[(1, 2), (3, 4)], [(0, 0), (0, 1)], [(2, 2), (2, 2)]]), 4)
    for start, stop, samples in [(0, 2, [0, 1]), (1, 4, [1, 2]), (-2, 4, [2]), (2, 99, [2])]:
        part = batch.slice(start, stop)
        assert samples_of(part) == [samples_of(batch)[sample] for sample in samples]
        assert part.ids.tolist() == batch.ids[start:stop].tolist()
    assert batch.slice(3, 1).batch_size == 0
    assert batch.slice(0, 2).replace(world_loss_tokens=7).slice(0, 1).world_loss_tokens == 7
    with pytest.raises(IndexError, match=r"rows must be in 0\.\.3, got -1 to 4"):
        batch.index_select([-1, 4])
    with pytest.raises(ValueError, match="rows have padding, 3 and above, before a sample; put padding last"):
        batch.index_select([3, 0])


def _addresses(batch: JaggedBatch) -> set[int]:
    """Return where the memory of each tensor with values begins."""
    tensors: list[Any] = []
    for _, value in batch.tensors():
        if isinstance(value, KeyedJaggedTensor):
            tensors += [value.values(), value.lengths(), value.weights_or_none()]
        else:
            tensors.append(value)
    return {tensor.data_ptr() for tensor in tensors if tensor is not None and tensor.numel()}


def test_clone_is_equal_and_shares_no_memory() -> None:
    wide = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    layouts = (wide, wide[:, 1:3], wide.t(), wide[0].expand(3, 4), torch.zeros(3, 0), torch.ones(3, dtype=torch.bool))
    for batch in (BATCH, *(replace(BATCH, ids=tensor) for tensor in layouts)):
        clone = batch.clone()
        assert bits_of(clone) == bits_of(batch)
        assert not _addresses(clone) & _addresses(batch)


def test_padding_adds_rows_of_length_zero_with_declared_fill_values() -> None:
    batch = rich_batch([[(0, 0), (0, 0)], [(2, 0), (1, 1)]])
    padded = pad_batch(batch, 4)
    assert (padded.batch_size, padded.num_real) == (4, 2)  # a sample with an empty history stays a sample
    assert samples_of(padded) == samples_of(batch)
    assert lengths_of(padded)[:, 2:].sum() == 0
    assert (padded.ids[2:].tolist(), padded.matrix[2:].tolist()) == ([-1, -1], [[0.5, 0.5], [0.5, 0.5]])
    assert padded.nothing is None
    assert padded.first.lengths().dtype == batch.first.lengths().dtype == torch.int32
    assert pad_batch(rich_batch([]), 2).first.stride() == 2
    empty = empty_batch(schema_of(batch))
    assert schema_of(empty) == schema_of(batch)
    assert isinstance(empty, RichBatch)
    assert (empty.num_real, empty.ids.tolist()) == (0, [-1, -1])
    with pytest.raises(ConfigError, match="a batch of 2 rows cannot be padded to 1; raise batch_size"):
        pad_batch(batch, 1)


@pytest.mark.parametrize("num_samples", [0, 1, 4, 5])
def test_any_samples_are_cut_into_full_batches(num_samples: int) -> None:
    collate = JaggedCollate({"n": dense(dtype=torch.int64, shape=())})
    samples = [{"n": sample} for sample in range(1, num_samples + 1)]
    for drop_last, num_batches in itertools.product((False, True), (None, 1, 4)):
        expected = [[1, 2], [3, 4]] if num_samples > 1 else []
        if num_samples % 2 and not drop_last:
            expected.append([num_samples, 0])
        expected += [[0, 0]] * ((num_batches or 0) - len(expected))
        options: Any = {"batch_size": 2, "collate": collate, "drop_last": drop_last, "num_batches": num_batches}
        padded: Any = PaddedBatches(samples, **options)
        assert len(padded) == len(expected)
        for _ in range(2):
            found = [(batch.n.tolist(), batch.num_real) for batch in padded]
            assert found == [(numbers, sum(number > 0 for number in numbers)) for numbers in expected]
    with pytest.raises(TypeError, match="'generator' has no len"):
        len(PaddedBatches((n for n in samples), batch_size=2, collate=collate))


def test_empty_batches_are_like_the_others_whatever_is_declared() -> None:
    of_jagged = {"items": jagged(max_length=9), "ratings": jagged(torch.float32, field="labels")}
    of_dense = {"number": dense(), "matrix": dense(fill=-1), "small": dense(dtype=torch.int16, shape=(3,))}
    sample = {"items": [1, 2], "ratings": [0.5], "number": 7, "matrix": [[1.0, 2.0]], "small": [1, 2, 3]}
    collate = JaggedCollate({**of_jagged, **of_dense}, loss_key=LossKey("features", "items"))
    whole, part, empty = PaddedBatches([sample] * 3, batch_size=2, collate=collate, num_batches=3)
    assert schema_of(whole) == schema_of(part) == schema_of(empty) == schema_of(empty_batch(schema_of(whole)))
    assert (empty.loss_tokens, empty.matrix.tolist()) == (0, [[[-1.0, -1.0]]] * 2)
    assert (empty.max_lengths, empty.length_limits) == ({"items": 0, "ratings": 0}, {"items": 9})
