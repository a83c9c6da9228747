import itertools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.dataloader.balance.config import EXCHANGES
from evenrank.dataloader.balance.exchange.device import ALIGNMENT, ExchangeDevice, addresses_of, copy_ranges
from evenrank.dataloader.balance.exchange.exchange import Exchange, Handle
from evenrank.dataloader.balance.exchange.fields import sample_bytes, wire_format
from evenrank.dataloader.balance.exchange.layout import lay_out, new_rows
from evenrank.dataloader.batches.batch import LossKey
from evenrank.dataloader.batches.padding import pad_batch
from evenrank.dataloader.batches.schema import lengths_of, schema_of
from tests.dataloader.rich_batch import RichBatch, rich_batch, samples_of


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[list[RichBatch]], NDArray[np.int32]]:
    """Draw one or two padded batches of all ranks, and any assignment of as many rows as batches have."""
    world_size, batch_size, num_batches = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    rows_of_ranks = [*range(world_size)] * batch_size
    rank_of = np.array(draw(st.permutations(rows_of_ranks + [-1] * (num_batches - 1) * len(rows_of_ranks))))
    rank_of = rank_of.reshape(world_size, num_batches, batch_size).astype(np.int32)
    pairs = st.tuples(st.integers(0, 5), st.integers(0, 5))
    batches: list[list[RichBatch]] = [[] for _ in range(world_size)]
    for rank, number in itertools.product(range(world_size), range(num_batches)):
        rows = draw(st.lists(st.lists(pairs, min_size=2, max_size=2), max_size=batch_size))
        rank_of[rank, number, len(rows) :] = -1
        batches[rank].append(pad_batch(rich_batch(rows, first_id=20 * rank + 10 * number), batch_size))
    return batches, rank_of.reshape(world_size, -1)


class _TiledDevice(ExchangeDevice):
    """Copies by tiles, as the kernel of a GPU does."""

    tile_bytes = 24

    def copy(
        self, copies: NDArray[np.int64], tiles: torch.Tensor, sources: Sequence[torch.Tensor], target: torch.Tensor
    ) -> None:
        copy_ranges(tiles.numpy().view(np.int64).reshape(-1, 4), addresses_of(sources), target.data_ptr())


@pytest.mark.parametrize(
    ("collective", "device"), [*((name, ExchangeDevice) for name in EXCHANGES), ("all-to-all", _TiledDevice)]
)
@settings(max_examples=120)
@given(world=worlds())
def test_an_exchange_moves_each_sample_complete_to_its_rank(
    world: tuple[list[list[RichBatch]], NDArray[np.int32]], collective: str, device: type[ExchangeDevice]
) -> None:
    batches, rank_of = world
    schema = schema_of(batches[0][0])
    lengths = np.stack([np.concatenate([*map(lengths_of, of_rank)], axis=1) for of_rank in batches])
    group: Any = SimpleNamespace(is_alone=False)  # chunks are moved here, not by a group
    exchanges = [Exchange(collective, group, device(), rank=rank) for rank in range(len(batches))]
    prepared = [Handle(of_rank[0]) for of_rank in batches]
    for exchange, step, of_rank in zip(exchanges, prepared, batches, strict=True):
        exchange.prepare(step, of_rank, schema, rank_of, lengths)
    layouts: list[Any] = [step.layout for step in prepared]

    # Each rank sends what the others expect, to the byte.
    sent, expected = (np.stack([getattr(one, name) for one in layouts]) for name in ("send_bytes", "receive_bytes"))
    assert np.array_equal(np.broadcast_to(sent, expected.shape), expected.T)
    assert all((layout.chunk_starts % ALIGNMENT == 0).all() for layout in layouts)
    if collective == "all-to-all":  # samples that stay are not sent
        assert not sent.diagonal().any()

    chunks = [
        torch.split(step.host_buffer[: layout.send_bytes.sum()], layout.send_bytes.tolist())
        for step, layout in zip(prepared, layouts, strict=True)
    ]
    of_all, world_loss_tokens = 0, set()
    for rank, (exchange, step) in enumerate(zip(exchanges, prepared, strict=True)):
        step.uploaded = step.host_buffer
        step.received = torch.cat([of_source[rank % len(of_source)] for of_source in chunks])
        exchange.finish(step)
        after = step.batch
        assert isinstance(after, RichBatch)
        of_batches = zip(itertools.chain(*batches), rank_of.reshape(-1, schema.batch_size), strict=True)
        of_rows = [row for batch, ranks in of_batches for row in zip(samples_of(batch), ranks, strict=False)]
        assert samples_of(after) == [sample for sample, new_rank in of_rows if new_rank == rank]
        assert schema_of(after) == schema
        assert lengths_of(after)[:, after.num_real :].sum() == 0
        assert after.ids[after.num_real :].eq(-1).all()
        assert after.matrix[after.num_real :].eq(0.5).all()
        assert after.loss_tokens == lengths_of(after)[-1].sum()
        of_all += after.loss_tokens
        world_loss_tokens.add(after.world_loss_tokens)
    assert world_loss_tokens == {of_all}


