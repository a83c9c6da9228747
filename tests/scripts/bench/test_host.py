import json
import sys

import pytest
from batch_sources import PREPARED

import host
from host import Turn, summarize, table, table_of_threads, turns_of
from tests.cli.programs import ROOT, run_program

SCRIPT = ROOT / "scripts" / "bench" / "host.py"


def turn(*ms: float, other_ms: float = 0.0, **threads: float) -> Turn:
    taking_ms = [each / 10 for each in ms]
    return Turn(ms=list(ms), taking_ms=taking_ms, training_ms=sum(ms) / len(ms), other_ms=other_ms, threads=threads)


def test_turns_are_equally_long() -> None:
    assert turns_of(300) == [30] * 10
    assert turns_of(33) == [16, 17]
    assert turns_of(32) == [32]
    assert turns_of(1) == [1]


def test_a_row_is_of_the_slowest_rank_and_relative_to_the_same_turns() -> None:
    prepared = [[turn(10, 10, 10), turn(20, 20, 20, other_ms=1)], [turn(9, 9, 9), turn(18, 18, 18)]]
    ours = [
        [turn(10, 11, 30, other_ms=3, balancer=2), turn(20, 24, 20, other_ms=1, balancer=1, gloo=0.0001)],
        [turn(12, 12, 12, other_ms=2, balancer=2), turn(22, 22, 22, other_ms=2, balancer=2)],
    ]
    row = summarize(ours, prepared)
    assert row == {
        "steps": 6,
        "ms": 20.0,  # of rank 0: 10, 11, 20, 20, 24, 30
        "p95_ms": 28.5,
        "x_prepared": 1.15,  # medians of turns: 12 over 10 and 22 over 20
        "x_turns": [1.1, 1.2],
        "x_prepared_mean": round(115 / 90, 4),
        "training_ms": round((17 + 64 / 3 + 12 + 22) / 4, 3),
        "taking_ms": 1.85,  # 2.0 of rank 0, as its steps, and 1.7 of rank 1
        "other_ms": 2.0,
        "other_ms_more": 1.75,
        "threads": {"balancer": 1.75},
    }
    rows = [{"batches": "prepared", **summarize(prepared, prepared)}, {"batches": "ours", **row}]
    assert table(rows).splitlines()[-1] == (
        "| ours | 20.000 | 28.500 | 1.150 | 1.100 to 1.200 | 1.278 | 18.083 | 1.850 | 2.000 | 1.750 |"
    )
    assert table_of_threads(rows).splitlines()[0::2] == ["| CPU ms per step | balancer |", "| prepared | 0.000 |"]


def test_rows_and_tables_are_printed() -> None:
    options = ("--device", "cpu", "--ranks", "2", "--steps", "16", "--launches", "2", "--omp-threads", "2")
    ended = run_program(sys.executable, SCRIPT, *options, "--only", "loader,min-move")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    rows = [json.loads(line) for line in lines[:3]]
    assert [row["batches"] for row in rows] == [PREPARED, "loader", "min-move"]
    for row in rows:
        assert (row["ranks"], row["device"], row["omp_threads"], row["steps"]) == (2, "cpu", 2, 16)
        assert 0 < row["ms"] <= row["p95_ms"]
        assert row["training_ms"] > 0
        assert row["other_ms"] == pytest.approx(rows[0]["other_ms"] + row["other_ms_more"], abs=0.002)
    assert (rows[0]["x_prepared"], rows[0]["x_prepared_mean"], rows[0]["other_ms_more"]) == (1.0, 1.0, 0.0)
    assert ["evenrank-balancer" in row["threads"] for row in rows] == [False, False, True]
    assert [line.split(" | ")[0] for line in lines[4:9:2]] == ["| batches from", "| prepared", "| min-move"]
    assert "evenrank-balancer" in lines[10]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--only loader,best", "--only has 'best'; known are prepared, prepared again, loader, no exchange, none"),
        ("--device cpu --ranks 0", "--ranks must be at least 1, got 0"),
        ("--device cpu --omp-threads 0", "--omp-threads must be at least 1, got 0"),
        ("--steps 0", "--steps must be at least 1 and --launches 0, got 0 and 5000"),
    ],
)
def test_mistakes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    monkeypatch.setattr("sys.argv", ["host.py", *options.split()])
    with pytest.raises(SystemExit) as ended:
        host.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
