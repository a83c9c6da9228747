from pathlib import Path

import pytest

from evenrank.cli.demo import demo
from evenrank.dataloader.balance import STRATEGIES


@pytest.mark.timeout(280)
def test_the_demo_ends_with_a_table_of_all_strategies_and_a_picture(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    demo(tmp_path)
    shown = capfd.readouterr().out
    rows = {words[0]: words[1:] for line in shown.splitlines() if (words := line.split())}
    for strategy in STRATEGIES:
        assert len(rows[strategy]) == 8
    assert float(rows["lpt-swap"][1]) < float(rows["karmarkar-karp"][1]) < float(rows["identity"][1])
    assert "13,999 samples, each seen exactly once and unaltered" in shown
    assert (tmp_path / "balance.png").read_bytes().startswith(b"\x89PNG")
