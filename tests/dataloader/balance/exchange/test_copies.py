import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.dataloader.balance.exchange.device import (
    TILE_BYTES,
    addresses_of,
    as_bytes,
    copy_ranges,
    copy_with_kernel,
    count_tiles,
    write_tiles,
)

Copies = NDArray[np.int64]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Draw a unit in bytes, and adjacent ranges of the target: the gap before each and its length, in units."""
    unit = draw(st.sampled_from([1, 2, 4, 8, 16]))
    length = st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 400_000 // unit))
    return unit, draw(st.lists(st.tuples(st.integers(0, 3), length), max_size=8))


def _tiles(copies: Copies) -> Copies:
    tiles = np.empty((count_tiles(copies, TILE_BYTES), 4), dtype=np.int64)
    write_tiles(copies, TILE_BYTES, tiles)
    return tiles


def _copies(unit: int, ranges: list[tuple[int, int]]) -> tuple[Copies, list[torch.Tensor], torch.Tensor]:
    """Return copies of ranges, alternately from two sources, to a target in reverse order; the sources; the target."""
    gaps, sizes = np.array([(0, 0), *ranges]).T[:, 1:] * unit
    end = int((sizes + gaps).sum())
    starts = np.cumsum(sizes + gaps) - sizes
    targets = int(sizes.sum()) - np.cumsum(sizes)
    copies = np.stack([np.arange(len(sizes)) % 2, starts, targets, sizes], axis=1)
    rng = np.random.default_rng(end)
    sources = [torch.from_numpy(rng.integers(0, 256, end, dtype=np.uint8)) for _ in range(2)]
    expected = torch.zeros_like(sources[0])
    for index, (start, target, size) in enumerate(zip(starts, targets, sizes, strict=True)):
        expected[target : target + size] = sources[index % 2][start : start + size]
    return copies[sizes > 0], sources, expected


@pytest.mark.parametrize(("on_gpu", "count"), [(False, 60), pytest.param(True, 200, marks=pytest.mark.gpu)])
def test_every_range_is_copied(on_gpu: bool, count: int) -> None:
    """By the loop on the CPU, and by the kernel on a GPU."""

    @settings(max_examples=count)
    @given(layouts())
    def check(layout: tuple[int, list[tuple[int, int]]]) -> None:
        copies, sources, expected = _copies(*layout)
        copied = torch.zeros_like(expected, device="cuda" if on_gpu else "cpu")
        if on_gpu:
            on_device = [source.cuda() for source in sources]
            copy_with_kernel(as_bytes(torch.from_numpy(_tiles(copies))).cuda(), on_device, copied)
        else:
            copy_ranges(copies, addresses_of(sources), copied.data_ptr())
        assert torch.equal(copied.cpu(), expected)

    check()


def test_tiles_cover_each_range_once() -> None:
    copies = np.array([[1, 0, 3, 3], [1, 100, 40_000, 8192 * 2 + 1]])
    tiles = [[1, 100, 40_000, 8192], [1, 8292, 48_192, 8192], [1, 16_484, 56_384, 1]]
    assert _tiles(copies).tolist() == [[1, 0, 3, 3], *tiles]
