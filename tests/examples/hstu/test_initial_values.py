"""Initial values depend on the seed, the table and the row alone."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec import EmbeddingConfig

import hstu.embeddings
from hstu.embeddings import fill_rows

ROWS = 50


def _fill(first: int, last: int, *, name: str = "items", seed: int = 3, rows: int = ROWS) -> Tensor:
    table = EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=["item_id"])
    part = torch.full((last - first, 4), math.nan)
    fill_rows(part, table, first_row=first, seed=seed)
    return part


@settings(max_examples=40)
@given(cuts=st.lists(st.integers(0, ROWS), max_size=5).map(sorted), block=st.integers(3, ROWS + 10))
def test_parts_are_those_of_the_whole_table(cuts: list[int], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hstu.embeddings, "BLOCK_ROWS", block)
        parts = [_fill(first, last) for first, last in zip([0, *cuts], [*cuts, ROWS], strict=True)]
        assert torch.equal(torch.cat(parts), _fill(0, ROWS))


def test_rows_blocks_tables_and_seeds_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hstu.embeddings, "BLOCK_ROWS", 16)
    drawn = torch.cat([_fill(0, ROWS), _fill(0, ROWS, name="users"), _fill(0, ROWS, seed=4)])
    assert drawn.unique().numel() > 0.99 * drawn.numel()


def test_values_are_those_of_the_tables_own_distribution() -> None:
    values = _fill(60_000, 75_000, rows=75_000)  # over the end of a block
    limit = 75_000**-0.5  # TorchRec's default
    assert float(values.abs().max()) == pytest.approx(limit, rel=1e-3)
    assert float(values.mean()) == pytest.approx(0, abs=0.02 * limit)


def test_the_random_state_is_left_as_it_was() -> None:
    def draw(*actions: Any) -> Tensor:
        torch.manual_seed(0)
        for action in actions:
            action()
        return torch.rand(3)

    assert torch.equal(draw(lambda: _fill(0, ROWS)), draw())


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_random_states_of_all_devices_are_left_as_they_were(device: str) -> None:
    table = EmbeddingConfig(name="items", num_embeddings=ROWS, embedding_dim=4, feature_names=["item_id"])
    before = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    fill_rows(torch.empty(ROWS, 4, device=device), table, first_row=0, seed=3)
    for state, was in zip([torch.get_rng_state(), *torch.cuda.get_rng_state_all()], before, strict=True):
        assert torch.equal(state, was)
