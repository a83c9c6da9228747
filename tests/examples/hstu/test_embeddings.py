"""Sharded and replicated tables train like those of one process; initial values; rows of equal length."""

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec import EmbeddingConfig

import hstu.embeddings
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor
from hstu.embeddings import EQUAL_ROWS, EqualRows, fill_rows
from tests.examples.sharded_model import RATE, Model, balanced, batches_of, distribute, join, scaled, weights_of
from tests.ranks import RankPool

SHARDED_TABLES = {1: 3, 20: 1, 1000: 0}  # by the number of rows from which on tables are sharded


def _train_sharded(rank: int, world_size: int, device_type: str) -> dict[int, Any]:
    """Return, for each division of the tables, the weights after training."""
    logging.disable(logging.WARNING)
    device = join(rank, device_type)
    results = {}
    for threshold in SHARDED_TABLES:
        parallel, optimizer = distribute(Model(min_sharded_rows=threshold), device)
        assert set(optimizer.params) == {name for name, _ in parallel.named_parameters()}
        with balanced(batches_of(rank, world_size), device) as batches:
            for batch in batches:
                optimizer.zero_grad()
                scaled(parallel(batch), batch).backward()
                optimizer.step()
        results[threshold] = weights_of(parallel)
    return results


def _train_in_one_process(world_size: int) -> dict[str, Any]:
    model = Model(min_sharded_rows=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batches in zip(*(batches_of(rank, world_size) for rank in range(world_size)), strict=True):
        optimizer.zero_grad()
        losses = torch.stack([model(batch)[0].sum() for batch in batches])
        (losses.sum() / sum(batch.loss_tokens for batch in batches)).backward()
        optimizer.step()
    return {name.split(".")[-2]: weight.detach().numpy() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("pool", "device_type"), [("ranks", "cpu"), pytest.param("gpu_ranks", "cuda", marks=pytest.mark.multi_gpu)]
)
@pytest.mark.processes
def test_sharded_and_replicated_tables_train_like_those_of_one_process(
    request: pytest.FixtureRequest, pool: str, device_type: str
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    results = ranks.run(2, _train_sharded, device_type)
    expected = _train_in_one_process(len(results))
    untrained = {name.split(".")[-2]: weight.detach().numpy() for name, weight in Model().named_parameters()}
    assert all(np.abs(expected[name] - untrained[name]).max() > 0.02 for name in expected)
    for threshold, num_sharded in SHARDED_TABLES.items():
        by_rank = [result[threshold] for result in results]
        names = {name.split(".")[-2]: name for name in by_rank[0]}
        assert set(names) == set(expected)
        assert sum(".sharded." in name for name in by_rank[0]) == num_sharded
        for short, name in names.items():
            shares = [weights[name] for weights in by_rank]
            # A sharded table has other rows on each rank, any other weight is the same on all.
            if ".sharded." in name:
                assert all(len(rows) < len(expected[short]) for share in shares for _, rows in share)
                shares = [sorted((part for share in shares for part in share), key=lambda part: part[0])]
            for share in shares:
                trained = np.concatenate([rows for _, rows in share])
                np.testing.assert_allclose(trained, expected[short], rtol=1e-4, atol=1e-6, err_msg=name)


TABLE_ROWS = 50


def _fill(
    first: int, last: int, *, name: str = "items", seed: int = 3, rows: int = TABLE_ROWS, device: str = "cpu"
) -> Tensor:
    table = EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=["item_id"])
    part = torch.full((last - first, 4), math.nan, device=device)
    fill_rows(part, table, first_row=first, seed=seed)
    return part


@settings(max_examples=40)
@given(cuts=st.lists(st.integers(0, TABLE_ROWS), max_size=5).map(sorted), block=st.integers(3, TABLE_ROWS + 10))
def test_initial_values_of_parts_are_those_of_the_whole_table(cuts: list[int], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hstu.embeddings, "BLOCK_ROWS", block)
        parts = [_fill(first, last) for first, last in zip([0, *cuts], [*cuts, TABLE_ROWS], strict=True)]
        assert torch.equal(torch.cat(parts), _fill(0, TABLE_ROWS))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_initial_values_are_of_the_tables_own_distribution_and_state(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    before = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    values = _fill(60_000, 75_000, rows=75_000, device=device)  # over the end of a block
    torch.testing.assert_close([torch.get_rng_state(), *torch.cuda.get_rng_state_all()], before, rtol=0, atol=0)
    limit = 75_000**-0.5  # TorchRec's default
    assert float(values.abs().max()) == pytest.approx(limit, rel=1e-3)
    assert float(values.mean()) == pytest.approx(0, abs=0.02 * limit)
    # Rows, blocks, tables and seeds differ.
    monkeypatch.setattr(hstu.embeddings, "BLOCK_ROWS", 16)
    drawn = torch.cat([_fill(0, TABLE_ROWS), _fill(0, TABLE_ROWS, name="users"), _fill(0, TABLE_ROWS, seed=4)])
    assert drawn.unique().numel() > 0.99 * drawn.numel()


def test_equal_rows_keep_the_values_and_differ_by_one_at_most() -> None:
    lengths = np.array([[3000, 1, 0], [0, 0, 0], [2, 3, 5]], dtype=np.int32)
    features = keyed_jagged_tensor(["item", "empty", "user"], torch.arange(lengths.sum()), lengths)
    divided = EqualRows()(features)
    assert (divided.keys(), divided.stride()) == (features.keys(), EQUAL_ROWS)
    assert divided.length_per_key_or_none() == [3001, 0, 10]  # known to the host
    assert divided.lengths().dtype == features.lengths().dtype
    for key in features.keys():  # noqa: SIM118
        assert torch.equal(divided[key].values(), features[key].values())
    assert divided["item"].lengths().tolist() == [3] * (3001 - 2 * EQUAL_ROWS) + [2] * (3 * EQUAL_ROWS - 3001)
