import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from evenrank.dataloader import JaggedCollate, LossKey, dense, jagged, pad_batch
from evenrank.dataloader.batches.schema import check_contents, schema_of
from tests.dataloader.batch_helpers import rows_of
from tests.ranks import RankPool

DECLARATIONS: dict[str, Any] = {
    "item_id": jagged(max_length=3),
    "user": jagged(torch.float32, field="users"),
    "label": dense(fill=-1, dtype=torch.float32, shape=()),
}
FORMS: list[Callable[[list[int]], Any]] = [
    *(list, tuple, torch.tensor),
    lambda values: np.array(values, dtype=np.int16),
    lambda values: np.array(values, dtype=np.uint64),
    lambda values: values[0] if len(values) == 1 else values,
    lambda values: np.array(values, dtype=np.float32),
]
LISTS = st.lists(st.integers(0, 999), max_size=3)
INTEGERS, FLOATS = (st.tuples(LISTS, st.sampled_from(forms)) for forms in (FORMS[:-1], FORMS))


@settings(max_examples=60)
@given(samples=st.lists(st.tuples(INTEGERS, FLOATS), max_size=4), batch_size=st.sampled_from([None, 4, 6]))
def test_a_batch_has_what_its_samples_have_in_whatever_forms_these_are(samples: Any, batch_size: int | None) -> None:
    collate = JaggedCollate(DECLARATIONS, batch_size=batch_size, loss_key=LossKey("features", "item_id"))
    columns = {name: [sample[number][0] for sample in samples] for number, name in enumerate(("item_id", "user"))}
    counts = [*map(len, columns["item_id"])]
    batch = collate(
        [
            {"item_id": item_form(items), "user": user_form(users), "label": len(items)}
            for (items, item_form), (users, user_form) in samples
        ]
    )
    num_rows = batch_size or len(samples) or 1  # TorchRec takes no batch without rows
    padding: list[list[int]] = [[]] * (num_rows - len(samples))
    assert (batch.batch_size, batch.num_real) == (num_rows, len(samples))
    assert rows_of(batch.features, "item_id") == columns["item_id"] + padding
    assert rows_of(batch.users, "user") == columns["user"] + padding
    assert batch.label.tolist() == counts + [-1] * len(padding)
    assert batch.loss_tokens == sum(counts)
    assert batch.max_lengths == {name: max(map(len, of_name), default=0) for name, of_name in columns.items()}
    assert batch.length_limits == {"item_id": 3}
    assert (batch.features.values().dtype, batch.label.dtype) == (torch.int64, torch.float32)
    check_contents(batch, schema_of(batch))
    assert [spec.fill for spec in schema_of(batch).fields if spec.name == "label"] == [-1]
    assert schema_of(pad_batch(collate([]), num_rows)) == schema_of(batch)


def test_torchrec_takes_a_batch_without_samples_whose_rows_do_not_count() -> None:
    for batch_size in (None, 3):
        batch = JaggedCollate({"item_id": jagged(), "user": jagged()}, batch_size=batch_size)([])
        of_table: dict[str, Any] = {"name": "t", "embedding_dim": 4, "num_embeddings": 10}
        table = EmbeddingBagConfig(**of_table, feature_names=batch.features.keys(), init_fn=torch.nn.init.ones_)
        model = EmbeddingBagCollection(tables=[table])
        pooled = model(batch.features).values()
        assert pooled.shape == (batch.batch_size, 8)
        pooled[: batch.num_real].sum().backward()
        assert all((weights.grad == 0).all() for weights in model.parameters())


def test_dense_values_have_the_shape_and_dtype_of_the_samples_or_the_declared_one() -> None:
    batch = JaggedCollate({"a": dense()})([{"a": np.ones((2, 3), dtype=np.int16)}] * 2)
    assert (batch.a.shape, batch.a.dtype, batch.loss_tokens) == ((2, 2, 3), torch.int16, 2)  # one loss per sample
    half = JaggedCollate({"a": dense(dtype=torch.bfloat16)})([{"a": 0.5}]).a
    assert (half.tolist(), half.dtype) == ([0.5], torch.bfloat16)
    numbers: list[Any] = [1.5, 2, True, 1j, [1.5, 2], [2, 1.5], [[1], [2]]]
    for value in (*numbers, np.float64(1), [np.float64(1)], torch.ones(2).half()):
        assert JaggedCollate({"a": dense()})([{"a": value}]).a.dtype == torch.as_tensor(value).dtype


