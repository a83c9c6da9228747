import json
from pathlib import Path

from tests.cli.programs import Evenrank
from tests.dataloader.balance.metrics.example_steps import STEPS, TIMED_STEPS, write


def _rows(output: str) -> dict[str, list[str]]:
    """Return the cells of each row of a table by its label."""
    rows = {}
    for line in output.splitlines():
        if cells := [cell.strip() for cell in line.split("  ") if cell.strip()]:
            rows[cells[0]] = cells[1:]
    return rows


def test_a_table_is_printed(here: Path, evenrank: Evenrank) -> None:
    write(here / "run.jsonl", *STEPS[:4], every=2)
    run = evenrank("metrics", "run.jsonl")
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    first = json.loads((here / "run.jsonl").read_text().splitlines()[0])["run"]
    assert lines[0] == f"run.jsonl: 4 steps on 2 ranks, run {first['id']} of {first['started']}"
    rows = _rows("\n".join(lines[1:]))
    assert rows["idle before balancing, predicted"] == ["46.9%", "50.0%"]  # 1 - 17/32, 1 - 9/18
    assert rows["idle after balancing, predicted"] == ["0.0%", "0.0%"]
    assert rows["speed-up, predicted"] == ["1.88x", "2.00x"]  # of 6, 8, 10, 8 and 4, 4, 5, 4
    assert rows["heaviest load / lower bound, before"] == ["2.000", "2.250"]
    assert rows["heaviest load / lower bound, worst step"] == ["1.250", "1.250"]
    assert rows["tokens moved"] == ["25.0%", "25.0%"]
    assert rows["in the background: plan"] == ["375.00 ms", "500.00 ms"]
    assert not any("measured" in label for label in rows)
    assert [path.name for path in here.iterdir()] == ["run.jsonl"]


def test_measured_numbers_are_below_those_of_the_cost(here: Path, evenrank: Evenrank) -> None:
    write(here / "run.jsonl", *TIMED_STEPS)
    rows = _rows(evenrank("metrics", "run.jsonl").stdout)
    assert list(rows)[3:9] == [
        "idle before balancing, predicted",
        "idle before balancing, measured",
        "idle after balancing, predicted",
        "idle after balancing, measured",
        "speed-up, predicted",
        "speed-up, measured",
    ]
    assert rows["idle before balancing, measured"] == ["31.2%", "-"]  # the last step was balanced
    assert rows["idle after balancing, measured"] == ["6.2%", "6.2%"]
    assert rows["speed-up, measured"] == ["2.00x", "-"]
    assert rows["step time"] == ["1,000.00 ms", "1,000.00 ms"]


def test_runs_are_compared_by_their_numbers_and_options(here: Path, evenrank: Evenrank) -> None:
    common = {"seed": 7, "data": {"datasets": ["ml-20m"]}}
    write(here / "a.jsonl", *STEPS, options={**common, "strategy": "none", "data": {"batch_size": 8}})
    write(
        here / "b.jsonl", *TIMED_STEPS, options={**common, "strategy": "lpt-swap", "data": {"batch_size": 32}, "x": 1}
    )
    with (here / "b.jsonl").open("a") as file:
        file.write("{")
    run = evenrank("metrics", "a.jsonl", "b.jsonl")
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert lines[0].startswith("a.jsonl: 5 steps on 2 ranks, run ")
    assert lines[1].startswith("b.jsonl: 4 steps on 2 ranks, run ")
    assert lines[2] == "skipped 1 line that could not be read"
    rows = _rows("\n".join(lines[3:]))
    assert rows["idle before balancing, predicted"] == ["44.7%", "33.3%"]
    assert rows["speed-up, measured"] == ["-", "2.00x"]
    assert (rows["strategy"], rows["data.batch_size"], rows["x"]) == (["none", "lpt-swap"], ["8", "32"], ["-", "1"])
    assert "seed" not in rows
    assert sorted(path.name for path in here.iterdir()) == ["a.jsonl", "b.jsonl"]