def test_a_finished_step_that_is_kept_holds_no_buffer_of_its_exchange() -> None:
    batch = rich_batch([[(2, 1), (1, 2)], [(3, 1), (1, 1)]])
    group: Any = SimpleNamespace(is_alone=True)
    exchange, step = Exchange("all-to-all", group, ExchangeDevice(), rank=0), Handle(batch)
    exchange.prepare(step, [batch], schema_of(batch), np.zeros((1, 2), dtype=np.int32), lengths_of(batch)[np.newaxis])
    exchange.launch(step)
    buffers = [weakref.ref(buffer) for buffer in (step.host_buffer, step.uploaded, step.received)]
    assert all(buffer() is not None for buffer in buffers)
    exchange.finish(step)
    assert not any(buffer() is not None for buffer in buffers)
    assert isinstance(step.batch, RichBatch)
    assert samples_of(step.batch) == samples_of(batch)


def test_the_copies_of_a_step_do_not_depend_on_what_was_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [rich_batch([[(2, 1), (1, 2)], [(3, 1), (1, 1)]], first_id=10 * rank) for rank in range(2)]
    schema, lengths = schema_of(batches[0]), np.stack([lengths_of(batch) for batch in batches])
    rank_of = np.array([[1, 0], [0, 1]], dtype=np.int32)  # the first row that is received is not this rank's
    sections = wire_format(schema).sections
    arguments = (sections, rank_of, lengths, new_rows(sections, rank_of, lengths, rank_of.shape[1], 0), 0, True, 0)
    interpreted = lay_out.py_func  # type: ignore[attr-defined]
    expected = interpreted(*arguments).copies.tolist()  # compiles what it calls
    for value in range(1, 200):
        monkeypatch.setattr(np, "empty", partial(np.full, fill_value=value))
        assert interpreted(*arguments).copies.tolist() == expected


def test_each_sample_is_a_loss_token_where_a_batch_has_no_key_of_the_loss() -> None:
    batch = rich_batch([[(2, 1), (1, 2)], [(3, 3), (1, 1)], [(1, 1), (4, 4)]])
    schema, group = schema_of(batch), cast(Any, SimpleNamespace(is_alone=True))
    for loss_key, loss_tokens in ((schema.loss_key, 2 + 1 + 4), (LossKey("first", "b", skip=1), 0 + 2 + 0), (None, 3)):
        exchange = Exchange("all-to-all", group, ExchangeDevice(), rank=0)
        step, rank_of = Handle(batch), np.zeros((1, 3), dtype=np.int32)
        exchange.prepare(step, [batch], replace(schema, loss_key=loss_key), rank_of, lengths_of(batch)[np.newaxis])
        assert step.layout is not None
        assert (step.layout.loss_tokens, step.layout.world_loss_tokens) == (loss_tokens, loss_tokens)


def test_the_bytes_of_a_sample_include_all_its_fields() -> None:
    batch = rich_batch([[(1, 2), (3, 4)], [(0, 0), (0, 0)]])
    dense = batch.ids.element_size() + 2 * batch.matrix.element_size() + 3 * batch.flags.element_size()
    first, weighted = batch.first.values().element_size(), batch.weighted.values().element_size()
    jagged = 3 * first + 7 * (weighted + batch.weighted.weights().element_size())
    assert sample_bytes(schema_of(batch), lengths_of(batch)).tolist() == [jagged + dense, dense]
