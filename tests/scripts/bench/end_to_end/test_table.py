import io

import numpy as np
from rich.console import Console

from end_to_end.reports.columns import Row, make_rows
from end_to_end.reports.table import BALANCE, RANKS, SPEED, markdown_table, notes, terminal_table, with_noise
from end_to_end.results import EVEN, LIVE, PREPARED, Spread
from tests.scripts.bench.end_to_end import made_up

WIDTH = 120


def rows() -> tuple[Row, ...]:
    return make_rows(
        [
            made_up.result("baseline", [made_up.segment(LIVE, number, [20, 20]) for number in (0, 1)]),
            made_up.result(
                "lpt | swap",
                [
                    made_up.segment(kind, number, [ms + number, ms + number])
                    for kind, ms in ((LIVE, 10.1), (PREPARED, 10), (EVEN, 10))
                    for number in (0, 1)
                ],
                adds_to="baseline",
                settings={"strategy": "lpt-swap"},
                balance=made_up.balance(),
                balanced=made_up.work(),
            ),
            made_up.result("padded", adds_to="baseline", failure="out of memory"),
        ]
    )


def test_speed_in_markdown() -> None:
    assert markdown_table(SPEED, rows()).splitlines() == [
        "| run | GPUs | steps | step ms | p95 ms | slowest ms | 1,000 tokens/s | TFLOP/s | MFU | speed-up | adds "
        "| memory GiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| baseline | 2 | 4 | 20.00 | 20.00 | 20.00 | 15.0 | 9e-06 | 0.5% | 1.000 | - | 2.0..3.0 |",
        "| lpt \\| swap | 2 | 4 | 10.60 | 11.10 | 10.60 | 28.3 | 2e-05 | 0.9% | 1.887 ±0.089 | +88.7% | 2.0..3.0 |",
        "| padded (failed: out of memory) | 2 | - | - | - | - | - | - | - | - | - | - |",
    ]


def test_notes_say_what_columns_are() -> None:
    assert "- 1,000 tokens/s: of all data-parallel ranks, over the time of all steps measured." in notes(SPEED).split(
        "\n"
    )


def test_balance_in_markdown() -> None:
    lines = markdown_table(BALANCE, rows()).splitlines()

    assert lines[0] == (
        "| run | load before | load after | step / even | prepared / even | exposed % | exposed ms | with stalls % "
        "| moved samples / tokens |"
    )
    assert lines[2:5] == [
        "| baseline | - | 1.250 | - | - | - | - | - | - / - |",
        "| lpt \\| swap | 1.250 | 1.250 | 1.010 ±0.000 | 1.000 | 0.95 ±0.05 | 0.10 | 0.95 | 25% / 25% |",
        "| padded (failed: out of memory) | - | - | - | - | - | - | - | - |",
    ]


def test_ranks_in_markdown() -> None:
    lines = markdown_table(RANKS, rows()).splitlines()

    assert lines[0] == (
        "| run | compute ms | heaviest ms | heaviest / mean | wait ms | of each rank, ms | slowest rank |"
    )
    assert lines[2:5] == [
        "| baseline | 12.00 | 12.00 | 1.000 | 8.00 | 12.00 | 0 (+0.0%) |",
        "| lpt \\| swap | 6.36 | 6.36 | 1.000 | 4.24 | 6.36 | 0 (+0.0%) |",
        "| padded (failed: out of memory) | - | - | - | - | - | - |",
    ]


def test_every_row_and_column_fits_the_terminal() -> None:
    long = made_up.result(
        "+ embedding lookups overlapped with min-move",
        [
            made_up.marked(kind, number, *(scale * (1 + number / 50) * part for part in made_up.PARTS))
            for kind, scale in ((LIVE, 1020), (PREPARED, 1004), (EVEN, 1000))
            for number in (0, 1)
        ],
        settings={"strategy": "lpt-swap"},
        balance=made_up.balance(),
        peak_allocated=np.array([101, 139]) * 2**30,
        balanced=made_up.work(tokens=np.full((2, 2), 2**20)),
    )
    all_rows = (*rows(), *make_rows([long]))
    for columns in (SPEED, BALANCE, RANKS):
        text = io.StringIO()
        Console(file=text, width=WIDTH).print(terminal_table(columns, all_rows))

        lines = text.getvalue().splitlines()

        assert max(map(len, lines)) <= WIDTH
        assert "…" not in text.getvalue()
        for row in all_rows:
            assert any(columns[-1].cell(row) in line for line in lines)
            for column in columns[1:]:
                assert column.cell(row) in text.getvalue()


def test_noise_is_half_the_range_of_rounds() -> None:
    assert with_noise(Spread(value=1.0034, low=1.001, high=1.005), 3) == "1.003 ±0.002"
    assert with_noise(Spread(value=0.012, low=0.012, high=0.012), 1, scale=100, unit=" %") == "1.2 %"
    assert with_noise(None, 3) == "-"
