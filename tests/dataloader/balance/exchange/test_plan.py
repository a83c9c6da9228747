from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader.balance.exchange.collectives import AllToAll
from evenrank.dataloader.balance.exchange.device import ExchangeDevice
from evenrank.dataloader.balance.exchange.exchange import Exchange
from evenrank.dataloader.balance.exchange.plan import ALIGNMENT, make_plan, sample_bytes
from evenrank.dataloader.balance.partition.strategies import Assignment
from evenrank.dataloader.balance.ranks.metadata import Header, StepMetadata, decode, encode
from evenrank.dataloader.batches.padding import pad_batch
from evenrank.dataloader.batches.schema import lengths_of, schema_of
from tests.dataloader.rich_batch import RichBatch, rich_batch, samples_of


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[RichBatch], Assignment]:
    """Draw padded batches of all ranks, and any assignment within the batch size."""
    world_size, batch_size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rank_of = np.array(draw(st.permutations([*range(world_size)] * batch_size)), dtype=np.int32)
    rank_of = rank_of.reshape(world_size, batch_size)
    pairs = st.tuples(st.integers(0, 5), st.integers(0, 5))
    batches = []
    for rank in range(world_size):
        rows = draw(st.lists(st.lists(pairs, min_size=2, max_size=2), max_size=batch_size))
        rank_of[rank, len(rows) :] = -1
        batches.append(pad_batch(rich_batch(rows, first_id=10 * rank), batch_size))
    return batches, Assignment(rank_of=rank_of)


def _metadata(batches: list[RichBatch]) -> StepMetadata:
    schema = schema_of(batches[0])
    zeros = np.zeros(schema.batch_size, dtype=np.int64)
    messages = []
    for batch in batches:
        header = Header(schema_hash=1, status=0, ended=0, num_real=batch.num_real)
        messages.append(encode(header, schema, costs=zeros, tokens=zeros, lengths=lengths_of(batch)))
    return decode(np.stack(messages), schema)


@settings(max_examples=200)
@given(worlds())
def test_an_exchange_moves_each_sample_complete_to_its_rank(world: tuple[list[RichBatch], Assignment]) -> None:
    batches, assignment = world
    world_size = len(batches)
    schema, metadata = schema_of(batches[0]), _metadata(batches)
    plans = [make_plan(schema, metadata, assignment, rank) for rank in range(world_size)]

    # Each plan sends what the others' plans expect, to the byte.
    sent = np.stack([plan.send_bytes for plan in plans])
    assert np.array_equal(sent, np.stack([plan.receive_bytes for plan in plans]).T)
    assert all((plan.send_offsets % ALIGNMENT == 0).all() for plan in plans)
    assert all(plan.send_bytes[rank] == 0 for rank, plan in enumerate(plans))  # samples that stay are not sent

    # An all-to-all in one process: split the send buffers into chunks, and concatenate them at the receivers.
    exchange = Exchange(AllToAll(), None, ExchangeDevice(), world_size=1)
    prepared = [exchange.prepare(batch, plan) for batch, plan in zip(batches, plans, strict=True)]
    in_flight = [exchange.launch(step) for step in prepared]
    pairs = zip(prepared, plans, strict=True)
    chunks = [torch.split(step.send_buffer, plan.send_bytes.tolist()) for step, plan in pairs]
    for rank in range(world_size):
        received = torch.cat([chunks[source][rank] for source in range(world_size)])
        step = replace(in_flight[rank], prepared=replace(prepared[rank], receive_buffer=received))
        exchange.finish(step)
        after = step.prepared.balanced_batch()
        assert isinstance(after, RichBatch)
        of_batches = zip(batches, assignment.rank_of, strict=True)
        of_rows = [row for batch, ranks in of_batches for row in zip(samples_of(batch), ranks, strict=False)]
        assert samples_of(after) == [sample for sample, new_rank in of_rows if new_rank == rank]
        assert schema_of(after) == schema
        assert lengths_of(after)[:, after.num_real :].sum() == 0
        assert after.ids[after.num_real :].eq(-1).all()
        assert after.matrix[after.num_real :].eq(0.5).all()
        assert after.loss_tokens == lengths_of(after)[-1].sum()
        assert after.world_loss_tokens == sum(batch.loss_tokens for batch in batches)


def test_metadata_survives_encoding() -> None:
    batch = rich_batch([[(1, 2), (3, 4)], [(5, 6), (7, 8)]])
    schema = schema_of(batch)
    numbers = {"num_real": 2, "num_rows": 6, "epoch": 3, "step": 4, "position": 2**40, "loader_hash": 5}
    header = Header(schema_hash=2**62, status=1, ended=1, **numbers)
    costs, tokens = np.array([7, 2**61]), np.array([0, 2**31 - 1])
    message = encode(header, schema, costs=costs, tokens=tokens, lengths=lengths_of(batch))
    metadata = decode(message[np.newaxis], schema)
    assert metadata.headers.tolist() == [[2**62, 1, 1, 2, 6, 3, 4, 2**40, 5]]
    assert metadata.header("position").tolist() == [2**40]
    assert metadata.num_real.tolist() == [2]
    assert metadata.costs.tolist() == [[7, 2**61]]
    assert metadata.tokens.tolist() == [[0, 2**31 - 1]]
    assert metadata.lengths.tolist() == [[[1, 5], [2, 6], [3, 7], [4, 8]]]


def test_the_bytes_of_a_sample_include_all_its_fields() -> None:
    batch = rich_batch([[(1, 2), (3, 4)], [(0, 0), (0, 0)]])
    dense = batch.ids.element_size() + 2 * batch.matrix.element_size() + 3 * batch.flags.element_size()
    first, weighted = batch.first.values().element_size(), batch.weighted.values().element_size()
    jagged = 3 * first + 7 * (weighted + batch.weighted.weights().element_size())
    assert sample_bytes(schema_of(batch), lengths_of(batch)).tolist() == [jagged + dense, dense]
