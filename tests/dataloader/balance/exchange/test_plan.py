from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader.balance.control.wire import Header, StepSizes, decode, encode
from evenrank.dataloader.balance.exchange.device import CpuCarrier
from evenrank.dataloader.balance.exchange.exchange import AllToAll
from evenrank.dataloader.balance.exchange.plan import ALIGNMENT, make_plan, sample_bytes
from evenrank.dataloader.balance.partition.strategies import Assignment
from evenrank.dataloader.batch import lengths_of, schema_of
from evenrank.dataloader.pad import pad_batch
from tests.dataloader.rich_batch import RichBatch, rich_batch, samples_of


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[RichBatch], Assignment]:
    """Padded batches of all ranks and any assignment that gives no rank more than a batch."""
    world_size, batch_size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    length = st.integers(0, 5)
    batches, counts = [], []
    for rank in range(world_size):
        rows = draw(st.lists(st.tuples(length, length, length, length), max_size=batch_size))
        pairs = [[(a, b), (c, d)] for a, b, c, d in rows]
        counts.append(len(rows))
        batches.append(pad_batch(rich_batch(pairs, first_id=10 * rank), batch_size))
    places = [rank for rank in range(world_size) for _ in range(batch_size)]
    dealt = draw(st.permutations(places))
    rank_of = np.full((world_size, batch_size), -1, dtype=np.int32)
    for rank, count in enumerate(counts):
        rank_of[rank, :count] = dealt[rank * batch_size : rank * batch_size + count]
    return batches, Assignment(rank_of=rank_of)


def _sizes(batches: list[RichBatch]) -> StepSizes:
    schema = schema_of(batches[0])
    messages = [
        encode(
            Header(schema_hash=1, status=0, ended=0, num_real=batch.num_real),
            schema,
            np.zeros(schema.batch_size, dtype=np.int64),
            lengths_of(batch),
        )
        for batch in batches
    ]
    return decode(np.stack(messages), schema)


@settings(max_examples=200)
@given(worlds())
def test_carrying_plans_out_moves_each_sample_whole_to_its_rank(world: tuple[list[RichBatch], Assignment]) -> None:
    batches, assignment = world
    world_size = len(batches)
    schema, sizes = schema_of(batches[0]), _sizes(batches)
    plans = [make_plan(schema, sizes, assignment, rank) for rank in range(world_size)]

    # What each plan sends is what the others' plans expect, to the byte.
    sent = np.stack([plan.send_bytes for plan in plans])
    assert np.array_equal(sent, np.stack([plan.receive_bytes for plan in plans]).T)
    assert all((plan.send_offsets % ALIGNMENT == 0).all() for plan in plans)
    assert all(plan.send_bytes[rank] == 0 for rank, plan in enumerate(plans))  # what stays is never sent

    # An all-to-all in one process: cut the send buffers into chunks, and hand them over.
    exchange = AllToAll(None, CpuCarrier())
    prepared = [exchange.prepare(batch, plan) for batch, plan in zip(batches, plans, strict=True)]
    flights = [exchange.launch(one) for one in prepared]
    chunks = [torch.split(one.sent, plan.send_bytes.tolist()) for one, plan in zip(prepared, plans, strict=True)]
    for rank in range(world_size):
        received = torch.cat([chunks[source][rank] for source in range(world_size)])
        # Without a process group, what was sent is what arrives.
        flight = replace(flights[rank], prepared=replace(prepared[rank], received=received))
        exchange.finish(flight)
        after = flight.prepared.balanced()
        assert isinstance(after, RichBatch)
        expected = [
            sample
            for source, batch in enumerate(batches)
            for row, sample in enumerate(samples_of(batch))
            if assignment.rank_of[source, row] == rank
        ]
        assert samples_of(after) == expected
        assert schema_of(after) == schema
        assert lengths_of(after)[:, after.num_real :].sum() == 0
        assert after.ids[after.num_real :].eq(-1).all()
        assert after.matrix[after.num_real :].eq(0.5).all()
        assert after.loss_tokens == lengths_of(after)[-1].sum()
        assert after.world_loss_tokens == sum(batch.loss_tokens for batch in batches)


def test_messages_are_read_as_they_were_written() -> None:
    batch = rich_batch([[(1, 2), (3, 4)], [(5, 6), (7, 8)]])
    schema = schema_of(batch)
    header = Header(schema_hash=2**62, status=1, ended=1, num_real=2, epoch=3, step=4, position=2**40, data=5)
    sizes = decode(encode(header, schema, np.array([7, 2**61]), lengths_of(batch))[np.newaxis], schema)
    assert sizes.headers.tolist() == [[2**62, 1, 1, 2, 3, 4, 2**40, 5]]
    assert sizes.header("position").tolist() == [2**40]
    assert sizes.num_real.tolist() == [2]
    assert sizes.costs.tolist() == [[7, 2**61]]
    assert sizes.lengths.tolist() == [[[1, 5], [2, 6], [3, 7], [4, 8]]]


def test_the_bytes_of_a_sample_are_those_of_all_its_fields() -> None:
    batch = rich_batch([[(1, 2), (3, 4)], [(0, 0), (0, 0)]])
    dense = sum(
        value[0].numel() * value.element_size() for _, value in batch.tensors() if isinstance(value, torch.Tensor)
    )
    first, weighted = batch.first.values().element_size(), batch.weighted.values().element_size()
    weights = batch.weighted.weights().element_size()
    assert sample_bytes(schema_of(batch), lengths_of(batch)).tolist() == [
        3 * first + 7 * (weighted + weights) + dense,
        dense,
    ]
