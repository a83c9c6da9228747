import math
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader import JaggedCollate, LossKey, dense, jagged, pad_batch
from evenrank.dataloader.batches.schema import check_contents, schema_of
from tests.ranks import RankPool

SAMPLES: list[dict[str, Any]] = [
    {"item_id": [7, 3, 9], "price": [0.5, 1.5, 2.5], "user": 4, "label": 1, "extra": "left out"},
    {"item_id": np.array([], dtype=np.int32), "price": (), "user": np.int64(5), "label": 0, "extra": None},
    {"item_id": torch.tensor([4]), "price": torch.tensor([3.5]), "user": [6], "label": torch.tensor(1)},
]
DECLARATIONS: dict[str, Any] = {
    "item_id": jagged(),
    "user": jagged(),
    "price": jagged(torch.float32, field="prices"),
    "label": dense(fill=-1, dtype=torch.float32, shape=()),
}


def _rows(field: Any, key: str) -> list[list[float]]:
    return [row.tolist() for row in field[key].to_dense()]


@pytest.mark.parametrize("batch_size", [None, 3, 5])
def test_batch_has_all_declared_values_and_padding(batch_size: int | None) -> None:
    collate = JaggedCollate(DECLARATIONS, batch_size=batch_size, loss_key=LossKey("features", "item_id"))
    batch = collate(SAMPLES)
    padding = (batch_size or 3) - 3
    assert (batch.batch_size, batch.num_real, batch.loss_tokens) == (3 + padding, 3, 4)
    assert _rows(batch.features, "item_id") == [[7, 3, 9], [], [4]] + [[]] * padding
    assert _rows(batch.features, "user") == [[4], [5], [6]] + [[]] * padding
    assert _rows(batch.prices, "price") == [[0.5, 1.5, 2.5], [], [3.5]] + [[]] * padding
    assert batch.label.tolist() == [1, 0, 1] + [-1] * padding
    assert batch.max_lengths == {"item_id": 3, "user": 1, "price": 3}
    assert batch.features.values().dtype == torch.int64
    assert batch.label.dtype == torch.float32
    check_contents(batch, schema_of(batch))
    assert [spec.fill for spec in schema_of(batch).fields if spec.name == "label"] == [-1]
    assert schema_of(pad_batch(collate([]), 3 + padding)) == schema_of(batch)


FORMS: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    torch.tensor,
    lambda values: np.array(values, dtype=np.int16),
    lambda values: np.array(values, dtype=np.uint64),
    lambda values: np.array(values, dtype=np.float32),
    lambda values: values[0] if len(values) == 1 else values,
]
VALUES = st.tuples(st.lists(st.integers(0, 999), max_size=3), st.sampled_from(FORMS))


@given(of_a=st.lists(VALUES, min_size=3, max_size=3), of_b=st.lists(VALUES, min_size=3, max_size=3))
def test_a_batch_has_what_its_samples_have_in_whatever_forms_these_are(of_a: list[Any], of_b: list[Any]) -> None:
    collate = JaggedCollate(
        {"a": jagged(torch.float32), "b": jagged(torch.float32), "sum": dense(dtype=torch.int32, shape=())}
    )
    samples = [
        {"a": form(a), "b": of_form(b), "sum": sum(a)} for (a, form), (b, of_form) in zip(of_a, of_b, strict=True)
    ]
    batch = collate(samples)
    for key, column in (("a", of_a), ("b", of_b)):
        assert _rows(batch.features, key) == [values for values, _ in column]
    assert batch.sum.tolist() == [sum(values) for values, _ in of_a]


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (jagged(), [7, 3, 9]),
        (jagged(), np.arange(3)),
        (jagged(), 5),
        (jagged(torch.int32), np.arange(3)),
        (jagged(torch.float32), [0.5]),
        (dense(), 1.5),
        (dense(dtype=torch.float32), 1),
        (dense(shape=(3,)), np.zeros(3, dtype=np.float32)),
    ],
)
def test_collating_has_no_loop_in_python_over_the_samples(declared: Any, value: Any) -> None:
    collate, counts = JaggedCollate({"a": declared}), []
    for num_samples in (10, 10, 500):  # the first may import modules
        events: list[str] = []
        sys.setprofile(lambda _, event, __: events.append(event))  # noqa: B023
        try:
            collate([{"a": value}] * num_samples)
        finally:
            sys.setprofile(None)
        counts.append(events.count("call"))
    assert counts[1] == counts[2]


