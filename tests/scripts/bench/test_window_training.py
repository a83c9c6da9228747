"""The script trains the same samples with each window, and compares its runs seed by seed."""

import json
from collections.abc import Iterator

import pytest
import torch
import window_training


@pytest.fixture(autouse=True)
def as_many_threads_afterwards() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_windows_are_compared_seed_by_seed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--users 32 --windows 1,2 --seeds 2 --ranks 2 --batch-size 4 --epochs 1 --max-history-length 16"
    monkeypatch.setattr("sys.argv", ["window_training.py", *options.split()])
    window_training.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["window"], row.get("seed")) for row in rows] == [(1, 0), (2, 0), (1, 1), (2, 1), (1, None), (2, None)]
    assert {row["steps"] for row in rows[:4]} == {4}
    first, windowed = rows[4:]
    assert windowed["eval_loss_difference"] == pytest.approx(windowed["eval_loss"] - first["eval_loss"], abs=1e-4)
    assert "eval_loss_difference" not in first


def test_a_step_has_the_gradient_that_ranks_would_average() -> None:
    settings = window_training.Settings(ranks=2, batch_size=2, epochs=1, max_history_length=16, learning_rate=1e-3)
    data = window_training.draw_data(8)
    loaders = window_training.make_loaders(data, settings, window=2, seed=0, metrics=[])
    batches = next(zip(*loaders, strict=True))
    union = window_training.union(loaders[0], batches)
    assert sorted(union.sample_ids.tolist()) == sorted(torch.cat([batch.sample_ids for batch in batches]).tolist())
    assert union.labels is not None
    assert union.world_loss_tokens == len(union.labels.values())
