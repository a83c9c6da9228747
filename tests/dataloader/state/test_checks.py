"""What states may contain, and ids that keep their meaning from one day's log to the next, or the state is refused."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from evenrank.core.errors import DataError, StateError
from evenrank.dataloader import LoaderConfig, Mixture, TimeWindows, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer, LinearCost
from evenrank.dataloader.routing import KeyMap
from evenrank.dataloader.state.checks import check_vocabulary, decode, encode
from evenrank.datasets.schema import IdSummary, VocabularyVersion
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess

AA, BB = (VocabularyVersion(sha256=sha256, size=1) for sha256 in ("aa", "bb"))


def test_ids_of_a_state_must_keep_their_meaning_where_both_say_it() -> None:
    ids = {"item_id": IdSummary(rule="dense", kind="int64", versions=(AA, BB))}
    for known in ("aa", "bb"):
        check_vocabulary(f'{{"item_id": "dense int64 {known}", "city": "dense text 00"}}', ids, source="it")
    with pytest.raises(StateError, match=r"^it has item_id with the vocabulary cc, which this dataset, with the voc"):
        check_vocabulary('{"item_id": "dense int64 cc"}', ids, source="it")
    for damaged in ("x", "[]", "[" * 100_000):
        with pytest.raises(StateError, match=r"^corrupt it: field 'vocabulary' cannot be decoded; use another check"):
            check_vocabulary(damaged, ids, source="it")


def test_states_of_anyones_loaders_are_kept_without_pickling_and_no_code_is_run(tmp_path: Path) -> None:
    for state in (
        {"a": [1, 2.5, None, True, "x", b"y", (1, 2), {3}], 4: {}},
        torch.Generator().get_state(),
        np.random.default_rng(0).bit_generator.state,
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.int64(7),
    ):
        assert repr(decode(encode(state))) == repr(state)

    class Malicious:
        def __reduce__(self) -> Any:
            return (tmp_path / "ran").touch, ()

    with pytest.raises(StateError, match=r"contains .*, which is not loaded from files by default; if you trust"):
        decode(encode(Malicious()))
    assert not (tmp_path / "ran").exists()


CONFIG = LoaderConfig(batch_size=2, seed=3)
BALANCE = BalanceConfig(cost=LinearCost(interleave_actions=False))
DAY = 86_400
DAYS = (
    [("ann", "tea", 0), ("bob", "rye", 0), ("ann", "rye", 1), ("cat", "tea", 1)],
    [("dan", "ale", 2), ("bob", "tea", 3), ("ann", "fig", 4), ("eve", "rye", 5)],
)
ONE: dict[str, Any] = {"rank": 0, "world_size": 1}


def _write(folder: Path, name: str, rows: Sequence[Any], **options: Any) -> Path:
    """Preprocess a log of users, items and days."""
    log, out = folder / f"{name}.csv", Path(folder, options.pop("out", name))
    lines = (f"{user},{item},{1_772_086_400 + DAY * day}\n" for user, item, day in rows)
    log.write_text("user,item,time\n" + "".join(lines))
    columns: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    custom = TabularConfig(events=(log,), **columns)
    preprocess(PreprocessConfig(dataset="custom", out=out, split="none", custom=custom, **options))
    return out


@pytest.fixture
def days(tmp_path: Path) -> tuple[Path, Path]:
    first = _write(tmp_path, "day0", DAYS[0])
    return first, _write(tmp_path, "day1", DAYS[1], vocabulary=first)


def test_a_table_that_grows_is_trained_on_two_days_one_after_the_other(
    days: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    counts = torch.zeros(5)
    maps = [{"item_id": KeyMap(num_embeddings=size, world_size=2, mode="continuous")} for size in (3, 5)]
    first, second = (build_loader(d, replace(CONFIG, key_maps=m), **ONE) for d, m in zip(days, maps, strict=True))
    for loader in (first, second):
        if loader is second:
            second.begin_after(first.state_dict())
            assert second.epoch == 1
        for batch in loader:
            items = batch.features["item_id"].values()
            counts.index_add_(0, items, torch.ones(len(items)))
    vocabulary = pl.read_parquet(days[1] / "vocabulary_item_id.parquet").select("id", "value").iter_rows()
    assert {value: int(counts[row]) for row, value in vocabulary} == {"tea": 3, "rye": 3, "ale": 1, "fig": 1}
    assert not caplog.messages
    next(iter(second))
    build_loader(days[1], CONFIG, **ONE).begin_after(second.state_dict())
    unfinished = f"epoch 2 is not finished: {second.num_samples - 2} samples of its dataset are never trained"
    assert caplog.messages == [unfinished]


def test_a_state_or_a_mixture_of_another_vocabulary_is_refused_in_one_line(
    days: tuple[Path, Path], tmp_path: Path
) -> None:
    other = _write(tmp_path, "alone", DAYS[1])
    message = (
        r"^the loader's state has item_id with the vocabulary [0-9a-f]{12}, which this dataset, with the "
        r"vocabulary [0-9a-f]{12}, does not extend; preprocess it with --vocabulary of the dataset"
    )
    builders: list[Any] = [build_loader, build_stream_loader]
    for build in builders:
        states = [build(day, CONFIG, **ONE).state_dict() for day in days]
        alone, first = (build(day, CONFIG, **ONE) for day in (other, days[0]))
        # The first day's dataset lacks what the later one added.
        for load, state in ((alone.begin_after, 0), (alone.load_state_dict, 0), (first.begin_after, 1)):
            with pytest.raises(StateError, match=message):
                load(states[state])
    mixture = build_loader(Mixture(weights={days[0]: 1.0, days[1]: 1.0}), CONFIG, **ONE)
    build_loader(days[1], CONFIG, **ONE).begin_after(mixture.state_dict())
    with pytest.raises(DataError, match="number their user_id differently; preprocess one with --vocabulary of the o"):
        build_loader(Mixture(weights={days[0]: 1.0, other: 1.0}), CONFIG, **ONE)


WINDOWS = replace(CONFIG, order=TimeWindows(every="1d"), max_num_candidates=9)
KINDS: dict[str, Any] = {
    "plain": partial(build_loader, config=CONFIG),
    "balanced alone": partial(build_loader, config=CONFIG, balance=BALANCE),
    "Balancer": partial(build_loader, config=CONFIG),
    "windows of time": partial(build_loader, config=WINDOWS),
    "stream": partial(build_stream_loader, config=CONFIG),
}


def test_a_dataset_is_continued_after_each_of_the_days_that_were_appended_on_any_ranks(tmp_path: Path) -> None:
    """`auto` numbers the items densely: those of later days fill gaps."""

    def wrapped(name: str, loader: Any, world_size: int = 1) -> Any:
        return Balancer(loader, BALANCE) if name == "Balancer" and world_size == 1 else nullcontext(loader)

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
                    with wrapped(name, loader, world_size) as batches:
                        seen += [item for batch in batches for item in batch.features["item_id"].values().tolist()]
                if day == 1:
                    expected = range(60) if name == "windows of time" else [*range(60), 90, 91]
                    assert sorted(raw.gather([item - 1 for item in seen]).unique()) == [*expected], name
        for name, build in KINDS.items():
            with wrapped(name, build(out, **ONE)) as batches:
                list(batches)
                states.append((name, batches.state_dict()))
