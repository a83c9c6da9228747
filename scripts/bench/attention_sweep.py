"""Time attention over batch sizes and lengths on one GPU, as heat maps.

python scripts/bench/attention_sweep.py
"""

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from attention_bench.sweep import Sweep

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from evenrank.cli import console
from evenrank.cli.main import run_command

BATCH_SIZES = tuple(2**power for power in range(8))
LENGTHS = tuple(2**power for power in range(6, 13))


def main(
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 256,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    attention: Annotated[
        str, typer.Option(help="An attention of examples/hstu: triton, triton-by-sample or padded.")
    ] = "triton",
    seconds: Annotated[
        float, typer.Option(min=0, help="At most about this long for each pass of a cell, with fewer runs if needed.")
    ] = 3.0,
    out: Annotated[Path, typer.Option(help="Folder for sweep.json and the plots.")] = Path("out/attention-sweep"),
    report_only: Annotated[bool, typer.Option("--report-only", help="Draw the sweep.json that is there.")] = False,
) -> None:
    """Time HSTU attention on one GPU for 1 to 128 samples of 64 to 4,096 tokens, in powers of two.

    Writes sweep.json and one heat map for each direction (forward.png, backward.png, both.png): cells show TFLOP/s and
    milliseconds, and are coloured by MFU. Times are medians of 50 runs after 10 warm-up runs, each on a level-2 cache
    that holds nothing of the last; the JSON has the runs made. `both` is the sum of forward and backward. A cell that
    runs out of memory ends its row.

    FLOPs are those of causal attention: two matrix products per pair of tokens in the forward pass. TFLOP/s count 2.5
    times as many in the backward pass, as is usual for kernels that compute the scores again, and MFU 2 times.
    Examples:

    \b
        python scripts/bench/attention_sweep.py
        python scripts/bench/attention_sweep.py --attention triton-by-sample --out out/by-sample
        python scripts/bench/attention_sweep.py --report-only
    """
    # Imported here, because `--help` does not need torch.
    from attention_bench.heat_maps import heat_map
    from attention_bench.sweep import DIRECTIONS, Sweep
    from rendering import figures

    path = out / "sweep.json"
    if not report_only:
        _run(attention, heads=heads, head_dim=head_dim, dtype=dtype, seconds=seconds).save(path)
    sweep = Sweep.load(path)
    for direction in DIRECTIONS:
        figures.save(heat_map(sweep, direction), out / f"{direction}.png")
    console.print_result(f"wrote {path} and {', '.join(f'{direction}.png' for direction in DIRECTIONS)} in its folder")


def _run(name: str, *, heads: int, head_dim: int, dtype: str, seconds: float) -> "Sweep":
    import torch

    from attention_bench.sweep import Sweep, measure_cells
    from attention_bench.timing import CudaTimer, Heads, parse_dtype, require_cuda, time_passes
    from evenrank.training import device_peaks
    from hstu.attentions import ATTENTIONS

    shape = Heads(count=heads, head_dim=head_dim, dtype=parse_dtype(dtype))
    attention = ATTENTIONS[name]
    require_cuda()
    peak = device_peaks().flops(shape.dtype)
    with console.steps(name, len(BATCH_SIZES) * len(LENGTHS)) as on_cell:
        cells = measure_cells(
            functools.partial(time_passes, attention, heads=shape, timer=CudaTimer(seconds=seconds)),
            shape,
            batch_sizes=BATCH_SIZES,
            lengths=LENGTHS,
            peak=peak,
            on_cell=on_cell,
        )
    return Sweep(
        attention=name,
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        peak_tflops=peak / 1e12,
        seconds_per_pass=seconds,
        batch_sizes=BATCH_SIZES,
        lengths=LENGTHS,
        cells=cells,
    )


if __name__ == "__main__":
    run_command(main)
