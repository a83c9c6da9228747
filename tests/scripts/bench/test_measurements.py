"""The benchmarks besides the one of training: what they compare is right, and their rows are of what was measured."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

import exchange
import host
import loader
import planner
import report
from attention import Heads, time_hstu
from evenrank.dataloader.balance import STRATEGIES
from host import Turn
from local_ranks import LocalRanks
from preprocess_variants import VARIANTS
from tests.cli.programs import ROOT
from tests.ranks import RankPool


def test_strategies_are_compared_on_the_same_draws() -> None:
    rows = {row["strategy"]: row for row in planner.compare("lognormal", 8, 16, draws=4)}
    assert list(rows) == list(STRATEGIES)
    assert rows["none"]["moved"] == 0 < rows["min-move"]["moved"] < rows["lpt-swap"]["moved"]
    assert rows["lpt-swap"]["ratio"] <= 1.01 < rows["karmarkar-karp"]["ratio"] < rows["none"]["ratio"]


def _exchange(rank: int, world_size: int) -> report.Row:
    return exchange.time_exchange(torch.device("cpu"), batch_size=8, steps=4, strategy="lpt-swap")


def test_exchanges_and_the_naive_one_give_the_same_batches(ranks: RankPool) -> None:
    row, _ = ranks.run(2, _exchange)  # which compares them
    timed = {name for name, value in row.items() if isinstance(value, list) and len(value) == exchange.ROUNDS}
    assert timed == {"upload_ms", "all_to_all_ms", "all_gather_ms", "naive_ms", "raw_ms", "x_raw", "x_naive"}
    assert row["sent_kb"] > 0
    assert row["x_raw"][0] == pytest.approx(row["all_to_all_ms"][0] / row["raw_ms"][0], rel=0.01)


def _turn(*ms: float, other_ms: float = 0.0) -> Turn:
    return Turn(ms=list(ms), taking_ms=[each / 10 for each in ms], training_ms=sum(ms) / len(ms), other_ms=other_ms)


def test_a_training_thread_is_compared_on_its_slowest_rank_and_in_the_same_turns() -> None:
    prepared = [[_turn(10, 10, 10), _turn(20, 20, 20, other_ms=1)], [_turn(9, 9, 9), _turn(18, 18, 18)]]
    slow = [_turn(10, 11, 30, other_ms=3), _turn(20, 24, 20, other_ms=1)]
    row = host.summarize([slow, [_turn(12, 12, 12, other_ms=2), _turn(22, 22, 22, other_ms=2)]], prepared)
    assert (row["steps"], row["ms"], row["p95_ms"]) == (6, 20.0, 28.5)  # of rank 0: 10, 11, 20, 20, 24, 30
    assert row["x_prepared"] == [1.2, 1.1]  # medians of turns: 12 over 10 and 22 over 20
    assert row["x_prepared_mean"] == round(115 / 90, 4)
    assert row["training_cpu_ms"] == round((17 + 64 / 3 + 12 + 22) / 4, 3)
    assert row["taking_cpu_ms"] == 1.85  # 2.0 of rank 0, as its steps, and 1.7 of rank 1
    assert (row["other_cpu_ms"], row["more_cpu_ms"]) == (2.0, 1.75)


def _fail_on_rank_1(device: torch.device) -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("of rank 1")


@pytest.mark.processes
def test_a_rank_that_fails_ends_the_others_and_its_trace_is_in_the_log(tmp_path: Path) -> None:
    (log := tmp_path / "log").touch()
    with pytest.raises(ProcessRaisedException, match="ValueError: of rank 1"):
        LocalRanks(device="cpu", count=2, log=log).run(_fail_on_rank_1)
    assert "ValueError: of rank 1" in log.read_text()


def test_both_passes_of_attention_are_timed_on_the_lengths() -> None:
    heads, returned = Heads(num_heads=2, head_dim=8, dtype=torch.float32), list[Any]()
    # 3 tokens have 6 pairs, 1 has 1; two products of 8 dimensions, multiplied and added, in 2 heads.
    assert heads.forward_flops([3, 1]) == 2 * 2 * 8 * 2 * (6 + 1)

    def timer(run: Callable[[], object]) -> float:
        returned.append(run())
        return float(len(returned))

    assert time_hstu("padded", [3, 0, 5], heads, timer, device="cpu") == (1.0, 2.0)
    output, gradients = returned
    assert [tensor.shape for tensor in (output, *gradients)] == [(8, 2, 8)] * 4


@pytest.mark.processes
def test_all_loaders_load_an_epoch(tmp_path: Path) -> None:
    counts = {name: load() for name, load in loader.make_loaders(loader.make_data(tmp_path, 300)).items()}
    shares = {"ours, balanced for 8 ranks": 38, "ours, balanced for 64 ranks": 5}
    assert counts == {**dict.fromkeys(counts, 300), **shares}


@pytest.mark.processes
def test_all_variants_of_preprocessing_write_the_same_events_in_order_of_time(tmp_path: Path) -> None:
    VARIANTS["draw"](2, tmp_path, "0.005")
    events = []
    for name in ("polars", "duckdb"):
        VARIANTS[name](2, tmp_path, str(tmp_path / name))
        table = pl.read_parquet(tmp_path / f"{name}.parquet")
        assert table["timestamp"].list.eval(pl.element().diff().min() >= 0).list.all().all()
        events.append(table.explode(table.columns[1:]).sort(pl.all()))
    assert events[0].equals(events[1])
    assert 4900 < len(events[0]) <= 5000
    command = [sys.executable, "-P", str(ROOT / "scripts" / "bench" / "preprocess_variants.py"), "evenrank", "2"]
    subprocess.run([*command, str(tmp_path), str(tmp_path / "ours")], check=True)  # it ends its process
    ours = pl.read_parquet([*(tmp_path / "ours").glob("*/*.parquet")])
    assert (ours["timestamp_ms"].explode().sort() // 1000).to_list() == events[0]["timestamp"].sort().to_list()
