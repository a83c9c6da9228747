import sys
from pathlib import Path

from evenrank.dataloader.balance import STRATEGIES
from tests.cli.programs import run_program


def test_the_demo_ends_with_a_table_of_all_strategies_and_a_plot(tmp_path: Path) -> None:
    run = run_program(sys.executable, "-m", "evenrank", "demo", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    rows = {cells[0]: cells[1:] for line in run.stdout.splitlines() if (cells := line.split())}
    for strategy in STRATEGIES:
        assert len(rows[strategy]) == 8
    assert float(rows["lpt-swap"][1]) < float(rows["karmarkar-karp"][1]) < float(rows["none"][1])
    assert rows["lpt-swap*"][:7] == [*rows["lpt-swap"][:6], "0%"]
    assert "13,999 samples, each seen exactly once and unaltered" in run.stdout
    assert (tmp_path / "out" / "demo" / "balance.png").read_bytes().startswith(b"\x89PNG")