def test_what_is_done_to_a_batch_changes_neither_the_samples_nor_other_batches() -> None:
    samples = [{"item_id": items, "user": [0.5], "label": len(items)} for items in ([7, 3, 9], [], [4])]
    batch = JaggedCollate(DECLARATIONS, loss_key=LossKey("users", "user"))(samples)
    doubled = batch.replace(label=batch.label * 2, epoch=3)
    batch.label = batch.label + 1
    chosen = batch.index_select([2, 0])
    assert rows_of(chosen.features, "item_id") == [[4], [7, 3, 9]]
    assert [each.label.tolist() for each in (batch, doubled, chosen)] == [[4, 1, 2], [6, 0, 2], [2, 4]]
    assert (doubled.epoch, chosen.loss_tokens) == (3, 2)
    with pytest.raises(AttributeError, match="labels"):
        _ = batch.labels
    for declared in (dense(), dense(dtype=torch.float32)):
        arrays: list[dict[str, Any]] = [{"a": np.arange(3), "b": torch.tensor([0.5])}]
        collate = JaggedCollate({"a": jagged(max_length=4), "b": declared}, batch_size=2)
        changed: Any = collate(arrays)
        changed.features.values().fill_(9)
        changed.features.keys().append("c")
        changed.b.fill_(9)
        for own in (changed.length_limits, changed.max_lengths):
            own["a"] = own["b"] = 9
        after = collate(arrays)
        assert after.features.values().tolist() == arrays[0]["a"].tolist() == [0, 1, 2]
        assert (after.features.keys(), after.b.tolist(), arrays[0]["b"].tolist()) == (["a"], [[0.5], [0]], [0.5])
        assert (after.length_limits, after.max_lengths) == ({"a": 4}, {"a": 3})


FILLS = (math.nan, -0.0, 2**53 + 1, 1.0)


def _pickled(rank: int, world_size: int, skip: int = 0) -> list[bytes]:
    """Return a batch and its schema for each fill."""
    pickled = []
    for fill in FILLS:
        collate = JaggedCollate({"a": jagged(), "b": dense(fill=fill)}, loss_key=LossKey("features", "a", skip))
        batch = collate([{"a": [rank], "b": 0.5}])
        pickled.append(pickle.dumps((batch, schema_of(batch))))
    return pickled


def test_batches_of_equal_declarations_are_of_one_class_in_all_processes(ranks: RankPool) -> None:
    of_ranks = [[*map(pickle.loads, pickled)] for pickled in (*ranks.run(2, _pickled), _pickled(2, 3))]
    types = []
    for fill, *of_fill in zip(FILLS, *of_ranks, strict=True):
        assert [batch.features.values().tolist() for batch, _ in of_fill] == [[0], [1], [2]]
        types.append({type(batch) for batch, _ in of_fill} | {schema.batch_type for _, schema in of_fill})
        assert all(schema.differences(other) == [] for _, schema in of_fill for _, other in of_fill)
        for batch, _ in of_fill:
            (filled,) = pad_batch(batch, 2).b[1:].tolist()
            assert str(filled) == str(float(np.float32(fill)))
    assert [len(of_fill) for of_fill in types] == [1] * len(FILLS)
    assert len(set[Any]().union(*types)) == len(FILLS)
    (_, schema), *_, (_, other_fill) = of_ranks[0]
    _, other_key = pickle.loads(_pickled(0, 1, skip=1)[0])
    for differing, other in (("b", other_fill), ("loss_key", other_key)):
        assert [text.split(":")[0] for text in other.differences(schema)] == [differing]
