from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance import BalanceConfig
from evenrank.dataloader.balance.own_steps import LoadedStep, OwnSteps, read_steps
from evenrank.dataloader.balance.ranks.metadata import Header
from evenrank.dataloader.batches.padding import pad_batch
from evenrank.dataloader.batches.schema import lengths_of, schema_of
from tests.dataloader.balance.costs import rich_tokens
from tests.dataloader.rich_batch import RichBatch, rich_batch

FIRST = rich_batch([[(1, 2), (3, 4)], [(5, 6), (7, 8)]])
SECOND = rich_batch([[(2, 0), (9, 1)]], first_id=10).replace(epoch=1, step=5, position=6)
COMMON = Header(schema_hash=7, loader_hash=8)


def _read(loaded: list[LoadedStep], cost: Any = rich_tokens, error: Exception | None = None) -> OwnSteps:
    config = BalanceConfig(cost=cost)
    return read_steps(loaded, schema_of(FIRST), config, world_size=2, common=COMMON, error=error)


def test_steps_are_read_together_as_each_alone() -> None:
    together = _read([LoadedStep(FIRST), LoadedStep(SECOND), LoadedStep(None)])
    for index, batch in enumerate((FIRST, SECOND, None)):
        (header,), costs, tokens, lengths, (error,) = _read([LoadedStep(batch)])
        assert together.headers[index] == header
        assert together.costs[index].tolist() == costs[0].tolist()
        assert together.tokens[index].tolist() == tokens[0].tolist()
        assert together.lengths[index].tolist() == lengths[0].tolist()
        assert together.errors[index] is error is None
    assert together.headers == [
        Header(7, 0, 0, 2, 1, 0, 0, 0, 8),
        Header(7, 0, 0, 1, 1, 1, 5, 6, 8),
        Header(7, 0, 1, 0, 1, 0, 0, 0, 8),
    ]
    assert together.lengths[0].tolist() == lengths_of(FIRST).tolist()
    assert together.lengths[1].tolist() == [[2, 0], [0, 0], [9, 0], [1, 0]]
    assert together.costs[1].tolist() == [2 + 0 + 9 + 1, 0]


def _refuses_9(lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]) -> NDArray[np.int64]:
    if any((values == 9).any() for values in lengths.values()):
        raise ValueError("9 is too much")
    return rich_tokens(lengths, num_candidates)


def test_an_error_of_a_cost_is_that_of_its_own_step() -> None:
    steps = _read([LoadedStep(FIRST), LoadedStep(SECOND), LoadedStep(FIRST)], _refuses_9)
    raised = "the cost _refuses_9 raised ValueError: 9 is too much; the batch has the keys a, b, weighted.a, c"
    assert [error and str(error) for error in steps.errors] == [None, raised, None]
    assert [header.status for header in steps.headers] == [0, 1, 0]
    assert [header.num_real for header in steps.headers] == [2, 0, 2]
    assert steps.costs[0].tolist() == steps.costs[2].tolist() == _read([LoadedStep(FIRST)]).costs[0].tolist()


def test_errors_of_a_loader_of_a_batch_and_of_all_steps_are_kept() -> None:
    other = FIRST.replace(ids=FIRST.ids.int())
    steps = _read([LoadedStep(None, OSError("no disk")), LoadedStep(other), LoadedStep(FIRST)])
    assert [type(error) for error in steps.errors] == [OSError, ValueError, type(None)]
    assert "a batch differs from the first one: ids" in str(steps.errors[1])
    assert [(header.status, header.ended) for header in steps.headers] == [(1, 0), (1, 0), (0, 0)]
    failed = _read([LoadedStep(FIRST), LoadedStep(None)], error=KeyError("shard"))
    assert [(header.status, header.ended) for header in failed.headers] == [(1, 0), (1, 0)]


def test_a_cost_sees_samples_and_no_padding() -> None:
    seen: list[int] = []

    def cost(lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        seen.append(len(num_candidates))
        return np.full(len(num_candidates), 5)

    padded: RichBatch = pad_batch(SECOND, 2)
    steps = _read([LoadedStep(padded), LoadedStep(FIRST)], cost)
    assert seen == [3]
    assert steps.costs.tolist() == [[5, 0], [5, 5]]


def test_a_batch_of_more_rows_than_the_first_is_an_error_of_its_step() -> None:
    longer = rich_batch([[(1, 1), (1, 1)]] * 3)
    steps = _read([LoadedStep(longer), LoadedStep(FIRST)])
    assert str(steps.errors[0]).startswith("a batch has 3 rows, but balanced batches have 2: ")
    assert [header.status for header in steps.headers] == [1, 0]
    assert not steps.lengths[0].any()
    assert steps.lengths[1].any()
