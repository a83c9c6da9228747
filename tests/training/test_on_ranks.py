"""What training computes on several ranks: gradients, averages and metrics; and what is an error on all of them."""

import contextlib
import math
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from evenrank.core.errors import RankError
from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer
from evenrank.datasets import open_store, read_manifest
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
from evenrank.training import (
    BinaryAUC,
    LossAverage,
    RankingMetrics,
    RegressionMetrics,
    accumulate,
    scale_loss,
)
from tests.dataloader.balance.costs import COST
from tests.ranks import RankPool
from tests.training.test_loss import batch_of, steps_of
from tests.training.test_metrics import (
    KINDS,
    Samples,
    Values,
    add,
    assert_same,
    compute_all,
    metric_of,
    part_of,
    random_samples,
    values_of,
)

NUM_ITEMS = 9
_RNG = random.Random(0)
# Of each user, the events: item, rating, weight. Some have no rating at all, many have ratings of none but some events.
USERS = [
    [
        (_RNG.randrange(1, NUM_ITEMS), _RNG.randrange(64) / 64 if _RNG.random() < user % 5 / 4 else None, of_64 / 64)
        for of_64 in _RNG.choices(range(1, 65), k=_RNG.randrange(1, 30))
    ]
    for user in range(40)
]


class Mode(NamedTuple):
    strategy: str | None  # of a Balancer; None: each rank plans alone
    num_steps: int  # that are accumulated
    num_candidates: int
    tokens: str | None = None  # per task, counts or sums of weights; None: of all tasks together


MODES = [
    *(Mode(strategy, 2, 0, "counts") for strategy in STRATEGIES),
    *(Mode("none", 1, 2), Mode("none", 2, 2, "weights"), Mode(None, 1, 0), Mode(None, 2, 2, "weights")),
]


class Model(torch.nn.Module):
    """A rating of each item; in float64, so that the order of sums does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.ratings = torch.nn.Parameter(torch.linspace(-1, 1, NUM_ITEMS, dtype=torch.float64))

    def forward(self, items: Tensor, ratings: Tensor, weights: Tensor) -> Tensor:
        losses = (self.ratings[items] - ratings.nan_to_num()) ** 2 * weights
        return torch.stack([losses.sum(), losses[items == 3].sum()])  # the second task has few loss tokens


def _labels(batch: SequenceBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return items, ratings and weights of all labels, of which some are NaN with a weight of 0."""
    assert batch.float_labels is not None
    assert batch.known is not None
    items, ratings, counts = batch.features["item_id"], batch.float_labels.values(), batch.float_labels.lengths()
    rows = zip(torch.split(items.values(), items.lengths().tolist()), counts.tolist(), strict=True)
    places = batch.known.values() + (counts.cumsum(0) - counts).repeat_interleave(batch.known.lengths())
    assert places.tolist() == (~ratings.isnan()).nonzero()[:, 0].tolist()
    assert batch.loss_tokens == len(places)
    weights = ~ratings.isnan() if batch.weights is None else batch.weights.values()
    return torch.cat([row[len(row) - count :] for row, count in rows]), ratings, weights.double()


def _tokens(items: Tensor, ratings: Tensor, weights: Tensor) -> Tensor:
    return torch.stack([weights.sum(), weights[items == 3].sum()])


def _train(rank: int, world_size: int, path: Path) -> list[tuple[list[tuple[list[int], int, Tensor]], list[float]]]:
    """Return of each mode samples, least batch and gradient of each optimizer step, and then the mean losses."""
    found = []
    for mode in MODES:
        model, average, metrics = DistributedDataParallel(Model()), LossAverage(2), RegressionMetrics()
        options = {"max_history_length": 99, "max_num_candidates": mode.num_candidates, "label": "rating"}
        options["weight"] = "w" if mode.tokens == "weights" else None
        config, balance = LoaderConfig(batch_size=5, **options), BalanceConfig(cost=COST)  # type: ignore[arg-type]
        own = balance if mode.strategy is None else None
        batches: Any = build_loader(path, config, rank=rank, world_size=world_size, balance=own)
        if mode.strategy is not None:
            batches = Balancer(batches, BalanceConfig(cost=COST, strategy=mode.strategy))
        count = None if mode.tokens is None else (lambda batch: _tokens(*_labels(batch)))
        steps = []
        for group in accumulate(batches, mode.num_steps, task_tokens=count):
            model.zero_grad()
            for batch in group:
                labels = items, ratings, weights = _labels(batch)
                with contextlib.nullcontext() if batch is group[-1] else model.no_sync():
                    loss_sums = model(*labels)
                    scale_loss(loss_sums, batch).sum().backward()
                average.update(loss_sums, batch, task_tokens=count and count(batch))
                metrics.update(model.module.ratings[items][:, None], ratings[:, None], weights)
            ids = [one for batch in group for one in batch.sample_ids[: batch.num_real].tolist()]
            steps.append((ids, min(batch.num_real for batch in group), model.module.ratings.grad.clone()))
        found.append((steps, [*average.compute(), metrics.compute()["mse"]]))
    return found


