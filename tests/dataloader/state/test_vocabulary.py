"""Training on one day's log after another's: ids keep their meaning, or the state is refused."""

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from evenrank.core.errors import DataError, StateError
from evenrank.dataloader import LoaderConfig, Mixture, TimeWindows, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, LinearCost
from evenrank.dataloader.routing import MODES, KeyMap
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess

CONFIG = LoaderConfig(batch_size=2, seed=3)
BALANCE = BalanceConfig(cost=LinearCost(interleave_actions=False))
DAY = 86_400
DAYS = (
    [("ann", "tea", 0), ("bob", "rye", 0), ("ann", "rye", 1), ("cat", "tea", 1)],
    [("dan", "ale", 2), ("bob", "tea", 3), ("ann", "fig", 4), ("eve", "rye", 5)],
)
ONE: dict[str, Any] = {"rank": 0, "world_size": 1}
BUILDERS: list[Any] = [build_loader, build_stream_loader]


def _write(folder: Path, name: str, rows: Sequence[Any], **options: Any) -> Path:
    """Preprocess a log of users, items and days."""
    log = folder / f"{name}.csv"
    log.write_text(
        "user,item,time\n" + "".join(f"{user},{item},{1_772_086_400 + DAY * day}\n" for user, item, day in rows)
    )
    of_log: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    custom = TabularConfig(events=(log,), **of_log)
    out = Path(folder, options.pop("out", name))
    preprocess(PreprocessConfig(dataset="custom", out=out, split="none", custom=custom, **options))
    return out


@pytest.fixture
def days(tmp_path: Path) -> tuple[Path, Path]:
    first = _write(tmp_path, "day0", DAYS[0])
    return first, _write(tmp_path, "day1", DAYS[1], vocabulary=first)


def _train(loader: Any, table: torch.nn.Embedding) -> None:
    """Add 1 to the row of each item that is trained."""
    for batch in loader:
        items = batch.features["item_id"].values()
        with torch.no_grad():
            table.weight.index_add_(0, items, torch.ones(len(items), 1))


def test_an_embedding_table_is_trained_on_two_days_one_after_the_other(
    days: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    first, table = build_loader(days[0], CONFIG, **ONE), torch.nn.Embedding.from_pretrained(torch.zeros(3, 1))
    _train(first, table)
    second = build_loader(days[1], CONFIG, **ONE)
    second.begin_after(first.state_dict())
    assert second.epoch == 1
    table = torch.nn.Embedding.from_pretrained(torch.cat([table.weight, torch.zeros(2, 1)]))
    _train(second, table)
    vocabulary = pl.read_parquet(days[1] / "vocabulary_item_id.parquet").select("id", "value").iter_rows()
    assert {value: float(table.weight[row, 0]) for row, value in vocabulary} == {"tea": 3, "rye": 3, "ale": 1, "fig": 1}
    assert not caplog.messages
    iterator = iter(second)
    next(iterator)
    build_loader(days[1], CONFIG, **ONE).begin_after(second.state_dict())
    assert caplog.messages == [
        f"epoch 2 is not finished: {second.num_samples - 2} samples of its dataset are never trained"
    ]


def test_a_state_or_a_mixture_of_another_vocabulary_is_refused_in_one_line(
    days: tuple[Path, Path], tmp_path: Path
) -> None:
    other = _write(tmp_path, "alone", DAYS[1])
    for build in BUILDERS:
        state, alone = build(days[0], CONFIG, **ONE).state_dict(), build(other, CONFIG, **ONE)
        for load in (alone.begin_after, alone.load_state_dict):
            message = (
                r"^the loader's state has item_id with the vocabulary [0-9a-f]{12}, which this dataset, with the "
                r"vocabulary [0-9a-f]{12}, does not extend; preprocess it with --vocabulary of the dataset"
            )
            with pytest.raises(StateError, match=message):
                load(state)
    later = build_loader(days[1], CONFIG, **ONE)
    with pytest.raises(StateError, match="does not extend"):  # the old dataset lacks what the later one added
        build_loader(days[0], CONFIG, **ONE).begin_after(later.state_dict())
    mixture = build_loader(Mixture(weights={days[0]: 1.0, days[1]: 1.0}), CONFIG, **ONE)
    later.begin_after(mixture.state_dict())
    with pytest.raises(
        DataError, match="number their user_id differently; preprocess one with --vocabulary of the other"
    ):
        build_loader(Mixture(weights={days[0]: 1.0, other: 1.0}), CONFIG, **ONE)


KINDS: dict[str, Any] = {
    "plain": partial(build_loader, config=CONFIG),
    "balanced alone": partial(build_loader, config=CONFIG, balance=BALANCE),
    "Balancer": partial(build_loader, config=CONFIG),
    "windows of time": partial(
        build_loader, config=replace(CONFIG, order=TimeWindows(every="1d"), max_num_candidates=9)
    ),
    "stream": partial(build_stream_loader, config=CONFIG),
}


def test_a_dataset_is_continued_after_each_of_the_days_that_were_appended_on_any_ranks(tmp_path: Path) -> None:
    """`auto` numbers the items densely: those of later days fill gaps."""
    states: list[tuple[str, Any]] = []
    for day, items in enumerate(([90, 91], range(60), [95, 3])):
        rows = [(1000 * day + item % 7, item, day + item / DAY) for item in items]
        out = _write(tmp_path, f"day{day}", rows, out="all", append=day > 0)
        raw = pl.read_parquet(out / "vocabulary_item_id.parquet").get_column("value")
        for name, state in states:
            for world_size in (1, 3):
                seen: list[int] = []
                for rank in range(world_size):
                    loader = KINDS[name](out, rank=rank, world_size=world_size)
                    loader.begin_after(state)
                    is_balanced = name == "Balancer" and world_size == 1
                    with Balancer(loader, BALANCE) if is_balanced else nullcontext(loader) as batches:
                        seen += [item for batch in batches for item in batch.features["item_id"].values().tolist()]
                if day == 1:
                    expected = range(60) if name == "windows of time" else [*range(60), 90, 91]
                    assert sorted(raw.gather([item - 1 for item in seen]).unique()) == [*expected], name
        for name, build in KINDS.items():
            with (
                Balancer(build(out, **ONE), BALANCE)
                if name == "Balancer"
                else nullcontext(build(out, **ONE)) as batches
            ):
                list(batches)
                states.append((name, batches.state_dict()))


def test_keys_keep_their_rows_when_tables_grow_or_the_state_is_refused(days: tuple[Path, Path]) -> None:
    for build, mode in itertools.product(BUILDERS, MODES):
        maps = [{"item_id": KeyMap(num_embeddings=size, world_size=2, mode=mode)} for size in (3, 5)]
        tight, grown = (build(day, replace(CONFIG, key_maps=of), **ONE) for day, of in zip(days, maps, strict=True))
        if mode == "continuous":
            grown.begin_after(tight.state_dict())
            continue
        with pytest.raises(StateError, match=rf"stores item_id with routing {mode} \(num_embeddings 3.* uses {mode}"):
            grown.begin_after(tight.state_dict())
