"""Change the routing of a job of scripts/train.py; see examples/trainer.

.venv/bin/python scripts/remap.py out/train out/train-hashed --routing hash_roundrobin
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from evenrank.cli import console
from evenrank.cli.main import run_command
from evenrank.dataloader.routing import MODES


def remap(
    out: Annotated[Path, typer.Argument(help="Folder of the job (its --out), which stays as it is.")],
    target: Annotated[Path, typer.Argument(help="Folder of the new job, without checkpoints.")],
    routing: Annotated[str, typer.Option(help=f"--routing of the new job: {', '.join(MODES)}.")],
    ranks: Annotated[
        int | None, typer.Option(help="With roundrobin: data-parallel ranks of the new job.", min=1)
    ] = None,
) -> None:
    """Copy the newest checkpoint of a job, with the rows of its sharded tables where another --routing looks for them.

    The new job continues from there. One process reads the whole checkpoint into memory. Examples:

    \b
        python scripts/remap.py out/train out/hashed --routing hash_roundrobin
        torchrun scripts/train.py --out out/hashed --embeddings sharded --routing hash_roundrobin --epochs 2
        python scripts/remap.py out/train out/on-8 --routing roundrobin --ranks 8
    """
    with console.stages() as on_stage:
        on_stage("importing torch")  # here, because `--help` does not need it
        from trainer.routing import remap_job

        on_stage("copying the newest checkpoint")
        written = remap_job(out, target, routing=routing, ranks=ranks)
    print(f"wrote {written}; continue with --out {target}")


if __name__ == "__main__":
    run_command(remap)
