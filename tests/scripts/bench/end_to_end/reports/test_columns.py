import dataclasses
from typing import Any

import numpy as np
import pytest

from end_to_end.reports.columns import UNBALANCED, Evenness, Row, Speed, comparison, make_rows
from end_to_end.results import EVEN, LIVE, PREPARED, RunResult, Segment, Spread
from tests.scripts.bench.end_to_end import made_up


def speed_of(row: Row) -> Speed:
    return made_up.given(row.speed)


def evenness_of(row: Row) -> Evenness:
    return made_up.given(row.evenness)


def row_of(*segments: Segment, **fields: Any) -> Row:
    return make_rows([made_up.result("a", segments, **fields)])[0]


def values(spread: Spread | None) -> Any:
    spread = made_up.given(spread)
    return pytest.approx((spread.value, spread.low, spread.high))


def test_speed_of_a_run() -> None:
    # Batch 0 has 400 tokens, 10,000 pairs and 20 predictions, batch 1 has 200, 2,000 and 20.
    steps = [[8, 12], [20, 20], [11, 9], [30, 34]]
    live = made_up.segment(LIVE, 0, steps, batch=[0, 1, 0, 1])
    speed = speed_of(row_of(live))
    assert (speed.steps, speed.step_ms, speed.step_p95_ms) == pytest.approx((4, 15, 30.2))  # of 10, 20, 10, 32
    assert (speed.slowest_ms, speed.slowest_p95_ms) == pytest.approx((16, 31.9))  # of 12, 20, 11, 34
    assert values(speed.tokens_per_second) == (1200 / 0.072,) * 3
    # 1,200 tokens, 24,000 pairs and 80 predictions in 72 ms, on 2 GPUs
    assert speed.tflops == pytest.approx((1200 * 1000 + 24_000 * 10 + 80 * 100) / 0.072 / 2 / 1e12)
    assert speed.mfu == pytest.approx(speed.tflops * 1e12 / 2e9)
    assert speed.peak_gib == (2, 3)
    assert speed_of(row_of(live, peak_allocated=np.zeros(2, np.int64))).peak_gib == ()  # of a CPU


def test_speedup_is_over_the_first_run_of_the_chain_that_has_not_failed_and_over_the_run_before() -> None:
    chain = [
        made_up.result("failed", failure="out of memory"),
        made_up.result("a", [made_up.segment(LIVE, n, [ms, ms]) for n, ms in ((0, 20), (1, 25))], adds_to="failed"),
        made_up.result("b", [made_up.segment(LIVE, 0, [10, 10])], adds_to="a"),
        made_up.result("c", [made_up.segment(LIVE, n, [ms, ms]) for n, ms in ((0, 4), (1, 6))], adds_to="b"),
        made_up.result("d", [made_up.segment(LIVE, 0, [5])], adds_to="missing"),
    ]
    failed, *rows = make_rows(chain)
    assert (failed.failure, failed.speed, failed.evenness, failed.baseline) == ("out of memory", None, None, None)
    assert [row.baseline for row in rows] == ["a", "a", "a", None]
    assert [speed_of(row).added is None for row in rows] == [True, False, False, True]
    assert values(speed_of(rows[0]).speedup) == (1, 1, 1)
    assert values(speed_of(rows[2]).speedup) == (4.5, 20 / 6, 6.25)
    assert values(speed_of(rows[2]).added) == (2, 10 / 6, 2.5)
    assert speed_of(rows[3]).speedup is None


def test_ranks_that_divide_the_heads_of_a_batch_count_its_tokens_once() -> None:
    zeros = np.zeros((2, 2), dtype=np.int64)
    tokens, loads = np.array([[300, 100]] * 2), np.array([[30, 10]] * 2)
    same = made_up.work(tokens=tokens, pairs=zeros, predictions=zeros, loads=loads)
    row = row_of(made_up.segment(LIVE, 0, [10, 10]), data_ranks=1, balanced=same)
    assert values(speed_of(row).tokens_per_second) == (400 / 0.020,) * 3
    # Each GPU computes its share of 400 tokens, which the FLOPs of a token on one GPU already are.
    assert speed_of(row).tflops == pytest.approx(400 * 1000 / 0.020 / 1e12)
    assert evenness_of(row).load_after == 1


