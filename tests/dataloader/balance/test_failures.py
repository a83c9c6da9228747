"""No hangs: whatever goes wrong on one rank, or differs between ranks, is said on every rank. Real Gloo groups."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import Balancer, HSTUCost
from evenrank.dataloader.pad import pad_batch
from evenrank.datasets.errors import ConfigError
from tests.dataloader.rich_batch import RichBatch, rich_batch
from tests.ranks import RankFailure, RankPool


def _tokens(lengths: dict[str, np.ndarray], num_candidates: np.ndarray) -> np.ndarray:
    return lengths["a"] + lengths["b"]


def _negative(lengths: dict[str, np.ndarray], num_candidates: np.ndarray) -> np.ndarray:
    return -lengths["a"]


def _fail_in_step(rank: int, world_size: int, culprit: int, step: int) -> int:
    def batches() -> Iterator[RichBatch]:
        for number in range(6):
            if rank == culprit and number == step:
                raise OSError("cannot read row 17")
            yield rich_batch([[(1, 1), (1, 1)]], first_id=rank)

    count = 0
    with Balancer(batches(), cost=_tokens) as balancer:
        for _ in balancer:
            count += 1
    return count


@pytest.mark.parametrize(("culprit", "step"), [(0, 2), (2, 2), (1, 0), (1, 5)])
def test_an_error_of_one_loader_ends_all_ranks_with_its_words(ranks: RankPool, culprit: int, step: int) -> None:
    for failure in ranks.try_run(3, _fail_in_step, culprit, step):
        assert isinstance(failure, RankFailure)
        assert failure.type_name == "RankError"
        assert failure.message == f"rank {culprit} failed: OSError: cannot read row 17"


def _disagree(rank: int, world_size: int, what: str) -> None:
    batch = rich_batch([[(1, 1), (1, 1)]])
    second = batch
    options: dict[str, Any] = {"cost": _tokens}
    if rank == 1:
        match what:
            case "dtype":
                batch = replace(batch, ids=batch.ids.int())
            case "none":
                batch = replace(batch, nothing=torch.zeros(1))
            case "batch size":
                batch = pad_batch(batch, 2)
            case "later":
                second = replace(batch, flags=batch.flags[:, :2])
            case "strategy":
                options["strategy"] = "identity"
            case "cost":
                options["cost"] = _negative
    with Balancer([batch, second], **options) as balancer:
        list(balancer)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("dtype", "batches differ between rank 0 and rank 1: ids: torch.int64 and torch.int32"),
        ("none", "batches differ between rank 0 and rank 1: nothing: None and torch.float32"),
        ("batch size", "batches differ between rank 0 and rank 1: batch_size: 1 and 2"),
        ("strategy", "strategy differs between ranks: lpt-swap on rank 0, identity on rank 1"),
        (
            "later",
            "rank 1 failed: ValueError: a batch differs from the first one: flags: torch.bool[3] and torch.bool[2]",
        ),
        ("cost", "rank 1 failed: a cost must not be negative, got -1"),
    ],
)
def test_what_differs_between_ranks_is_named_on_every_rank(ranks: RankPool, what: str, message: str) -> None:
    failures = ranks.try_run(3, _disagree, what)
    assert [(failure.type_name, failure.message) for failure in failures] == [("RankError", message)] * 3


def _leave_early_twice(rank: int, world_size: int, path: Path) -> tuple[int, int, list[int]]:
    loader = build_loader(path, LoaderConfig(batch_size=4), rank=rank, world_size=world_size)
    before = threading.active_count()
    with Balancer(loader, cost=HSTUCost(hidden=8, heads=1, head_dim=8, layers=1)) as balancer:
        for _ in range(2):
            for batch in balancer:
                if batch.step == 2:
                    break
        steps = [batch.step for batch in balancer]
    return before, threading.active_count(), steps


def test_leaving_the_loop_early_leaves_no_thread_and_the_next_epoch_whole(ranks: RankPool, small_dataset: Path) -> None:
    for before, after, steps in ranks.run(3, _leave_early_twice, small_dataset):
        assert after == before
        assert steps == list(range(len(steps)))
        assert len(steps) > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "best"}, "no strategy is called 'best'; there are identity, karmarkar-karp, lpt-swap"),
        ({"exchange": "carrier-pigeon"}, "no exchange is called 'carrier-pigeon'; there are all-to-all"),
        ({"lookahead": 0}, "lookahead must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_name_the_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Balancer([], cost=_tokens, **options)
