"""What ranks tell each other of their steps."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenrank.dataloader.balance.exchange.exchange import Handle
from evenrank.dataloader.balance.ranks.metadata import HEADER, new_message, started_steps
from evenrank.dataloader.balance.step_planner import _hash_of, read_steps
from evenrank.dataloader.batches.padding import pad_batch
from evenrank.dataloader.batches.schema import lengths_of, schema_of
from tests.dataloader.balance.costs import rich_tokens
from tests.dataloader.rich_batch import RichBatch, rich_batch


def test_metadata_of_several_steps_survives_encoding() -> None:
    batch = rich_batch([[(1, 2), (3, 4)], [(5, 6), (7, 8)]])
    message = new_message(schema := schema_of(batch))
    words: dict[str, Any] = {"started": 1, "num_real": 2, "epoch": 3, "step": 4, "position": 2**40, "plan_hash": 6}
    words |= {"schema_hash": [2**62, 9], "status": [1, 0], "ended": [1, 0], "loader_hash": 5, "cost_decisions": 8}
    words |= {"costs": [[7, 2**61], [0, 1]], "tokens": [[0, 2**31 - 1], [2, 3]]}
    words["lengths"] = np.stack([lengths_of(batch), 2 * lengths_of(batch)])
    for name, values in words.items():
        message[name][:2] = values
    of_ranks = np.stack([message.view(np.uint8)] * 3)
    steps = started_steps(of_ranks, schema)
    assert steps.shape == (2, 3)
    for name, values in words.items():
        for rank in range(3):
            assert np.array_equal(steps[name][:, rank], np.broadcast_to(values, message[name][:2].shape))
    # The wire format: the words of the header, then costs, tokens and lengths.
    in_order = [words[name] if np.isscalar(words[name]) else words[name][0] for name in HEADER]
    assert of_ranks[0, :88].view(np.int64).tolist() == in_order == [2**62, 1, 1, 2, 1, 3, 4, 2**40, 5, 6, 8]
    assert of_ranks[0, 88:104].view(np.int64).tolist() == [7, 2**61]
    assert of_ranks[0, 104:144].view(np.int32).tolist() == [0, 2**31 - 1, 1, 5, 2, 6, 3, 7, 4, 8]
    assert of_ranks.shape[1] == 8 * 144


FIRST = rich_batch([[(1, 2), (3, 4)], [(5, 6), (7, 8)]])
SECOND = rich_batch([[(2, 0), (9, 1)]], first_id=10).replace(epoch=1, step=5, position=6)


def _read(
    *steps: Handle, cost: Any = rich_tokens, error: Exception | None = None
) -> tuple[Any, list[Exception | None]]:
    message, errors = read_steps(steps, schema_of(FIRST), cost, world_size=2, error=error)
    assert not message[len(steps) :].view(np.uint8).any()
    return message[: len(steps)], errors


def test_steps_are_read_together_as_each_alone_and_a_cost_sees_no_padding() -> None:
    seen: list[int] = []

    def cost(lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        seen.append(len(num_candidates))
        return rich_tokens(lengths, num_candidates)

    padded: RichBatch = pad_batch(SECOND, 2)
    together, errors = _read(Handle(FIRST), Handle(padded), Handle(None), cost=cost)
    assert seen == [3]
    assert errors == [None] * 3
    for index, batch in enumerate((FIRST, SECOND, None)):
        (alone,), _ = _read(Handle(batch))
        assert together[index] == alone
    schema_hash = _hash_of(schema_of(FIRST))
    assert [step.tolist()[: len(HEADER)] for step in together] == [
        (schema_hash, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0),
        (schema_hash, 0, 0, 1, 1, 1, 5, 6, 0, 0, 0),
        (schema_hash, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0),
    ]
    assert together["lengths"][0].tolist() == lengths_of(FIRST).tolist()
    assert together["lengths"][1].tolist() == [[2, 0], [0, 0], [9, 0], [1, 0]]
    assert together["costs"].tolist() == [[1 + 2 * 2 + 3 + 4, 5 + 2 * 6 + 7 + 8], [2 + 0 + 9 + 1, 0], [0, 0]]


def test_errors_of_a_step_are_its_own_and_one_of_the_loader_is_that_of_all() -> None:
    def refuses_9(lengths: Mapping[str, NDArray[np.int64]], num_candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        if any((values == 9).any() for values in lengths.values()):
            raise ValueError("9 is too much")
        return rich_tokens(lengths, num_candidates)

    longer, other = rich_batch([[(1, 1), (1, 1)]] * 3), FIRST.replace(ids=FIRST.ids.int())
    failing = Handle(SECOND), Handle(None, OSError("no disk")), Handle(other), Handle(longer)
    steps, errors = _read(Handle(FIRST), *failing, Handle(FIRST), Handle(None), cost=refuses_9)
    of_cost, of_loader, of_batch, of_rows = errors[1:5]
    assert str(of_cost).startswith("the cost test_errors_of_a_step_are_its_own_and_one_of_the_loader_is_that_of_all.")
    assert str(of_cost).endswith("raised ValueError: 9 is too much; the batch has the keys a, b, weighted.a, c")
    assert isinstance(of_loader, OSError)
    assert "a batch differs from the first one: ids" in str(of_batch)
    assert str(of_rows).startswith("a batch has 3 rows, but balanced batches have 2: ")
    assert errors[0] is errors[5] is errors[6] is None
    assert steps["status"].tolist() == [0, 1, 1, 1, 1, 0, 0]
    assert steps["ended"].tolist() == [0] * 6 + [1]
    assert steps["num_real"].tolist() == [2, 0, 0, 0, 0, 2, 0]
    assert steps["costs"][0].tolist() == steps["costs"][5].tolist() == _read(Handle(FIRST))[0]["costs"][0].tolist()
    assert not steps["lengths"][4].any()
    failed, _ = _read(Handle(FIRST), Handle(None), error=KeyError("shard"))
    assert [*zip(failed["status"], failed["ended"], strict=True)] == [(1, 0), (1, 0)]
