"""A sweep over batch sizes and lengths: rates by hand, rows that end, and the file."""

import dataclasses
import functools
from pathlib import Path

import matplotlib.image
import pytest
import torch
from torch import Tensor

from attention_bench.heat_maps import heat_map
from attention_bench.sweep import DIRECTIONS, Cell, Speed, Sweep, measure_cells
from attention_bench.timing import Heads, Times, time_passes
from evenrank.core.errors import DataError
from hstu.attention import Sequences

HEADS = Heads(count=1, head_dim=4, dtype=torch.float32)
BATCH_SIZES, LENGTHS = (1, 2, 4), (2, 4, 8)


def _attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, *, scale_length: int) -> Tensor:
    """Attend, on a device that has memory for 8 tokens."""
    if sequences.num_tokens > 8:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return query + key + value


def _cells(peak: float = 1e6, steps: list[None] | None = None) -> tuple[Cell, ...]:
    steps = [] if steps is None else steps
    measure = functools.partial(
        time_passes, _attention, heads=HEADS, timer=lambda run: (run(), Times(ms=2.0, runs=50))[1], device="cpu"
    )
    return measure_cells(
        measure, HEADS, batch_sizes=BATCH_SIZES, lengths=LENGTHS, peak=peak, on_cell=lambda: steps.append(None)
    )


def _sweep(cells: tuple[Cell, ...]) -> Sweep:
    return Sweep(
        attention="triton",
        heads=1,
        head_dim=4,
        dtype="float32",
        device="a GPU",
        torch="2.13",
        peak_tflops=1e-6,
        seconds_per_pass=3.0,
        batch_sizes=BATCH_SIZES,
        lengths=LENGTHS,
        cells=cells,
    )


def test_a_cell_that_runs_out_of_memory_ends_its_row() -> None:
    steps: list[None] = []
    cells = _cells(steps=steps)
    fits = {(cell.batch_size, cell.length): cell.speeds is not None for cell in cells}
    assert fits == {
        (1, 2): True, (1, 4): True, (1, 8): True,
        (2, 2): True, (2, 4): True, (2, 8): False,
        (4, 2): True, (4, 4): False,
    }  # fmt: skip
    assert len(steps) == 9  # the cell that was left out is done, too


def test_rates_are_those_by_hand() -> None:
    cell = _cells()[1]
    assert (cell.batch_size, cell.length) == (1, 4)
    assert cell.speeds is not None
    flops = 4 * 4 * 10  # 10 pairs
    forward, backward, both = (cell.speeds[direction] for direction in DIRECTIONS)
    assert [forward.ms, backward.ms, both.ms] == [2.0, 2.0, 4.0]
    assert both.runs == 50
    assert forward.mfu == pytest.approx(flops / 2e-3 / 1e6)
    assert backward.mfu == pytest.approx(2 * flops / 2e-3 / 1e6)
    assert both.mfu == pytest.approx(3 * flops / 4e-3 / 1e6)


def test_kernels_are_quoted_with_the_scores_that_they_compute_again() -> None:
    heads = Heads(count=4, head_dim=256, dtype=torch.bfloat16)
    (cell,) = measure_cells(
        lambda lengths: time_passes(
            _attention, [4], HEADS, timer=lambda run: Times(ms=1.0, runs=5), device="cpu"
        ),
        heads,
        batch_sizes=(32,),
        lengths=(2048,),
        peak=989.4e12,
        on_cell=lambda: None,
    )  # fmt: skip
    assert cell.speeds is not None
    flops = 4 * 1024 * 32 * 2048 * 2049 / 2
    assert [speed.tflops for speed in cell.speeds.values()] == pytest.approx(
        [flops / 1e9, 2.5 * flops / 1e9, 3.5 * flops / 2e9], rel=1e-4
    )
    assert cell.speeds["both"].mfu == pytest.approx(3 * flops / 2e-3 / 989.4e12, rel=1e-3)


def test_a_sweep_is_the_same_after_it_was_saved(tmp_path: Path) -> None:
    sweep = _sweep(_cells())
    path = tmp_path / "new" / "sweep.json"
    sweep.save(path)
    assert Sweep.load(path) == sweep
    assert sweep.speed(4, 4, "both") is None
    assert sweep.speed(4, 8, "both") is None
    assert sweep.speed(1, 8, "forward") is not None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "evenrank attention sweep", "version": 1, "cells": [{}]}', '{"format": 1']
)
def test_a_damaged_file_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(text)
    with pytest.raises(DataError, match="without --report-only") as caught:
        Sweep.load(path)
    assert str(path) in str(caught.value)


def test_another_version_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    with pytest.raises(DataError, match="without --report-only"):
        Sweep.load(path)
    path.write_text('{"format": "evenrank attention sweep", "version": 2}')
    with pytest.raises(DataError, match="version 2"):
        Sweep.load(path)


def _texts(sweep: Sweep) -> list[str]:
    axes = heat_map(sweep, "both").axes[0]
    return [text.get_text() for text in axes.texts]


def test_a_heat_map_writes_the_rates_and_hatches_what_does_not_fit(tmp_path: Path) -> None:
    speed = Speed(ms=1.0, runs=50, tflops=12.345, mfu=0.5)
    fast = dataclasses.replace(speed, tflops=345.6, mfu=0.9)
    cells = (
        Cell(batch_size=1, length=2, speeds=dict.fromkeys(DIRECTIONS, speed)),
        Cell(batch_size=1, length=4, speeds=dict.fromkeys(DIRECTIONS, fast)),
        Cell(batch_size=1, length=8, speeds=None),
        Cell(batch_size=2, length=2, speeds=None),
        Cell(batch_size=4, length=2, speeds=None),
    )
    assert _texts(_sweep(cells)) == ["12.3", "1.00 ms", "346", "1.00 ms"]
    figure = heat_map(_sweep(cells), "both")
    assert sum(bool(patch.get_hatch()) for patch in figure.axes[0].patches) == 7
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["out of memory"]
    figure.savefig(tmp_path / "both.png")
    assert matplotlib.image.imread(tmp_path / "both.png").std() > 0.05


def test_a_sweep_in_which_nothing_fits_is_drawn() -> None:
    assert _texts(_sweep(tuple(Cell(batch_size=size, length=2, speeds=None) for size in BATCH_SIZES))) == []
