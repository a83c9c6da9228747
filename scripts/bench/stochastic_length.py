"""What stochastic length saves, and what it costs: jobs of scripts/train.py on a dataset, trained with several alphas.

    .venv/bin/python scripts/bench/stochastic_length.py out/ml-20m [--alphas 2 1.8 1.7 1.6] [--newest 32] [--seeds 3]

Jobs of one process, with the settings of ml-20m.toml, take turns; alpha 2 trains histories whole. Steps of 4 ranks with
8 samples each are planned for 20 epochs, and trained by nobody.

    tokens, gflop           of an epoch, and of a step; mean over epochs
    cpu_ms                  processor time of a step of this process, mean over an epoch; rounds, in turns
    auc, normalized_entropy of whole histories, of the best of 4 epochs by each
    last_auc                after the last epoch
    ratio, ratio_whole      heaviest rank over the lower bound, mean over steps, as they are planned, and as they are
                            if they are planned with the lengths of whole histories
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from evenrank.dataloader import Loader, LoaderConfig, SequenceBatch, StochasticLength, build_loader
from evenrank.dataloader.balance import BalanceConfig, HSTUCost
from evenrank.datasets import read_manifest
from evenrank.training import scale_loss
from report import Row, emit, machine, show
from trainer import TrainConfig, World, ranking

_ROOT = Path(__file__).resolve().parents[2]
_LENGTH, _RANKS, _EPOCHS, _ROUNDS = 200, 4, 20, 3  # the first as in ml-20m.toml
_COST = HSTUCost(hidden=64, heads=2, head_dim=32, layers=2, interleave_actions=True)


def train(data: Path, out: Path, *options: str) -> Row:
    """Run a job; return what its log says."""
    script, config = _ROOT / "scripts" / "train.py", _ROOT / "examples" / "trainer" / "configs" / "ml-20m.toml"
    jobs = [sys.executable, "-P", str(script), "--config", str(config), "--data", str(data), "--out", str(out)]
    subprocess.run([*jobs, *options], check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    steps, evaluations = ([line for line in lines if line["kind"] == kind] for kind in ("train", "eval"))
    return {
        "tokens": fmean(line["tokens"] for line in steps),
        "gflop": fmean(line["tflops"] * line["step_ms"] for line in steps),
        "auc": max(line["auc"] for line in evaluations),
        "normalized_entropy": min(line["normalized_entropy"] for line in evaluations),
        "last_auc": evaluations[-1]["auc"],
    }


def time_steps(data: Path, drawn: StochasticLength, epoch: int) -> float:
    """Train an epoch; return the processor time of a step, without its loader, in ms."""
    settings = TrainConfig(max_history_length=_LENGTH, data=str(data))
    task = ranking(settings, read_manifest(data), World(rank=0, size=1, device=torch.device("cpu")))
    config = task.read(batch_size=8, max_history_length=_LENGTH, stochastic_length=drawn, drop_last=True)
    balance = BalanceConfig(cost=task.cost)
    loader: Loader[SequenceBatch] = build_loader(data, config, rank=0, world_size=1, balance=balance)
    loader.begin_at(epoch)
    optimizer, seconds = torch.optim.AdamW(task.model.parameters(), lr=2e-3), []
    for batch in loader:
        started = time.process_time()
        scale_loss(task.model(batch)[0], batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - started)
    return 1e3 * fmean(seconds)


def plan(data: Path, drawn: StochasticLength) -> Row:
    """Return how even the steps of ranks are, planned with the lengths that are drawn and with those of whole rows."""
    whole = LoaderConfig(batch_size=8, max_history_length=_LENGTH, num_tasks=1, drop_last=True)
    short = LoaderConfig(batch_size=8, max_history_length=_LENGTH, num_tasks=1, drop_last=True, stochastic_length=drawn)
    balance, collate = BalanceConfig(cost=_COST), build_loader(data, short, rank=0, world_size=1).collate
    ratios = {}
    for name, config in (("ratio", short), ("ratio_whole", whole)):
        loaders = [build_loader(data, config, rank=rank, world_size=_RANKS, balance=balance) for rank in range(_RANKS)]
        found = []
        for epoch in range(_EPOCHS):
            for batches in zip(*loaders, strict=True):
                costs = []
                for batch in batches:
                    features = collate(batch.sample_ids[: batch.num_real].numpy(), epoch=epoch).features
                    lengths = {key: features[key].lengths().numpy() for key in ("item_id", "action")}
                    costs.append(_COST(lengths, np.zeros(batch.num_real, dtype=np.int64)))
                bound = max(np.concatenate(costs).max(), sum(of_rank.sum() for of_rank in costs) / _RANKS)
                found.append(max(of_rank.sum() for of_rank in costs) / bound)
        ratios[name] = fmean(found)
    return ratios


def main() -> None:
    """Train, plan and show the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--alphas", type=float, nargs="+", default=[2, 1.8, 1.7, 1.6])
    parser.add_argument("--newest", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    emit(machine())
    torch.set_num_threads(1)
    draws = {alpha: StochasticLength(alpha=alpha, newest=args.newest) for alpha in args.alphas}
    times: dict[float, list[float]] = {alpha: [] for alpha in draws}
    for epoch in range(_ROUNDS):
        for alpha, drawn in draws.items():
            times[alpha].append(time_steps(args.data, drawn, epoch))
    jobs: dict[float, list[Row]] = {alpha: [] for alpha in args.alphas}
    num_steps = len(build_loader(args.data, LoaderConfig(batch_size=8), rank=0, world_size=1))
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            for alpha, rows in jobs.items():
                of_job = {
                    "seed": seed,
                    "stochastic-alpha": alpha,
                    "stochastic-newest": args.newest,
                    "log-every": num_steps,
                }
                options = [f"--{name}={value}" for name, value in of_job.items()]
                rows.append(train(args.data, Path(folder) / f"{alpha}-{seed}", *options))
    rows = []
    for alpha, of_seeds in jobs.items():
        lists = {name: [of_seed[name] for of_seed in of_seeds] for name in of_seeds[0]}
        rows.append(emit({"alpha": alpha, "cpu_ms": times[alpha], **lists, **plan(args.data, draws[alpha])}))
    show(rows)


if __name__ == "__main__":
    main()