def test_gradients_and_means_are_those_of_one_process_also_if_labels_are_missing_or_weighted(
    ranks: RankPool, tmp_path: Path
) -> None:
    rows = [
        f"{user},{item},{place},{'' if rating is None else rating},{weight}\n"
        for user, events in enumerate(USERS)
        for place, (item, rating, weight) in enumerate(events)
    ]
    (tmp_path / "log.csv").write_text("user,item,time,rating,w\n" + "".join(rows))
    names = {"user_column": "user", "item_column": "item", "timestamp_column": "time", "timestamp_unit": "s"}
    log = TabularConfig(events=(tmp_path / "log.csv",), **names, label="rating:float?", weight="w")  # type: ignore[arg-type]
    out = tmp_path / "out"
    preprocess(PreprocessConfig(dataset="custom", out=out, custom=log, split="none", ids="keep", allow_empty=True))
    missing = sum(rating is None for events in USERS for _, rating, _ in events)
    assert read_manifest(out).options["audit"]["events without rating (kept)"] == missing > 0
    users, results = open_store(out).columns["user_id"], ranks.run(3, _train, out)
    for mode, *of_ranks in zip(MODES, *results, strict=True):
        totals = torch.zeros(3, 2, dtype=torch.float64)  # sums, divisors and tokens
        trained = list[int]()
        for step in zip(*(steps for steps, _ in of_ranks), strict=True):
            of_step = [int(users[one]) for ids, *_ in step for one in ids]
            trained += of_step
            events = [event for user in of_step for event in USERS[user][-mode.num_candidates :]]
            known = [event for event in events if event[1] is not None]
            items, ratings, weights = map(torch.tensor, zip(*known, strict=True))
            weights = weights.double() if mode.tokens == "weights" else torch.ones(len(known), dtype=torch.float64)
            model, tokens = Model(), _tokens(items, ratings, weights)
            divisors = torch.full((2,), len(known)) if mode.tokens is None else tokens
            sums = model(items, ratings.double(), weights)
            (sums / divisors.clamp(min=1e-9)).sum().backward()
            for *_, gradient in step:
                torch.testing.assert_close(gradient, model.ratings.grad, rtol=1e-12, atol=1e-12)
            totals += torch.stack([sums.detach(), divisors, tokens])
        assert sorted(trained) == [user for user, events in enumerate(USERS) if len(events) >= mode.num_candidates]
        assert mode.strategy != "none" or min(least for steps, _ in of_ranks for _, least, _ in steps) == 0
        expected = [*(totals[0] / totals[1]).tolist(), (totals[0, 0] / totals[2, 0]).item()]
        assert [means for _, means in of_ranks] == [pytest.approx(expected)] * 3


def _on_a_mesh(rank: int, world_size: int, counts: Tensor) -> tuple[list[list[list[int]]], list[list[float]]]:
    """Return the tokens of each optimizer step, and the averages of two steps, of another one, and of none."""
    dp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    mine = counts[dp.get_local_rank()]
    groups: Any = accumulate(steps_of([9, 9, 9]), 2, task_tokens=lambda batch: mine[batch.step], group=dp)
    average, averages = LossAverage(3, group=dp), []
    for step, tokens in enumerate(mine):
        # What all ranks have is nothing to average by: it may be that of several steps.
        average.update(tokens * (dp.get_local_rank() + 1.5), batch_of(world_loss_tokens=10**6), task_tokens=tokens)
        if step:
            averages.append(average.compute())
            assert repr(average.compute()) == repr(averages[-1])  # also if it is NaN
            average.reset()
    return [[batch.world_task_tokens.tolist() for batch in group] for group in groups], [*averages, average.compute()]


def test_tokens_and_averages_are_of_all_data_parallel_ranks(ranks: RankPool) -> None:
    # [data-parallel ranks, steps, tasks]; the losses are 1.5 and 2.5 for each token.
    counts = torch.tensor([[[1, 0, 7], [2, 0, 0], [4, 0, 1]], [[10, 0, 0], [20, 0, 3], [0, 5, 0]]])
    of_two = [(3 * 1.5 + 30 * 2.5) / 33, math.nan, (7 * 1.5 + 3 * 2.5) / 10]
    for tokens, averages in ranks.run(4, _on_a_mesh, counts):
        assert tokens == [[[33, 0, 10], [33, 0, 10]], [[4, 5, 1]]]
        assert averages == [pytest.approx(of, nan_ok=True) for of in (of_two, [1.5, 2.5, 1.5], [math.nan] * 3)]


