from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.exchange.exchange import Handle
from evenrank.dataloader.balance.ranks.metadata import HEADER, StepMetadata
from evenrank.dataloader.balance.step_planner import _hash_of, read_steps
from evenrank.dataloader.batches.padding import pad_batch
from evenrank.dataloader.batches.schema import lengths_of, schema_of
from tests.dataloader.balance.costs import rich_tokens
from tests.dataloader.rich_batch import RichBatch, rich_batch

FIRST = rich_batch([[(1, 2), (3, 4)], [(5, 6), (7, 8)]])
SECOND = rich_batch([[(2, 0), (9, 1)]], first_id=10).replace(epoch=1, step=5, position=6)


def _read(
    steps: list[Handle], cost: Any = rich_tokens, error: Exception | None = None
) -> tuple[StepMetadata, list[Exception | None]]:
    message, errors = read_steps(steps, schema_of(FIRST), cost, world_size=2, error=error)
    assert not message[len(steps) :].view(np.uint8).any()
    return message[: len(steps)], errors


def test_steps_are_read_together_as_each_alone() -> None:
    together, errors = _read([Handle(FIRST), Handle(SECOND), Handle(None)])
    for index, batch in enumerate((FIRST, SECOND, None)):
        (alone,), (error,) = _read([Handle(batch)])
        assert together[index] == alone
        assert errors[index] is error is None
    schema_hash = _hash_of(schema_of(FIRST))
    assert [step.tolist()[: len(HEADER)] for step in together] == [
        (schema_hash, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0),
        (schema_hash, 0, 0, 1, 1, 1, 5, 6, 0, 0, 0),
        (schema_hash, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0),
    ]
    assert together["lengths"][0].tolist() == lengths_of(FIRST).tolist()
    assert together["lengths"][1].tolist() == [[2, 0], [0, 0], [9, 0], [1, 0]]
    assert together["costs"][1].tolist() == [2 + 0 + 9 + 1, 0]


def _refuses_9(lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]) -> NDArray[np.int64]:
    if any((values == 9).any() for values in lengths.values()):
        raise ValueError("9 is too much")
    return rich_tokens(lengths, num_candidates)


def test_an_error_of_a_cost_is_that_of_its_own_step() -> None:
    steps, errors = _read([Handle(FIRST), Handle(SECOND), Handle(FIRST)], _refuses_9)
    raised = "the cost _refuses_9 raised ValueError: 9 is too much; the batch has the keys a, b, weighted.a, c"
    assert [error and str(error) for error in errors] == [None, raised, None]
    assert steps["status"].tolist() == [0, 1, 0]
    assert steps["num_real"].tolist() == [2, 0, 2]
    assert steps["costs"][0].tolist() == steps["costs"][2].tolist() == _read([Handle(FIRST)])[0]["costs"][0].tolist()


def test_errors_of_a_loader_of_a_batch_and_of_all_steps_are_kept() -> None:
    other = FIRST.replace(ids=FIRST.ids.int())
    steps, errors = _read([Handle(None, OSError("no disk")), Handle(other), Handle(FIRST)])
    assert [type(error) for error in errors] == [OSError, ValueError, type(None)]
    assert "a batch differs from the first one: ids" in str(errors[1])
    assert [*zip(steps["status"], steps["ended"], strict=True)] == [(1, 0), (1, 0), (0, 0)]
    failed, _ = _read([Handle(FIRST), Handle(None)], error=KeyError("shard"))
    assert [*zip(failed["status"], failed["ended"], strict=True)] == [(1, 0), (1, 0)]


def test_a_cost_sees_samples_and_no_padding() -> None:
    seen: list[int] = []

    def cost(lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        seen.append(len(num_candidates))
        return np.full(len(num_candidates), 5)

    padded: RichBatch = pad_batch(SECOND, 2)
    steps, _ = _read([Handle(padded), Handle(FIRST)], cost)
    assert seen == [3]
    assert steps["costs"].tolist() == [[5, 0], [5, 5]]


def test_a_batch_of_more_rows_than_the_first_is_an_error_of_its_step() -> None:
    longer = rich_batch([[(1, 1), (1, 1)]] * 3)
    steps, errors = _read([Handle(longer), Handle(FIRST)])
    assert str(errors[0]).startswith("a batch has 3 rows, but balanced batches have 2: ")
    assert steps["status"].tolist() == [1, 0]
    assert not steps["lengths"][0].any()
    assert steps["lengths"][1].any()
