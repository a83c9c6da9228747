"""`Sweep`: times of an attention over batch sizes and lengths, as a JSON file."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

import json_records
from attention_bench.timing import KERNEL_BACKWARD, MODEL_BACKWARD, Heads, Passes

_KIND = ("evenrank attention sweep", 1)
FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
DIRECTIONS = (FORWARD, BACKWARD, BOTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What was measured of a direction."""

    ms: float
    """Median."""
    runs: int
    """Timed runs."""
    tflops: float
    """TFLOP/s, with a backward of 2.5 times the forward's operations, as kernels are quoted."""
    mfu: float
    """Fraction of the device's peak, with a backward of 2 times the forward's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A batch of samples of equal length."""

    batch_size: int
    length: int
    """Tokens of a sample."""
    speeds: dict[str, Speed] | None
    """By direction; None: it ran out of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The cells of all batch sizes and lengths, but for those that follow one that ran out of memory in its row."""

    attention: str
    """Name in `ATTENTIONS`."""
    heads: int
    head_dim: int
    dtype: str
    device: str
    """Name of the GPU."""
    torch: str
    """Version of PyTorch."""
    peak_tflops: float
    """Of the device in the dtype, of which MFU is a fraction."""
    seconds_per_pass: float
    """Fewer runs were made of a direction of a cell for which all would have taken longer."""
    batch_sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    cells: tuple[Cell, ...]

    def speed(self, batch_size: int, length: int, direction: str) -> Speed | None:
        """Return what was measured of a cell; None: it does not fit into memory."""
        for cell in self.cells:
            if (cell.batch_size, cell.length) == (batch_size, length):
                return cell.speeds[direction] if cell.speeds else None
        return None

    def save(self, path: Path) -> None:
        """Write it to a file, atomically, and make its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        json_records.save(path, _KIND, dataclasses.asdict(self), indent=1)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            DataError: the file is missing, damaged, or of another version.

        """
        return json_records.load(path, _KIND, cls._parse, remedy="run it again without --report-only")

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> Self:
        cells = tuple(_cell(cell) for cell in content.pop("cells"))
        content |= {name: tuple(content[name]) for name in ("batch_sizes", "lengths")}
        return cls(cells=cells, **content)


def _cell(content: dict[str, Any]) -> Cell:
    speeds = content.pop("speeds")
    return Cell(speeds=speeds and {name: Speed(**speeds[name]) for name in DIRECTIONS}, **content)


def measure_cells(
    measure: Callable[[Sequence[int]], Passes],
    heads: Heads,
    *,
    batch_sizes: Sequence[int],
    lengths: Sequence[int],
    peak: float,
    on_cell: Callable[[], None],
) -> tuple[Cell, ...]:
    """Time all cells; one that runs out of memory ends its row.

    Args:
        measure: times both passes on samples of these lengths.
        heads: the rest of the shape.
        batch_sizes: one row for each.
        lengths: columns, ascending.
        peak: FLOP/s of the device.
        on_cell: called after each cell, also those that are left out.

    """
    cells = []
    for batch_size in batch_sizes:
        fits = True
        for length in lengths:
            if fits:
                speeds = _speeds(measure, [length] * batch_size, heads, peak)
                cells.append(Cell(batch_size=batch_size, length=length, speeds=speeds))
                fits = speeds is not None
            on_cell()
    return tuple(cells)


def _speeds(
    measure: Callable[[Sequence[int]], Passes], lengths: Sequence[int], heads: Heads, peak: float
) -> dict[str, Speed] | None:
    try:
        passes = measure(lengths)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()  # nothing where CUDA has not been used
        return None
    flops, speeds = heads.forward_flops(lengths), {}
    for name, times, kernel, model in (
        (FORWARD, passes.forward, 1.0, 1.0),
        (BACKWARD, passes.backward, KERNEL_BACKWARD, MODEL_BACKWARD),
        (BOTH, passes.both, 1 + KERNEL_BACKWARD, 1 + MODEL_BACKWARD),
    ):
        per_second = flops / times.ms * 1e3
        speeds[name] = Speed(
            ms=round(times.ms, 4),
            runs=times.runs,
            tflops=round(kernel * per_second / 1e12, 2),
            mfu=round(model * per_second / peak, 4),
        )
    return speeds
