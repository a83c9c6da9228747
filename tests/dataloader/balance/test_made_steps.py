"""Windows and packed steps of a Balancer, in front of other people's loaders, and steps that stay as they were."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from evenrank.core.errors import ConfigError, StateError, one_line
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, StepMetrics, summarize
from evenrank.dataloader.balance.metrics.log import read_json_lines
from evenrank.dataloader.balance.metrics.writers import JsonLines
from evenrank.training import scale_loss
from tests.dataloader.balance.costs import COST, Ints, Lengths, item_tokens, one_per_sample, rich_tokens
from tests.dataloader.batch_helpers import COLLATE, ids_of, through_json
from tests.dataloader.rich_batch import rich_batch
from tests.ranks import RankPool

LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1, 700).astype(int), 1, 200).tolist()
OWN: Any = [{"item_id": [*range(length)], "sample_ids": index} for index, length in enumerate(LENGTHS)]
EVERY = [*range(700)]
WINDOW: dict[str, Any] = {"window": 4}
PACK: dict[str, Any] = {"pack": True, "max_tokens_per_rank": 260}


def _own_loader(rank: int) -> Any:
    """Ranks have different numbers of samples: 400 and 300."""
    return StatefulDataLoader(OWN[400:] if rank else OWN[:400], batch_size=8, collate_fn=COLLATE)


def squares(lengths: Lengths, num_candidates: Ints) -> Ints:
    return lengths["item_id"] ** 2


def _heaviest(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    heaviest: list[int] = []
    options = {"cost": item_tokens, "on_step": lambda step: heaviest.append(int(step.after.max())), **options}
    with Balancer(_own_loader(rank), BalanceConfig(**options)) as balancer:
        return [ids_of(batch) for batch in balancer], heaviest


def test_windows_wait_less_for_long_samples_and_packed_steps_are_full_and_keep_the_limit(ranks: RankPool) -> None:
    (_, plain), _ = ranks.run(2, _heaviest, {"cost": squares})
    (_, windows), _ = ranks.run(2, _heaviest, {"cost": squares, "window": 8})
    assert len(windows) == len(plain)
    assert sum(windows) < 0.95 * sum(plain)
    (first, loads), (second, _) = ranks.run(2, _heaviest, PACK | {"batch_size": 16})
    assert sorted(itertools.chain(*first, *second)) == EVERY
    assert max(loads) <= 260
    assert np.mean(loads[:-1]) > 0.9 * 260


# The options of a job that stops after so many steps, and of the one that goes on there.
SAME = [(way, way, stop) for way in (WINDOW, PACK) for stop in (1, 4, 5, 17)]
OTHER_COST = [(WINDOW, WINDOW | {"cost": one_per_sample}, stop) for stop in (1, 2, 3)]
REFUSED = [(WINDOW, {}, 3), (WINDOW, {"window": 3}, 3), (PACK, WINDOW, 3)]


def _resume(rank: int, world_size: int) -> list[Any]:
    """Return, for each stop, the steps before and after it, and those of a job that is not stopped; or an error."""
    found: list[Any] = []
    for first, second, stop in (*SAME, *OTHER_COST, *REFUSED):
        with Balancer(_own_loader(rank), BalanceConfig(**{"cost": item_tokens, **first})) as balancer:
            batches = list(itertools.islice(balancer, stop + 2))[:stop]
            state = through_json(balancer.state_dict(after=batches[-1]))
            assert (state["epoch"], state["position"]) == (0, batches[-1].position)
        seen = [ids_of(batch) for batch in batches]
        with Balancer(_own_loader(rank), BalanceConfig(**{"cost": item_tokens, **second})) as balancer:
            try:
                balancer.load_state_dict(state)
            except StateError as error:
                found.append(one_line(error))
                continue
            assert balancer.state_dict() == state
            if "window" in second:
                assert balancer.remaining_batches() == -(-(300 if rank else 400) // 8) - stop
            seen += [ids_of(batch) for batch in balancer]
        with Balancer(_own_loader(rank), BalanceConfig(**{"cost": item_tokens, **first})) as balancer:
            found.append((seen, [ids_of(batch) for batch in balancer]))
    return found


def test_a_state_in_the_middle_of_steps_of_any_loader_goes_on_there_with_the_same_ones(ranks: RankPool) -> None:
    of_stops = list(zip(*ranks.run(2, _resume), strict=True))
    for of_ranks in of_stops[: len(SAME)]:
        for seen, epoch in of_ranks:
            assert seen == epoch
    # A window that another cost assigns differently is trained once.
    for of_ranks in of_stops[len(SAME) : -len(REFUSED)]:
        assert sorted(itertools.chain(*(itertools.chain(*seen) for seen, _ in of_ranks))) == EVERY
    for option, of_ranks in zip(("window=4", "window=4", "pack=True"), of_stops[-len(REFUSED) :], strict=True):
        assert all(f"several with {option}; load it with that" in error for error in of_ranks)


class _WithPosition:
    """Someone else's loader, whose state tells the position after any of its batches."""

    def __init__(self, path: Path) -> None:
        self._loader = build_loader(path, LoaderConfig(batch_size=8, seed=1), rank=0, world_size=1)
        self.load_state_dict = self._loader.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader

    def state_dict(self, *, after: Any = None) -> dict[str, Any]:
        return self._loader.state_dict(after=after)


