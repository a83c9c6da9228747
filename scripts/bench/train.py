"""Measure what balancing and other parts of a training job buy, from a table of runs; see scripts/bench/experiments.

.venv/bin/python scripts/bench/train.py scripts/bench/experiments/hstu.toml
"""

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from end_to_end import runner
from end_to_end.experiments import Experiments, read_experiments
from end_to_end.tasks import Plan, WorkerTask, check_names, make_plan, tasks_of
from evenrank.cli.main import run_command
from evenrank.core.errors import ConfigError
from evenrank.dataloader.routing import MODES

_HSTU = Path(__file__).resolve().parent / "experiments" / "hstu.toml"
_GPUS_WITHOUT = 4  # shown by a dry run on a host without GPUs


class Runner(StrEnum):
    """What starts runs."""

    TORCHRUN = "torchrun"
    SLURM = "slurm"


def train(
    experiments: Annotated[
        Path, typer.Argument(help="TOML file of runs.", metavar="EXPERIMENTS", show_default="hstu.toml")
    ] = _HSTU,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of results and logs. [default: out/bench/NAME, as EXPERIMENTS is NAME.toml]"),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Processes of a run, each with a GPU. [default: all GPUs of the host]", min=1)
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this run; repeatable.", metavar="NAME")] = None,
    lengths: Annotated[
        list[str] | None, typer.Option(help="Only this distribution of lengths; repeatable.", metavar="NAME")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Timed steps, instead of the file's.", min=1)] = None,
    warmup_steps: Annotated[
        int | None, typer.Option(help="Steps before the timed ones, instead of the file's.", min=0)
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(help=f"--routing of all runs with sharded tables, instead of the file's: {', '.join(MODES)}."),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(help="Minutes of a run; one that takes longer is ended, and has failed.", min=0.01)
    ] = 60,
    rerun: Annotated[bool, typer.Option("--rerun", help="Run again what has results.")] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Run nothing; write the table and the plots from results.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run; run and write nothing.")] = False,
    with_runner: Annotated[
        Runner, typer.Option("--runner", help="torchrun: on this host. slurm: a job for each run, on several hosts.")
    ] = Runner.TORCHRUN,
    nodes: Annotated[int, typer.Option(help="SLURM: hosts of a run.", min=1)] = 1,
    gpus_per_node: Annotated[int | None, typer.Option(help="SLURM: GPUs of a host.", min=1)] = None,
    partition: Annotated[str | None, typer.Option(help="SLURM: partition. [default: SLURM's]")] = None,
    account: Annotated[str | None, typer.Option(help="SLURM: account. [default: SLURM's]")] = None,
) -> None:
    """Measure what balancing and other parts of a training job buy, from a table of runs.

    Each run trains on the same batches, alone on its GPUs, and leaves a log and a result in OUT. Runs that have results
    are kept, so that the same command continues a table that was interrupted. A run that fails is a row that says why.
    The exit code is 1 if one has, other than by running out of GPU memory. Examples:

    \b
        python scripts/bench/train.py scripts/bench/experiments/smoke.toml     # a first try, without a GPU
        python scripts/bench/train.py --dry-run                                # what hstu.toml would run here
        python scripts/bench/train.py                                          # run it: hours, on 4 GPUs
        python scripts/bench/train.py --only baseline --only lpt-swap --lengths lognormal --steps 200
        python scripts/bench/train.py --report-only                            # its table and plots again
        python scripts/bench/train.py --runner slurm --nodes 2 --gpus-per-node 8 --time-limit 90
    """
    table = _with_steps(read_experiments(experiments), steps=steps, warmup_steps=warmup_steps)
    if routing is not None:
        table = _with_routing(table, routing)
    folder = (out or Path("out/bench") / experiments.stem).absolute()
    if report_only:
        if dry_run:
            raise ConfigError("--report-only and --dry-run are two different things to do; choose one")
        _report(folder, table)
        return
    cluster = _cluster(with_runner, gpus, nodes, gpus_per_node, partition, account)
    processes = cluster.gpus if cluster else _gpus(gpus, table, dry_run=dry_run)
    plan = make_plan(tasks_of(table, folder, gpus=processes, only=only or (), lengths=lengths or ()), rerun=rerun)
    _print_plan(plan)
    if dry_run:
        _print_commands(plan.to_run, cluster, time_limit * 60)
    elif cluster:
        runner.check_sbatch()
        plan.start()
        runner.submit(plan.to_run, cluster, limit_seconds=time_limit * 60)
        print("when they have ended, --report-only writes the table and the plots")
    else:
        check_names(plan.to_run)
        with runner.hold(folder):
            plan.start()
            results = runner.run_tasks(plan.to_run, limit_seconds=time_limit * 60)
        _report(folder, table)
        if any(result.failure not in (None, "out of memory") for result in results):
            raise typer.Exit(1)


