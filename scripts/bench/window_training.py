"""Train a small HSTU model with windows of several steps and without, on one CPU: does the result suffer?

    .venv/bin/python scripts/bench/window_training.py [--data FOLDER --positive-action 7] [--windows 1,8,32] [--seeds 5]

FOLDER is what `evenrank preprocess` wrote; its train split is trained, its eval split evaluated. Without it, users are
drawn whose histories are lognormal (mean 25, std 50, 1..400 events) and whose labels depend on the item, on the user's
taste, and on the length of the history: long ones have fewer positive labels, so that steps in which they are gathered
teach something else than others.

One process has the loaders of all ranks, and trains the samples of all their batches of a step as one batch, whose
gradient is what DDP would average. All windows of a seed have the same initial weights, samples and number of steps.
Prints one JSON line per run:

    auc, eval_loss    on the eval split after the last step: AUC, and mean loss of a label
    loss_std          standard deviation over the steps of the last epoch of the training loss of a step
    heaviest          load of the heaviest rank over the mean load of a rank in the run, mean over steps
    seconds           of the run, evaluation included

then one per window: means and standard deviations over seeds, and differences from the first window, seed by seed: mean
and its standard error. Beyond noise is what exceeds 2 or 3 of these.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec import EmbeddingCollection

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from evenrank.dataloader import Loader, LoaderConfig, SequenceBatch
from evenrank.dataloader.balance import BalanceConfig, StepMetrics
from evenrank.dataloader.random_batches import RandomData, draw_samples
from evenrank.datasets import SequenceStore, open_store
from evenrank.datasets.distributions import Lognormal, Zipf
from evenrank.training import BinaryAUC, scale_loss
from hstu.config import HSTUConfig
from hstu.ranking import HSTURanking, at_least
from hstu.tables import tables

_NUM_ITEMS = 1000
_SYNTHETIC_LENGTHS = Lognormal(mean=25, std=50, low=1, high=400)
_WARMUP_STEPS = 20
METRICS = ("auc", "eval_loss", "loss_std", "heaviest")


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What is trained and evaluated."""

    train: SequenceStore
    """Users that are trained."""
    evaluated: SequenceStore
    """Other users."""
    vocabulary_sizes: dict[str, int]
    """Rows of the tables of `item_id` and `action`."""
    positive_action: int
    """Labels are positive from this action on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What all runs have in common."""

    ranks: int
    """W."""
    batch_size: int
    """Samples per rank and step."""
    epochs: int
    """Passes over the train split."""
    max_history_length: int
    """Events of a history."""
    learning_rate: float
    """Of AdamW, after the warm-up."""

    @property
    def model(self) -> HSTUConfig:
        """The shape of the model."""
        return HSTUConfig(
            max_length=2 * self.max_history_length,
            embedding_dim=32,
            hidden=64,
            heads=2,
            head_dim=32,
            layers=2,
            dropout=0.0,
            attention="padded",
        )

    def read(self, **options: Any) -> LoaderConfig:
        """Return the settings of a loader."""
        return LoaderConfig(
            batch_size=self.batch_size, max_history_length=self.max_history_length, num_tasks=1, **options
        )


def open_data(folder: Path, positive_action: int) -> Data:
    """Return the splits of a dataset."""
    train, evaluated = (open_store(folder, split) for split in ("train", "eval"))
    return Data(
        train=train,
        evaluated=evaluated,
        vocabulary_sizes=dict(train.manifest.vocabulary_sizes),
        positive_action=positive_action,
    )


