"""Time the attention of each rank's samples before and after balancing, on one GPU.

python scripts/bench/balanced_attention.py
"""

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from attention_bench.balanced import Draw

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from evenrank.cli import console
from evenrank.cli.main import run_command
from evenrank.core import files
from evenrank.core.errors import ConfigError
from evenrank.datasets.distributions import ClippedZipf, Distribution, Lognormal

DISTRIBUTIONS: dict[str, Distribution] = {
    "lognormal": Lognormal(mean=512, std=512, high=4096),
    "clipped Zipf": ClippedZipf(exponent=1.2, high=4096),
}
ATTENTION_NAMES = ("triton", "triton-by-sample")


def main(
    ranks: Annotated[int, typer.Option(min=1, help="Ranks to balance over; one GPU stands for all of them.")] = 8,
    samples: Annotated[int, typer.Option(min=1, help="Samples of a rank.")] = 32,
    draws: Annotated[int, typer.Option(min=1, help="Steps to draw from each distribution.")] = 5,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 256,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    seconds: Annotated[
        float, typer.Option(min=0, help="At most about this long for each pass of a rank, with fewer runs if needed.")
    ] = 0.25,
    out: Annotated[Path, typer.Option(help="Folder for balanced.jsonl, balanced.md and balanced.png.")] = Path(
        "out/balanced-attention"
    ),
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Report the balanced.jsonl that is there.")
    ] = False,
) -> None:
    """Time the attention of each rank's samples before and after balancing, and of equal lengths of the same cost.

    Events of a sample are lognormal (mean 512, std 512) or Zipf 1.2 with larger draws set to the limit, at most 4,096,
    and two tokens each. Samples are assigned to ranks by none (no balancing), karmarkar-karp, lpt-swap and
    min-move, with the pairs of a sample's tokens as its cost. One GPU trains the samples of one rank after another.
    Equal lengths of the mean cost are the kernel's own speed of light. It is done with two kernels:

    \b
        triton             work is spread over blocks of tokens
        triton-by-sample   in the backward one program has a whole sample, so that the longest sets the time

    Prints a Markdown table of medians over the draws: the slowest rank, the mean, their ratio, the least that costs
    allow (attention alone costs so much more for long samples that one can exceed a rank's share), the slowest over
    equal lengths, and TFLOP/s with a backward of 2.5 times the forward's operations. Writes it to balanced.md, the
    times of each rank to balanced.jsonl (a JSON line per draw, kernel and strategy), and bars of the first draw to
    balanced.png. Times are medians of at most 50 runs after 10 warm-up runs. Examples:

    \b
        python scripts/bench/balanced_attention.py
        python scripts/bench/balanced_attention.py --ranks 16 --draws 1 --out out/sixteen
        python scripts/bench/balanced_attention.py --report-only
    """
    # Imported here, because `--help` does not need torch.
    from attention_bench.balanced import load, markdown_table, save, summarize
    from attention_bench.bars import rank_bars
    from rendering import figures

    path = out / "balanced.jsonl"
    if not report_only:
        save(_run(ranks, samples, draws, heads=heads, head_dim=head_dim, dtype=dtype, seconds=seconds), path)
    rows = load(path)
    table = markdown_table(summarize(rows))
    files.write_text(out / "balanced.md", table)
    figures.save(rank_bars(rows), out / "balanced.png")
    console.print_result(table)


def _run(
    ranks: int, samples: int, draws: int, *, heads: int, head_dim: int, dtype: str, seconds: float
) -> list["Draw"]:
    import torch

    from attention_bench.balanced import STRATEGIES, draw_tokens, measure_draw
    from attention_bench.timing import CudaTimer, Heads, parse_dtype, require_cuda, time_passes
    from hstu.attentions import ATTENTIONS

    shape = Heads(count=heads, head_dim=head_dim, dtype=parse_dtype(dtype))
    require_cuda()
    rows = []
    batches = len(DISTRIBUTIONS) * draws * len(ATTENTION_NAMES) * (len(STRATEGIES) * ranks + 1)
    with console.steps("timing", batches) as on_batch:
        for lengths, distribution in DISTRIBUTIONS.items():
            for draw in range(draws):
                tokens = draw_tokens(distribution, ranks, samples, seed=draw)
                for name in ATTENTION_NAMES:
                    time_batch = functools.partial(
                        time_passes, ATTENTIONS[name], heads=shape, timer=CudaTimer(seconds=seconds)
                    )
                    try:
                        rows += measure_draw(
                            time_batch,
                            shape,
                            tokens,
                            device=torch.cuda.get_device_name(),
                            lengths=lengths,
                            attention=name,
                            draw=draw,
                            on_batch=on_batch,
                        )
                    except torch.OutOfMemoryError as error:
                        raise ConfigError(
                            f"{samples} samples of {lengths} lengths do not fit into the GPU's memory; choose fewer "
                            "--samples or --heads"
                        ) from error
    return rows


if __name__ == "__main__":
    run_command(main)