def _with_steps(table: Experiments, *, steps: int | None, warmup_steps: int | None) -> Experiments:
    given = {"steps": steps, "warmup_steps": warmup_steps}
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(table, workload=dataclasses.replace(table.workload, **changed))


def _with_routing(table: Experiments, routing: str) -> Experiments:
    is_sharded = [run.settings.embeddings == "sharded" for run in table.runs]
    if not any(is_sharded):
        raise ConfigError("--routing is for sharded tables, which no run has; leave it out, or choose another file")
    runs = tuple(
        dataclasses.replace(run, settings=dataclasses.replace(run.settings, routing=routing)) if sharded else run
        for run, sharded in zip(table.runs, is_sharded, strict=True)
    )
    return dataclasses.replace(table, runs=runs)


def _cluster(
    with_runner: Runner,
    gpus: int | None,
    nodes: int,
    gpus_per_node: int | None,
    partition: str | None,
    account: str | None,
) -> runner.Cluster | None:
    """Return the hosts of --runner slurm; None: this host."""
    if with_runner is Runner.TORCHRUN:
        if nodes > 1 or gpus_per_node or partition or account:
            raise ConfigError("--nodes, --gpus-per-node, --partition and --account are for --runner slurm; add it")
        return None
    if gpus is not None or gpus_per_node is None:
        raise ConfigError("--runner slurm takes --gpus-per-node, and not --gpus; change the options")
    return runner.Cluster(nodes=nodes, gpus_per_node=gpus_per_node, partition=partition, account=account)


def _gpus(asked: int | None, table: Experiments, *, dry_run: bool) -> int:
    """Return how many processes a run may have on this host."""
    if asked is not None and dry_run:
        return asked
    there = _count_gpus()
    if asked is not None:
        if 0 < there < asked:
            raise ConfigError(f"--gpus is {asked}, this host has {there}; choose at most that")
        return asked
    if there:
        return there
    named = [run.gpus for run in table.runs if run.gpus is not None]
    if len(named) == len(table.runs):
        return max(named)
    if dry_run:
        print(f"# this host has no GPU: shown for --gpus {_GPUS_WITHOUT}")
        return _GPUS_WITHOUT
    raise ConfigError(
        "this host has no GPU that PyTorch sees; run it on one that has, try scripts/bench/experiments/smoke.toml, or "
        "choose a number of processes with --gpus"
    )


def _count_gpus() -> int:
    try:
        import torch
    except ModuleNotFoundError:
        return 0
    return torch.cuda.device_count()


def _print_plan(plan: Plan) -> None:
    for task in plan.kept:
        print(f"# kept: {task.title} ({task.result})")
    for task in plan.to_run:
        if reason := plan.again.get(task.result):
            print(f"# again: {task.title}, because {reason}")


def _print_commands(tasks: Sequence[WorkerTask], cluster: runner.Cluster | None, limit_seconds: float) -> None:
    before: str | None = None
    for task in tasks:
        if cluster is None:
            print(f"# {task.title}\n{shlex.join(runner.torchrun(task))}")
            continue
        script = runner.script_of(task, cluster, limit_seconds=limit_seconds)
        print(f"# {runner.script_file(task)}\n{script}\n{shlex.join(runner.sbatch_command(task, before))}\n")
        before = f"<job of {task.title}>"


def _report(folder: Path, table: Experiments) -> None:
    if not folder.is_dir():
        raise ConfigError(f"there are no results in {folder}; run the table first, or choose its folder with --out")
    from end_to_end.reports.report import write_report  # imported here, because matplotlib takes a second

    write_report(folder, table)


if __name__ == "__main__":
    run_command(train)