def draw_data(num_users: int) -> Data:
    """Return users that are drawn, half as many of them to evaluate."""
    rng = np.random.default_rng(0)
    quality, traits = rng.normal(size=_NUM_ITEMS), rng.normal(size=(_NUM_ITEMS, 4))
    splits = [
        _with_labels(
            draw_samples(
                RandomData(lengths=_SYNTHETIC_LENGTHS, items=Zipf(exponent=0.8, low=0, high=_NUM_ITEMS - 1, shift=1)),
                rng,
                size,
                min_length=1,
                split=split,
            ),
            quality,
            traits,
            rng,
        )
        for split, size in (("train", num_users), ("eval", num_users // 2))
    ]
    return Data(
        train=splits[0],
        evaluated=splits[1],
        vocabulary_sizes={"item_id": _NUM_ITEMS, "action": 2},
        positive_action=1,
    )


def _with_labels(
    store: SequenceStore, quality: NDArray[np.float64], traits: NDArray[np.float64], rng: np.random.Generator
) -> SequenceStore:
    """Return the users with actions 0 and 1."""
    items, lengths = store.events["item_id"], store.lengths
    tastes = rng.normal(size=(len(store), 4)).repeat(lengths, axis=0)
    # Half a unit less for each doubling of the length: users with 200 events like few items, those with 3 most.
    habit = (-0.5 * np.log2(lengths / 25)).repeat(lengths)
    logits = quality[items] + 0.7 * (tastes * traits[items]).sum(axis=1) + habit
    actions = rng.random(len(items)) < 1 / (1 + np.exp(-logits))
    return replace(store, events={**store.events, "action": actions.astype(np.int32)})


def make_loaders(
    data: Data, settings: Settings, *, window: int, seed: int, metrics: list[StepMetrics]
) -> list[Loader[SequenceBatch]]:
    """Return the loader of each rank; the first one appends the metrics of its steps."""
    config = settings.read(seed=seed)
    cost = settings.model.cost()
    return [
        Loader(
            [data.train],
            config,
            rank=rank,
            world_size=settings.ranks,
            balance=BalanceConfig(cost=cost, window=window, on_step=metrics.append if rank == 0 else None),
        )
        for rank in range(settings.ranks)
    ]


def union(loader: Loader[SequenceBatch], batches: Sequence[SequenceBatch]) -> SequenceBatch:
    """Return one batch of the samples of all ranks, which has the gradient that DDP would average from theirs."""
    ids = np.concatenate([batch.sample_ids[: batch.num_real].numpy() for batch in batches])
    batch = loader.collate(ids)
    batch.world_loss_tokens, batch.dp_size = batches[0].world_loss_tokens, 1
    return batch


@torch.no_grad()
def evaluate(model: HSTURanking, batches: Loader[SequenceBatch]) -> dict[str, float]:
    """Return the metrics of the eval split."""
    model.eval()
    auc = BinaryAUC(1)
    loss_sum, num_labels = 0.0, 0
    for batch in batches:
        assert batch.labels is not None
        loss_sums, logits = model(batch)
        auc.update(logits, model.dense.targets(batch.labels.values()))
        loss_sum, num_labels = loss_sum + loss_sums.sum().item(), num_labels + len(logits)
    model.train()
    return {"auc": auc.compute()[0], "eval_loss": loss_sum / num_labels}


def run(data: Data, settings: Settings, *, window: int, seed: int) -> dict[str, float]:
    """Train and evaluate one model."""
    started = time.perf_counter()
    torch.manual_seed(seed)
    shape = settings.model
    model = HSTURanking(
        EmbeddingCollection(tables=tables(data.vocabulary_sizes, shape)),
        shape,
        num_tasks=1,
        targets=at_least(data.positive_action),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    metrics: list[StepMetrics] = []
    loaders = make_loaders(data, settings, window=window, seed=seed, metrics=metrics)
    losses: list[float] = []
    for _ in range(settings.epochs):
        for batches in zip(*loaders, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * min(1.0, (len(losses) + 1) / _WARMUP_STEPS)
            optimizer.zero_grad()
            batch = union(loaders[0], batches)
            loss = scale_loss(model(batch)[0], batch).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    config = replace(settings.read(split="eval", order="rows"), batch_size=32)
    evaluated = evaluate(model, Loader([data.evaluated], config, rank=0, world_size=1))
    last_epoch = losses[-(len(losses) // settings.epochs) :]
    heaviest = [int(step.after.max()) for step in metrics]
    mean_load = statistics.fmean(int(step.after.sum()) for step in metrics) / settings.ranks
    return {
        **{name: round(value, 5) for name, value in evaluated.items()},
        "loss_std": round(statistics.stdev(last_epoch), 5),
        "heaviest": round(statistics.fmean(heaviest) / mean_load, 4),
        "steps": len(losses),
        "seconds": round(time.perf_counter() - started, 1),
    }


def summarize(window: int, runs: Sequence[dict[str, float]], first: Sequence[dict[str, float]]) -> dict[str, object]:
    """Return the row of a window, given its runs by seed and those of the first window."""
    row: dict[str, object] = {"window": window, "seeds": len(runs)}
    for name in METRICS:
        values = [of_run[name] for of_run in runs]
        differences = [a - b[name] for a, b in zip(values, first, strict=True)]
        row[name] = round(statistics.fmean(values), 5)
        row[f"{name}_std"] = round(statistics.stdev(values), 5)
        if runs is not first:
            row[f"{name}_difference"] = round(statistics.fmean(differences), 5)
            row[f"{name}_error"] = round(statistics.stdev(differences) / len(differences) ** 0.5, 5)
    return row


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder that `evenrank preprocess` wrote; default: drawn users")
    parser.add_argument("--positive-action", type=int, default=1, help="labels are positive from this action on")
    parser.add_argument("--users", type=int, default=1536, help="drawn users to train")
    parser.add_argument("--windows", default="1,8,32", help="steps of a window, comma-separated")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each window, at least 2")
    parser.add_argument("--ranks", type=int, default=8, help="that share a step")
    parser.add_argument("--batch-size", type=int, default=2, help="samples per rank")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the train split")
    parser.add_argument("--max-history-length", type=int, default=100, help="events of a history")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of AdamW")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(
        ranks=arguments.ranks,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        max_history_length=arguments.max_history_length,
        learning_rate=arguments.learning_rate,
    )
    data = (
        draw_data(arguments.users) if arguments.data is None else open_data(arguments.data, arguments.positive_action)
    )
    windows = [int(window) for window in arguments.windows.split(",")]
    runs: dict[int, list[dict[str, float]]] = {window: [] for window in windows}
    for seed in range(arguments.seeds):
        for window in windows:
            row = run(data, settings, window=window, seed=seed)
            runs[window].append(row)
            print(json.dumps({"window": window, "seed": seed, **row}), flush=True)
    for window in windows:
        print(json.dumps(summarize(window, runs[window], runs[windows[0]])), flush=True)


if __name__ == "__main__":
    main()