def test_evenness_of_a_balanced_run() -> None:
    times: list[dict[str, list[float]]] = [
        {LIVE: [10.2, 20.4], PREPARED: [10, 20], EVEN: [9, 18]},
        {LIVE: [10, 20], PREPARED: [10, 20], EVEN: [10, 20]},
    ]
    evenness = evenness_of(
        row_of(
            *(made_up.segment(kind, number, ms) for number, of in enumerate(times) for kind, ms in of.items()),
            settings={"strategy": "lpt-swap"},
            balance=made_up.balance(),
            balanced=made_up.work(loads=np.array([[22, 10], [18, 10]])),
        )
    )
    assert values(evenness.to_even) == ((15.3 / 13.5 + 1) / 2, 1, 15.3 / 13.5)
    assert values(evenness.prepared_to_even) == ((15 / 13.5 + 1) / 2, 1, 15 / 13.5)
    assert values(evenness.exposed) == (0.01, 0, 0.02)
    assert values(evenness.exposed_ms) == (0.15, 0, 0.3)
    assert (evenness.load_before, evenness.load_after) == pytest.approx(((1.5 + 1) / 2, (1.1 + 1) / 2))
    assert (evenness.moved_samples, evenness.moved_tokens) == pytest.approx((0.25, 0.25))


def test_rare_stalls_are_exposed_in_the_mean_alone_and_a_rank_waits_while_it_does_not_compute() -> None:
    batch = [0, 1, 0, 1, 0, 1]
    live, prepared = ((LIVE, [10, 10, 10, 22, 10, 10]), (PREPARED, [10, 10, 10, 10, 10, 10]))
    evenness = evenness_of(row_of(*(made_up.segment(kind, 0, steps, batch=batch) for kind, steps in (live, prepared))))
    assert values(evenness.exposed) == (0, 0, 0)
    assert values(evenness.exposed_mean) == (0.2, 0.2, 0.2)
    segment = made_up.marked(LIVE, 0, before=[[1, 1], [1, 1]], compute=[[6, 2], [4, 7]], after=[[1, 7], [3, 2]])
    evenness = evenness_of(row_of(segment))
    assert (*evenness.compute_ms, evenness.mean_compute_ms) == pytest.approx((4, 5.5, 4.75))
    assert evenness.heaviest_ms == pytest.approx(6.5)  # of 6 and 7
    assert evenness.slowest_rank == 1
    assert evenness.wait_ms == pytest.approx((2 + 8 + 4 + 3) / 4)
    assert (evenness.to_even, evenness.load_before) == (None, None)


def test_runs_are_compared_that_differ_in_balancing_alone() -> None:
    def run(name: str, ms: float, **settings: Any) -> RunResult:
        return made_up.result(name, [made_up.segment(LIVE, 0, [ms])], settings=settings)

    rows = make_rows(
        [
            run("a", 30, balance="none", attention="padded"),
            run("b", 20, strategy="lpt-swap", attention="padded"),
            run("c", 15, balance="none"),
            dataclasses.replace(run("fitted", 5, strategy="lpt-swap"), cost={"name": "MeasuredCost"}),
            run("d", 10, strategy="lpt-swap"),
            run("e", 11, strategy="min-move"),
            run("read", 9, strategy="lpt-swap", balance="no-exchange"),
            made_up.result("f", settings={"strategy": "karmarkar-karp"}, failure="out of memory"),
            run("g", 1, balance="none", recompute=True),
        ]
    )
    compared = {strategy: row.name for strategy, row in comparison(rows).items()}
    assert compared == {UNBALANCED: "c", "lpt-swap": "d", "min-move": "e", "lpt-swap, no exchange": "read"}
    assert comparison([]) == {}
    # Of setups with as many strategies, the fastest.
    rows = make_rows([run("slow", 10, balance="none"), run("fast", 5, balance="none", recompute=True)])
    assert comparison(rows)[UNBALANCED].name == "fast"
