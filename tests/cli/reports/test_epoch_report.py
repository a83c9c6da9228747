import dataclasses
from pathlib import Path

from rich.console import Console

from evenrank.cli.balance_walk import Walk
from evenrank.cli.reports.epoch_report import draw_loads, load_table
from tests.dataloader.balance.test_writers import step

BEFORE = ((30, 10), (10, 20))


def _walk(strategy: str, after: tuple[tuple[int, int], ...]) -> Walk:
    metrics = []
    for number, loads in enumerate(after):
        measured = step(number, before=BEFORE[number], after=loads)
        bound = sum(loads) // 2
        metrics.append(dataclasses.replace(measured, lower_bound=bound, moved_samples=number, plan_seconds=0.002))
    return Walk(strategy=strategy, num_samples=8, metrics=metrics)


WALKS = [_walk("none", BEFORE), _walk("lpt-swap", ((20, 20), (15, 15)))]


def test_the_table_fits_in_80_columns_and_shows_the_gain() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(load_table(WALKS))
    rows = {cells[0]: cells[1:] for line in capture.get().splitlines() if (cells := line.split())}
    # Ratios 30/20 and 20/15; idle 1 - 70/100; speed-up (30 + 20) / (20 + 15); one of eight samples moved.
    assert rows["none"] == ["1.417", "1.417", "1.500", "30.0%", "30.0%", "1.00x", "12%", "2.00"]
    assert rows["lpt-swap"] == ["1.417", "1.000", "1.000", "30.0%", "0.0%", "1.43x", "12%", "2.00"]


def test_the_plot_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "balance.png"
    draw_loads(WALKS, path, title="two ranks")
    assert path.read_bytes().startswith(b"\x89PNG")