@pytest.mark.parametrize("batch_size", [None, 3])
def test_torchrec_takes_a_batch_without_samples_whose_rows_do_not_count(batch_size: int | None) -> None:
    batch = JaggedCollate(DECLARATIONS, batch_size=batch_size)([])
    table = EmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=10, feature_names=batch.features.keys(), init_fn=torch.nn.init.ones_
    )
    model = EmbeddingBagCollection(tables=[table])
    pooled = model(batch.features).values()
    assert pooled.shape == (batch.batch_size, 8)
    pooled[: batch.num_real].sum().backward()
    assert all((weights.grad == 0).all() for weights in model.parameters())
    assert (batch.num_real, batch.loss_tokens, batch.label.tolist()) == (0, 0, [-1] * (batch_size or 1))


def test_dense_values_have_the_shape_and_dtype_of_the_samples_or_the_declared_one() -> None:
    batch = JaggedCollate({"a": dense()})([{"a": np.ones((2, 3), dtype=np.int16)}] * 2)
    assert (batch.a.shape, batch.a.dtype) == ((2, 2, 3), torch.int16)
    assert batch.loss_tokens == 2  # one per sample
    half = JaggedCollate({"a": dense(dtype=torch.bfloat16)})([{"a": 0.5}]).a
    assert (half.tolist(), half.dtype) == ([0.5], torch.bfloat16)


def test_batch_is_pickled_replaced_and_selected_like_any_other() -> None:
    batch = JaggedCollate(DECLARATIONS, loss_key=LossKey("prices", "price"))(SAMPLES)
    copy = pickle.loads(pickle.dumps(batch))
    assert copy.label.tolist() == [1, 0, 1]
    assert schema_of(copy) == schema_of(batch)
    doubled = batch.replace(label=batch.label * 2, epoch=3)
    assert (doubled.label.tolist(), doubled.epoch, batch.label.tolist()) == ([2, 0, 2], 3, [1, 0, 1])
    batch.label = batch.label + 1
    assert (batch.label.tolist(), doubled.label.tolist()) == ([2, 1, 2], [2, 0, 2])
    chosen = batch.index_select([2, 0])
    assert _rows(chosen.features, "item_id") == [[4], [7, 3, 9]]
    assert (chosen.label.tolist(), chosen.loss_tokens) == ([2, 2], 4)
    with pytest.raises(AttributeError, match="labels"):
        _ = batch.labels


def _pickled(rank: int, world_size: int, fill: float, skip: int = 0) -> bytes:
    collate = JaggedCollate({"a": jagged(), "b": dense(fill=fill)}, loss_key=LossKey("features", "a", skip))
    batch = collate([{"a": [rank], "b": 0.5}])
    return pickle.dumps((batch, schema_of(batch)))


@pytest.mark.parametrize("fill", [math.nan, -0.0, 2**53 + 1])
def test_batches_of_equal_declarations_are_of_one_class_in_all_processes(ranks: RankPool, fill: float) -> None:
    of_ranks = [pickle.loads(pickled) for pickled in (*ranks.run(2, _pickled, fill), _pickled(2, 3, fill))]
    assert [batch.features.values().tolist() for batch, _ in of_ranks] == [[0], [1], [2]]
    (batch_type,) = {type(batch) for batch, _ in of_ranks}
    assert {schema.batch_type for _, schema in of_ranks} == {batch_type}
    assert all(schema.differences(other) == [] for _, schema in of_ranks for _, other in of_ranks)
    for batch, _ in of_ranks:
        (filled,) = pad_batch(batch, 2).b[1:].tolist()
        assert str(filled) == str(float(np.float32(fill)))
    for differing, other in (("b", _pickled(0, 1, 1.0)), ("loss_key", _pickled(0, 1, fill, skip=1))):
        batch, schema = pickle.loads(other)
        assert type(batch) is not batch_type
        assert [text.split(":")[0] for text in schema.differences(of_ranks[0][1])] == [differing]