@pytest.mark.parametrize(("way", "stop"), [(WINDOW, 2), (PACK | {"max_tokens_per_rank": 100}, 4)])
def test_the_epoch_after_a_rest_in_the_middle_of_steps_is_whole(
    small_dataset: Path, way: dict[str, Any], stop: int
) -> None:
    first, second = (Balancer(_WithPosition(small_dataset), BalanceConfig(cost=COST, **way)) for _ in range(2))
    with first, second:
        batches = list(itertools.islice(first, stop))
        state = through_json(first.state_dict(after=batches[-1]))
        assert state["left"]
        second.load_state_dict(state)
        rest, following = ([sample for batch in second for sample in ids_of(batch)] for _ in range(2))
    trained = [sample for batch in batches for sample in ids_of(batch)]
    assert sorted(trained + rest) == sorted(following)


def test_what_steps_of_several_batches_cannot_do_is_an_error() -> None:
    batches = [rich_batch([[(1, 1), (1, 1)]])]
    with Balancer(batches, BalanceConfig(cost=rich_tokens, window=2)) as balancer:
        assert len(balancer) == 1
        with pytest.raises(ConfigError, match=r"^start\(\) plans one step alone; iterate over the Balancer, or leave"):
            balancer.start(batches[0])
    with Balancer(batches, BalanceConfig(cost=rich_tokens, **PACK)) as balancer:
        for count in (len, lambda each: each.remaining_batches()):
            with pytest.raises(TypeError, match="packed steps have as many samples as fit"):
                count(balancer)


def _compared(rank: int, world_size: int, path: Path, has_exchange: bool, folder: Path) -> list[Any]:
    """Return the samples of each step and the gradients of all ranks, of a loss that depends on every event.

    Of all steps balanced, and of one in three that stays as it was loaded; without gradients, of none balanced.
    """
    found: list[Any] = []
    ways: list[dict[str, Any] | None] = [{"compare_every": 3}, {}, None]
    for options in ways:
        metrics: list[StepMetrics] = []
        config = LoaderConfig(batch_size=4, max_history_length=20)
        balance = None if options is None else BalanceConfig(cost=COST, on_step=metrics.append, **options)
        of_loader = None if has_exchange else balance
        loader: Any = build_loader(path, config, rank=rank, world_size=world_size, balance=of_loader)
        weight = torch.nn.Parameter(torch.linspace(0, 1, 1000, dtype=torch.float64))
        ids, gradients = [], []
        with closing(Balancer(loader, balance) if has_exchange and balance is not None else loader) as batches:
            for batch in batches:
                ids.append(ids_of(batch))
                if balance is not None:
                    scale_loss((weight[batch.features["item_id"].values()] ** 2).sum(), batch).backward()
                    assert weight.grad is not None
                    torch.distributed.all_reduce(weight.grad)
                    gradients.append(weight.grad.numpy().copy())
                    weight.grad = None
        found.append((ids, gradients))
        if options:
            assert balance is not None
            assert [step.is_balanced for step in metrics] == [balance.balances(0, step) for step in range(len(ids))]
            for step in metrics:
                assert step.is_balanced or (step.before.tolist(), step.moved_samples) == (step.after.tolist(), 0)
            summary = summarize(metrics)
            assert summary.steps == sum(step.is_balanced for step in metrics)
            assert summary.idle_after < summary.idle_before
    with JsonLines(folder / f"{rank}.jsonl", options={"job": "test"}) as log:
        balance = BalanceConfig(cost=COST, on_step=log, tolerance=0.01)
        loader = build_loader(path, config, rank=rank, world_size=world_size, balance=None if has_exchange else balance)
        with closing(Balancer(loader, balance) if has_exchange else loader) as batches:
            list(itertools.islice(batches, 2))
    return found


@pytest.mark.parametrize("has_exchange", [True, False])
def test_every_third_step_stays_as_it_was_loaded_with_the_same_gradients_and_the_log_begins_with_the_options(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, has_exchange: bool
) -> None:
    for compared, balanced, loaded in ranks.run(3, _compared, small_dataset, has_exchange, tmp_path):
        assert len(loaded[0]) > 10
        for step, (ids, of_balanced, of_loader) in enumerate(zip(compared[0], balanced[0], loaded[0], strict=True)):
            assert ids == (of_loader if step % 3 == 1 else of_balanced)
        assert sum(ids != of_loader for ids, of_loader in zip(compared[0], loaded[0], strict=True)) > 5
        np.testing.assert_allclose(compared[1], balanced[1], rtol=1e-12)
    run, records, _ = read_json_lines(tmp_path / "0.jsonl")
    assert run is not None
    assert (run.ranks, len(records)) == (3, 2)
    expected = {"job": "test", "tolerance": 0.01, "strategy": "lpt-swap", "cost": repr(COST)}
    assert run.options.items() >= expected.items()
    tokens = {"history_key": "item_id", "interleave_actions": False, "contextual": [], "max_tokens": COST.max_tokens}
    assert run.options["tokens"] == tokens
    assert run.options["data"]["datasets"][0].startswith("synthetic train ")
    assert run.options["data"]["num_samples"] > 150
