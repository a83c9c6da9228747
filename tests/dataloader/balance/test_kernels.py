import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.dataloader.balance import kernels
from evenrank.dataloader.balance.copying import Moves, as_bytes, copy_on_cpu
from evenrank.dataloader.balance.kernels import copy_by_kernel, copy_by_operators


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A unit, and ranges one behind the other in the target: gap before each, and size, in units."""
    unit = draw(st.sampled_from([1, 2, 4, 8, 16]))
    length = st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 40_000 // unit))
    return unit, draw(st.lists(st.tuples(st.integers(0, 3), length), max_size=8))


def _moves(unit: int, ranges: list[tuple[int, int]], device: str) -> list[Moves]:
    """Two moves over the same ranges: in their order, and in the reverse one."""
    sizes = np.array([size for _, size in ranges], dtype=np.int64) * unit
    gaps = np.array([gap for gap, _ in ranges], dtype=np.int64) * unit
    starts = np.cumsum(sizes + gaps) - sizes
    end = int((sizes + gaps).sum())
    source = torch.from_numpy(np.random.default_rng(end).integers(0, 256, end, dtype=np.uint8)).to(device)
    return [
        Moves(
            source=source,
            target=torch.zeros(end, dtype=torch.uint8, device=device),
            source_starts=starts,
            target_starts=np.cumsum(sizes[order])[np.argsort(order)] - sizes,
            sizes=sizes,
        )
        for order in (np.arange(len(sizes)), np.arange(len(sizes))[::-1])
    ]


@settings(max_examples=60)
@given(layouts())
def test_operators_copy_what_the_loop_copies(layout: tuple[int, list[tuple[int, int]]]) -> None:
    expected, found = _moves(*layout, "cpu"), _moves(*layout, "cpu")
    copy_on_cpu(expected)
    copy_by_operators(found)
    assert all(torch.equal(one.target, other.target) for one, other in zip(expected, found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("copy", [copy_by_kernel, copy_by_operators], ids=["kernel", "operators"])
@settings(max_examples=150)
@given(layouts())
def test_on_a_gpu_the_same_bytes_are_copied(copy: object, layout: tuple[int, list[tuple[int, int]]]) -> None:
    expected, found = _moves(*layout, "cpu"), _moves(*layout, "cuda")
    copy_on_cpu(expected)
    assert kernels.triton is not None
    copy(found)  # type: ignore[operator]
    assert all(torch.equal(one.target, other.target.cpu()) for one, other in zip(expected, found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64, torch.bfloat16, torch.bool])
def test_rows_of_every_dtype_and_of_a_hundred_thousand_elements_arrive(dtype: torch.dtype) -> None:
    lengths = np.array([0, 100_000, 1, 0, 3, 99_999])
    values = torch.randint(0, 2, (int(lengths.sum()),)).to(dtype)
    size = values.element_size()
    there, copied = values.cuda(), torch.zeros_like(values, device="cuda")
    starts = (np.cumsum(lengths) - lengths) * size
    reverse = (int(lengths.sum()) - np.cumsum(lengths)) * size
    move = Moves(
        source=as_bytes(there),
        target=as_bytes(copied),
        source_starts=starts,
        target_starts=reverse,
        sizes=lengths * size,
    )
    copy_by_kernel([move])
    expected = torch.cat([part for part in reversed(values.split(lengths.tolist()))])
    assert torch.equal(copied.cpu(), expected)


def test_views_of_bytes_share_memory() -> None:
    values = torch.arange(3)
    as_bytes(values)[0] = 7
    assert values.tolist() == [7, 1, 2]
    assert as_bytes(torch.empty(0, 5)).tolist() == []