@pytest.mark.parametrize(
    ("declarations", "options", "message"),
    [
        ({"a": "jagged"}, {}, r"'a' must be jagged\(\) or dense\(\), got 'jagged'"),
        ({"step": dense()}, {}, "a batch cannot have a tensor called 'step'; rename it"),
        ({"batch_size": dense()}, {}, "a batch cannot have a tensor called 'batch_size'"),
        ({"a": jagged(field="to")}, {}, "a batch cannot have a tensor called 'to'"),
        ({"class": dense()}, {}, "a batch cannot have a tensor called 'class'; rename it"),
        ({"features": dense(), "a": jagged()}, {}, "'features' is declared as dense and as the field of jagged keys"),
        ({"a": jagged(), "b": jagged(torch.float32)}, {}, "'b' is torch.float32, but 'a' of the same field"),
        ({"a": jagged(torch.bfloat16)}, {}, "'a' cannot be jagged"),
        ({"a": jagged()}, {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"a": jagged()}, {"loss_key": LossKey("features", "b")}, r"no LossKey\(.*; its jagged keys are features.a"),
        ({"a": jagged()}, {"loss_key": ("features", "a")}, "the loss key must be a LossKey with a skip of 0 or 1"),
    ],
)
def test_wrong_declaration_is_an_error(declarations: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JaggedCollate(declarations, **options)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            {"a": [2**63], "b": 1},
            "sample 1 of a batch has 'a' of dtype uint64 with values that do not fit torch.int64; ",
        ),
        ({"a": ["x"], "b": 1}, "'a' of dtype <U1 with values that do not fit torch.int64"),
        ({"a": [[1], [1, 2]], "b": 1}, "sample 1 of a batch has 'a' of type list that is no array of numbers"),
        ({"a": [1], "b": None}, "sample 1 of a batch has 'b' of type NoneType that is no array of numbers"),
        ({"a": [1]}, "sample 1 of a batch has no 'b': it has a; samples must be dicts with all names"),
        ([1, 2], "sample 1 of a batch has no 'a': it is a <class 'list'>; samples must be dicts with all names"),
        ({"a": [0.5], "b": 1}, "'a' of dtype float64 with values that do not fit torch.int64"),
        ({"a": [[1]], "b": 1}, "'a' of shape \\(1, 1\\); jagged values must have one dimension"),
        ({"a": [1], "b": [1, 2]}, "sample 1 of a batch has 'b' of shape \\(2,\\) and torch.int64"),
        ({"a": [1], "b": 1, "c": [2**31]}, "'c' of dtype int64 with values that do not fit torch.int32"),
        ({"a": [1], "b": 1, "d": 0.7}, "'d' of dtype float64 with values that do not fit"),
    ],
)
def test_sample_that_does_not_fit_is_an_error(sample: Any, message: str) -> None:
    declared = {"a": jagged(), "b": dense(), "c": jagged(torch.int32, field="narrow"), "d": dense(dtype=torch.int64)}
    fitting = {"a": [], "b": 1, "c": [2**31 - 1], "d": 0}
    assert JaggedCollate(declared)([fitting]).narrow.values().tolist() == [2**31 - 1]
    names = ("a", "b", *(set(sample) & {"c", "d"}))
    with pytest.raises(DataError, match=message):
        JaggedCollate({name: declared[name] for name in names})([fitting, sample])


@pytest.mark.parametrize("declared", [dense(), dense(dtype=torch.float32)])
def test_what_is_done_to_a_batch_changes_neither_the_samples_nor_other_batches(declared: Any) -> None:
    samples: list[dict[str, Any]] = [{"a": np.arange(3), "b": torch.tensor([0.5])}]
    collate = JaggedCollate({"a": jagged(max_length=4), "b": declared}, batch_size=2)
    batch: Any = collate(samples)
    batch.features.values().fill_(9)
    batch.features.keys().append("c")
    batch.b.fill_(9)
    for own in (batch.length_limits, batch.max_lengths):
        own["a"] = own["b"] = 9
    after = collate(samples)
    assert after.features.values().tolist() == samples[0]["a"].tolist() == [0, 1, 2]
    assert after.features.keys() == ["a"]
    assert after.b.tolist() == [[0.5], [0]]
    assert samples[0]["b"].tolist() == [0.5]
    assert (after.length_limits, after.max_lengths) == ({"a": 4}, {"a": 3})
