"""The page "Windows of time": its loop, on a small dataset, and its continuation on one with later events."""

from pathlib import Path
from typing import Any

import pytest

from tests.dataloader.batch_helpers import ids_of
from tests.pages import ROOT, blocks

PAGE = ROOT / "docs" / "how-to" / "time-windows.md"


def test_the_loop_trains_each_window_before_it_evaluates_the_next_one(
    small_dataset: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "out").mkdir()
    (here / "out" / "all").symlink_to(small_dataset)
    loop, append = blocks(PAGE)
    trained: list[tuple[int, int]] = []

    def train(batch: Any) -> None:
        trained.extend((batch.epoch, sample) for sample in ids_of(batch))

    def evaluate(following: Any) -> float:
        windows = {batch.epoch for batch in following}
        assert windows == {trained[-1][0] + 1}
        return 0.5

    names: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "balance": None,
        "saved": None,
        "train": train,
        "evaluate": evaluate,
    }
    exec(loop, names)
    last = names["loader"].num_windows - 1
    assert {window for window, _ in trained} == set(range(last))
    assert len(set(trained)) == len(trained)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == last
    assert [line[:10] for line in lines[1:]] == [line[14:24] for line in lines[:-1]]  # each begins where one ends
    exec(append, names)
    assert names["loader"].epoch == last