def _disagree(rank: int, world_size: int) -> None:
    """Do what differs between ranks; add weights that cannot be, or a NaN, on one of them."""
    ones = torch.ones(2 + rank, dtype=torch.int64)

    def steps(num_steps: int, task_tokens: Any) -> Any:
        return lambda: list(accumulate(steps_of([1, 1]), num_steps, task_tokens=task_tokens))

    for call, message in (
        (steps(1 + rank, None), "num_steps differs between ranks: 1 on rank 0, 2 on rank 1"),
        (steps(1, lambda batch: ones), r"the shape of task_tokens differs between ranks: \[2\] on rank 0, \[3\] on"),
        (steps(1, None if rank else lambda batch: ones), "task_tokens differs between ranks: given on rank 0, None"),
        (lambda: LossAverage(1 + rank), "num_tasks differs between ranks: 1 on rank 0, 2 on rank 1"),
        (BinaryAUC(rank + 1).compute, "num_tasks differs between ranks: 1 on rank 0, 2 on rank 1"),
        (BinaryAUC(rank + 1).compute_grouped, "num_tasks differs between ranks: 1 on rank 0, 2 on rank 1"),
        (RankingMetrics((10, 20 + rank)).compute, r"ks differs between ranks: \[10, 20\] on rank 0, \[10, 21\] on"),
        ((BinaryAUC() if rank else RankingMetrics()).compute, "metric differs between ranks: RankingMetrics on rank 0"),
    ):
        with pytest.raises(RankError, match=f"^{message}"):
            call()
    ids = torch.tensor([1, 0, 1])
    samples = {"scores": torch.rand(3, 1), "targets": ids[:, None], "groups": ids, "places": ids}
    for weight in (-1, math.nan, math.inf):
        for kind in KINDS:
            metric = metric_of(kind, 1)
            add(kind, metric, samples | {"weights": torch.tensor([1, weight if rank else 0, 2])})
            with pytest.raises(
                RankError, match=r"^rank 1 has weights below 0, infinite or NaN; pass finite ones of at"
            ):
                values_of(kind, metric)
    auc = BinaryAUC(2)
    scores = torch.tensor([[0.1, 0.1], [0.9, math.nan if rank == 0 else 0.9]])
    auc.update(scores, torch.tensor([[0, 0], [1, rank]]), groups=torch.tensor([3, 3]) + rank)  # a NaN of one class
    assert auc.compute_grouped() == pytest.approx([1, math.nan], nan_ok=True)


def test_what_differs_between_ranks_is_an_error_on_all_and_a_nan_on_one_is_seen_by_all(ranks: RankPool) -> None:
    ranks.run(2, _disagree)


def _compute(rank: int, world_size: int, jobs: list[list[Samples]], device: str) -> list[dict[str, Values]]:
    group: Any = None
    if device == "mesh":
        group, device = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"], "cpu"
        rank = group.get_local_rank()
    elif device == "cuda":
        torch.cuda.set_device(rank)
        group = dist.new_group(backend="nccl")
    return [compute_all(parts[rank], group=group, device=device) for parts in jobs]


@pytest.mark.parametrize(
    ("pool", "world_size", "device"),
    [("ranks", 3, "cpu"), ("ranks", 4, "mesh"), pytest.param("gpu_ranks", 2, "cuda", marks=pytest.mark.multi_gpu)],
)
@pytest.mark.processes
def test_any_distribution_over_ranks_gives_equal_bits(
    request: pytest.FixtureRequest, pool: str, world_size: int, device: str
) -> None:
    jobs, expected, num_owners = [], [], 2 if device == "mesh" else world_size
    for is_weighted in (False, True):
        samples = random_samples(is_weighted=is_weighted)
        owners = torch.randint(num_owners, (800,))
        for owner in (owners, torch.full_like(owners, num_owners - 1)):  # all others have no samples
            order = torch.randperm(800)
            jobs.append([part_of(samples, order[owner == rank]) for rank in range(num_owners)])
            expected.append(compute_all(samples))
    for kind in ("AUC", "GAUC", "regression"):  # weights make a difference
        assert {*expected[0][kind].values()}.isdisjoint(expected[-1][kind].values())
    logarithms = ["classification"] * (device == "cuda")
    for of_rank in request.getfixturevalue(pool).run(world_size, _compute, jobs, device):
        for number, (found, best) in enumerate(zip(of_rank, expected, strict=True)):
            assert_same(found, best, *logarithms, *["AUC"] * (number >= 2))
