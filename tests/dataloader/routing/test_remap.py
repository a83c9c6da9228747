"""Remapped tables have the rows of each key where the new KeyMap looks for it."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError
from evenrank.dataloader.routing import MODES, KeyMap, remap


def _map_of(num_rows: int, world_size: int, mode: str | None) -> KeyMap | None:
    return mode and KeyMap(num_embeddings=num_rows, world_size=world_size, mode=mode)  # type: ignore[return-value,arg-type]


@given(
    num_rows=st.integers(1, 200),
    before=st.tuples(st.integers(1, 9), st.sampled_from([None, *MODES])),
    after=st.tuples(st.integers(1, 9), st.sampled_from([None, *MODES])),
    shape=st.sampled_from([(), (3,), (2, 2)]),
)
def test_every_key_keeps_its_row_and_back_gives_the_same_table(
    num_rows: int,
    before: tuple[int, str | None],
    after: tuple[int, str | None],
    shape: tuple[int, ...],
) -> None:
    maps = [_map_of(num_rows, *one) for one in (before, after)]
    table = torch.arange(num_rows * torch.Size(shape).numel()).reshape(num_rows, *shape)
    moved = remap(table, *maps)
    for key in range(num_rows):
        one = torch.tensor([key])
        old_row, new_row = (key if key_map is None else int(key_map(one)) for key_map in maps)
        assert torch.equal(moved[new_row], table[old_row])
    assert torch.equal(remap(moved, maps[1], maps[0]), table)


def test_the_result_is_a_new_tensor_without_a_gradient() -> None:
    table = torch.ones(3, 2, requires_grad=True)
    moved = remap(table, None, None)
    assert not moved.requires_grad
    moved.zero_()
    assert table.sum() == 6


@pytest.mark.parametrize("shape", [(5, 2), ()])
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_key_map_of_another_table_is_refused(shape: tuple[int, ...], side: str) -> None:
    maps = {"before": None, "after": None, side: KeyMap(num_embeddings=4, world_size=2, mode="roundrobin")}
    message = f"{side} is for num_embeddings=4, the table has the shape {list(shape)}; pass the KeyMap of this table"
    with pytest.raises(ConfigError, match=re.escape(message)):
        remap(torch.zeros(shape), **maps)
