"""Windows and packed steps of a Balancer, in front of other people's loaders, and steps that stay as they were."""

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from evenrank.core.errors import StateError, one_line
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, StepMetrics, summarize
from evenrank.dataloader.balance.metrics.log import read_json_lines
from evenrank.dataloader.balance.metrics.writers import JsonLines
from tests.dataloader.balance.costs import COST, Ints, Lengths, item_tokens, one_per_sample
from tests.dataloader.batch_helpers import COLLATE, ids_of, through_json
from tests.ranks import RankPool

LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1, 700).astype(int), 1, 200).tolist()
OWN: Any = [{"item_id": [*range(length)], "sample_ids": index} for index, length in enumerate(LENGTHS)]
EVERY = [*range(700)]
WINDOW: dict[str, Any] = {"window": 4}
PACK: dict[str, Any] = {"pack": True, "max_tokens_per_rank": 260}


def _own_batches(rank: int, options: dict[str, Any]) -> Balancer[Any]:
    """Balance samples of which ranks have different numbers: 400 and 300."""
    loader: Any = StatefulDataLoader(OWN[400:] if rank else OWN[:400], batch_size=8, collate_fn=COLLATE)
    return Balancer(loader, BalanceConfig(**{"cost": item_tokens, **options}))


def _squares(lengths: Lengths, num_candidates: Ints) -> Ints:
    return lengths["item_id"] ** 2


def _heaviest(rank: int, world_size: int, of_ways: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    found = []
    for options in of_ways:
        heaviest: list[int] = []
        on_step = lambda step, heaviest=heaviest: heaviest.append(int(step.after.max()))  # noqa: E731
        with _own_batches(rank, {"on_step": on_step, **options}) as balancer:
            found.append(([sample for batch in balancer for sample in ids_of(batch)], heaviest))
    return found


def test_windows_wait_less_for_long_samples_and_packed_steps_are_full_and_keep_the_limit(ranks: RankPool) -> None:
    of_ways: list[dict[str, Any]] = [{"cost": _squares}, {"cost": _squares, "window": 8}, PACK | {"batch_size": 16}]
    of_ranks = ranks.run(2, _heaviest, of_ways)
    for (first, _), (second, _) in zip(*of_ranks, strict=True):
        assert sorted(first + second) == EVERY
    (_, plain), (_, windows), (_, packed) = of_ranks[0]
    assert len(windows) == len(plain)
    assert sum(windows) < 0.95 * sum(plain)
    assert max(packed) <= 260
    assert np.mean(packed[:-1]) > 0.9 * 260


# The options of a job that stops after so many steps, and of the one that goes on there.
SAME = [(way, way, stop) for way in (WINDOW, PACK) for stop in (1, 4, 5, 17)]
OTHER_COST = [(WINDOW, WINDOW | {"cost": one_per_sample}, stop) for stop in (1, 2, 3)]
REFUSED = [(WINDOW, {}, 3), (WINDOW, {"window": 3}, 3), (PACK, WINDOW, 3)]


def _resume(rank: int, world_size: int) -> list[Any]:
    """Return, for each stop, the steps before and after it, and those of a job that is not stopped; or an error."""
    found: list[Any] = []
    for first, second, stop in (*SAME, *OTHER_COST, *REFUSED):
        with _own_batches(rank, first) as balancer:
            batches = list(itertools.islice(balancer, stop + 2))[:stop]
            state = through_json(balancer.state_dict(after=batches[-1]))
            assert (state["epoch"], state["position"]) == (0, batches[-1].position)
        with _own_batches(rank, second) as balancer, _own_batches(rank, first) as whole:
            try:
                balancer.load_state_dict(state)
            except StateError as error:
                found.append(one_line(error))
                continue
            assert balancer.state_dict() == state
            if "window" in second:
                assert balancer.remaining_batches() == -(-(300 if rank else 400) // 8) - stop
            found.append(([ids_of(batch) for batch in (*batches, *balancer)], [ids_of(batch) for batch in whole]))
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


def test_packed_steps_have_no_number() -> None:
    with _own_batches(0, WINDOW) as windows, _own_batches(0, PACK) as packed:
        assert len(windows) == 50
        for count in (len, lambda balancer: balancer.remaining_batches()):
            with pytest.raises(TypeError, match="packed steps have as many samples as fit"):
                count(packed)


def _compared(rank: int, world_size: int, path: Path, has_exchange: bool, folder: Path) -> list[list[list[int]]]:
    """Return the samples of each step: of all balanced, of one in three as it was loaded, and of none balanced."""

    def make(balance: BalanceConfig | None) -> Any:
        config, of_loader = LoaderConfig(batch_size=4, max_history_length=20), None if has_exchange else balance
        loader: Any = build_loader(path, config, rank=rank, world_size=world_size, balance=of_loader)
        return closing(Balancer(loader, balance) if has_exchange and balance is not None else loader)

    log = JsonLines(folder / f"{rank}.jsonl", options={"job": "test"})
    metrics: list[StepMetrics] = []
    found = []
    compared = BalanceConfig(cost=COST, on_step=metrics.append, compare_every=3)
    for balance in (BalanceConfig(cost=COST, on_step=log, tolerance=0.01), compared, None):
        with make(balance) as batches:
            found.append([ids_of(batch) for batch in batches])
    log.close()
    assert [step.is_balanced for step in metrics] == [compared.balances(0, step) for step in range(len(found[0]))]
    for step in metrics:
        assert step.is_balanced or (step.before.tolist(), step.moved_samples) == (step.after.tolist(), 0)
    summary = summarize(metrics)
    assert summary.steps == sum(step.is_balanced for step in metrics)
    assert summary.idle_after < summary.idle_before
    return found


@pytest.mark.parametrize("has_exchange", [True, False])
def test_every_third_step_stays_as_it_was_loaded_and_the_log_begins_with_the_options(
    ranks: RankPool, small_dataset: Path, tmp_path: Path, has_exchange: bool
) -> None:
    num_balanced = 0
    for found in ranks.run(3, _compared, small_dataset, has_exchange, tmp_path):
        assert len(found[0]) > 10
        for step, (_, ids, of_loader) in enumerate(zip(*found, strict=True)):
            assert step % 3 != 1 or ids == of_loader
            num_balanced += ids != of_loader
    assert num_balanced > 20
    run, records, _ = read_json_lines(tmp_path / "0.jsonl")
    assert run is not None
    assert (run.ranks, len(records)) == (3, len(found[0]))
    expected = {"job": "test", "tolerance": 0.01, "strategy": "lpt-swap", "cost": repr(COST)}
    assert run.options.items() >= expected.items()
    tokens = {"history_key": "item_id", "interleave_actions": False, "contextual": [], "max_tokens": COST.max_tokens}
    assert run.options["tokens"] == tokens
    assert run.options["data"]["datasets"][0].startswith("synthetic train ")
    assert run.options["data"]["num_samples"] > 150
