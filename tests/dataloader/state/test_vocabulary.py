"""Training on one day's log after another's: ids keep their meaning, or the state is refused."""

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
from evenrank.datasets import open_store
from evenrank.datasets.schema import content_hash, read_manifest
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess

CONFIG = LoaderConfig(batch_size=2, seed=3)
BALANCE = BalanceConfig(cost=LinearCost(interleave_actions=False))
DAYS = (
    [
        ("ann", "tea", 1_772_086_400),
        ("bob", "rye", 1_772_086_400),
        ("ann", "rye", 1_772_172_800),
        ("cat", "tea", 1_772_172_800),
    ],
    [
        ("dan", "ale", 1_772_259_200),
        ("bob", "tea", 1_772_345_600),
        ("ann", "fig", 1_772_432_000),
        ("eve", "rye", 1_772_518_400),
    ],
)


def write_day(folder: Path, day: int, *, vocabulary: Path | None = None) -> Path:
    log, out = folder / f"day{day}.csv", folder / f"day{day}{'-alone' if day and vocabulary is None else ''}"
    rows: Sequence[Any] = DAYS[day]
    pl.DataFrame(rows, schema=["user", "item", "time"], orient="row").write_csv(log)
    custom = TabularConfig(events=(log,), user_column="user", item_column="item", timestamp_column="time")
    config = PreprocessConfig(dataset="custom", out=out, split="none", custom=custom, vocabulary=vocabulary)
    preprocess(config)
    return out


@pytest.fixture
def days(tmp_path: Path) -> tuple[Path, Path]:
    first = write_day(tmp_path, 0)
    return first, write_day(tmp_path, 1, vocabulary=first)


def count_by_value(dataset: Path, table: torch.Tensor) -> dict[str, float]:
    """Return the row of an embedding table of each item, by its raw value."""
    vocabulary = pl.read_parquet(dataset / "vocabulary_item_id.parquet")
    return {value: float(table[row, 0]) for row, value in vocabulary.select("id", "value").iter_rows()}


def train(loader: Any, table: torch.nn.Embedding) -> None:
    """Add 1 to the row of each item that is trained."""
    for batch in loader:
        items = batch.features["item_id"].values()
        with torch.no_grad():
            table.weight.index_add_(0, items, torch.ones(len(items), 1))


def test_an_embedding_table_is_trained_on_two_days_one_after_the_other(days: tuple[Path, Path]) -> None:
    first = build_loader(days[0], CONFIG, rank=0, world_size=1)
    table = torch.nn.Embedding.from_pretrained(torch.zeros(open_store(days[0]).manifest.vocabulary_sizes["item_id"], 1))
    train(first, table)
    checkpoint = {"table": table.state_dict(), "loader": first.state_dict()}

    second = build_loader(days[1], CONFIG, rank=0, world_size=1)
    second.begin_after(checkpoint["loader"])
    assert second.epoch == 1
    table = torch.nn.Embedding.from_pretrained(torch.zeros(5, 1))
    table.weight.data[:3] = checkpoint["table"]["weight"]
    train(second, table)

    assert count_by_value(days[1], table.weight.detach()) == {"tea": 3, "rye": 3, "ale": 1, "fig": 1}
    resumed = build_loader(days[1], CONFIG, rank=0, world_size=1)
    resumed.load_state_dict(second.state_dict())
    assert resumed.epoch == 2


def test_samples_that_an_unfinished_epoch_leaves_out_are_named(
    days: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    first = build_loader(days[0], replace(CONFIG, batch_size=1), rank=0, world_size=1)
    next(iter(first))
    build_loader(days[1], CONFIG, rank=0, world_size=1).begin_after(first.state_dict())
    assert caplog.messages == [f"epoch 0 is not finished: {len(first) - 1} samples of its dataset are never trained"]


def test_a_state_of_another_vocabulary_is_refused_in_one_line(days: tuple[Path, Path], tmp_path: Path) -> None:
    state = build_loader(days[0], CONFIG, rank=0, world_size=1).state_dict()
    alone = build_loader(write_day(tmp_path, 1), CONFIG, rank=0, world_size=1)
    for load in (alone.begin_after, alone.load_state_dict):
        with pytest.raises(
            StateError,
            match=r"^the loader's state has item_id with the vocabulary [0-9a-f]{12}, which this dataset, with the "
            r"vocabulary [0-9a-f]{12}, does not extend; preprocess it with --vocabulary of the dataset",
        ):
            load(state)
    later = build_loader(days[1], CONFIG, rank=0, world_size=1)
    with pytest.raises(StateError, match=r"is of other data, .* or train on other data after it with begin_after"):
        later.load_state_dict(state)
    with pytest.raises(StateError, match="does not extend"):  # the old dataset lacks what the later one added
        build_loader(days[0], CONFIG, rank=0, world_size=1).begin_after(later.state_dict())


def test_a_stream_begins_after_the_stream_of_an_earlier_day(days: tuple[Path, Path], tmp_path: Path) -> None:
    first = build_stream_loader(days[0], CONFIG, rank=0, world_size=1)
    assert sum(batch.num_real for batch in first) == 3
    second = build_stream_loader(days[1], CONFIG, rank=0, world_size=1)
    second.begin_after(first.state_dict())
    assert second.epoch == 1
    assert sum(batch.num_real for batch in second) == 4
    with pytest.raises(StateError, match="the loader's state has item_id with the vocabulary"):
        build_stream_loader(write_day(tmp_path, 1), CONFIG, rank=0, world_size=1).begin_after(first.state_dict())


def test_a_mixture_needs_vocabularies_of_which_one_extends_all(days: tuple[Path, Path], tmp_path: Path) -> None:
    loader = build_loader(Mixture(weights={days[0]: 1.0, days[1]: 1.0}), CONFIG, rank=0, world_size=1)
    build_loader(days[1], CONFIG, rank=0, world_size=1).begin_after(loader.state_dict())
    alone = write_day(tmp_path, 1)
    with pytest.raises(
        DataError, match="number their user_id differently; preprocess one with --vocabulary of the other"
    ):
        build_loader(Mixture(weights={days[0]: 1.0, alone: 1.0}), CONFIG, rank=0, world_size=1)


def write_users(folder: Path, name: str, countries: dict[int, str], **options: Any) -> Path:
    """Write a dataset of users and items whose ids are kept, and of which only the features differ."""
    log = folder / "log.csv"
    log.write_text("user,item,time\n" + "".join(f"{user},{user},{1_772_086_400 + user}\n" for user in countries))
    features = folder / f"{name}.csv"
    features.write_text("user,item,country\n" + "".join(f"{user},{user},{c}\n" for user, c in countries.items()))
    columns: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
    of_users = {"context": features, "context_columns": ("country",)}
    of_items = {"item_features": features, "item_columns": ("country",)}
    named: dict[str, dict[str, Any]] = {
        "ids of users": of_users,
        "lists of users": of_users | {"context_columns": ("country:list",)},
        "ids of items": of_items,
        "table of items": of_items | {"item_columns": ("country:list",), "item_features_as": "table"},
    }
    custom = TabularConfig(events=(log,), **columns, **named[options.pop("of")])
    options = ({} if "vocabulary" in options else {"ids": "keep"}) | options
    out = folder / name
    preprocess(PreprocessConfig(dataset="custom", out=out, split="none", custom=custom, **options))
    return out


@pytest.mark.parametrize("of", ["ids of users", "lists of users", "ids of items", "table of items"])
def test_values_of_features_mean_the_same_in_a_mixture_and_after_a_state(tmp_path: Path, of: str) -> None:
    first = write_users(tmp_path, "first", {1: "DE", 2: "FR"}, of=of)
    same = write_users(tmp_path, "same", {1: "FR", 2: "DE"}, of=of)
    other = write_users(tmp_path, "other", {1: "AT", 2: "DE"}, of=of)
    grown = write_users(tmp_path, "grown", {1: "AT", 2: "DE"}, of=of, vocabulary=first)
    builders: list[Any] = [build_loader, build_stream_loader]
    states = [build(first, CONFIG, rank=0, world_size=1).state_dict() for build in builders]
    for later in (same, grown, other):
        mixture = Mixture(weights={first: 1.0, later: 1.0})
        loaders = [build(later, CONFIG, rank=0, world_size=1) for build in builders]
        if later != other:
            build_loader(mixture, CONFIG, rank=0, world_size=1)
            for loader, state in zip(loaders, states, strict=True):
                loader.begin_after(state)
            continue
        with pytest.raises(DataError, match=r"first, .*other number their country differently; preprocess one with"):
            build_loader(mixture, CONFIG, rank=0, world_size=1)
        for loader, state in zip(loaders, states, strict=True):
            with pytest.raises(
                StateError, match=r"state has country with the vocabulary .* does not extend; preprocess"
            ):
                loader.begin_after(state)
    manifest = read_manifest(other)  # as older releases wrote it
    older = replace(manifest, ids={name: manifest.ids[name] for name in ("user_id", "item_id")})
    replace(older, content_hash=content_hash(older)).write(other)
    build_loader(other, CONFIG, rank=0, world_size=1).begin_after(states[0])


@pytest.mark.parametrize("kind", ["text", "int64", "uint64"])
def test_a_state_is_continued_after_each_of_the_days_that_were_appended_since(tmp_path: Path, kind: str) -> None:
    first_user = {"text": "u", "int64": "", "uint64": "1844674407370955160"}[kind]
    states: list[Any] = []
    for day in range(3):
        log, users = tmp_path / f"day{day}.csv", tmp_path / "users.csv"
        rows = "".join(f"{first_user}{user},{user}0,{1_772_086_400 + 86_400 * day}\n" for user in range(day, day + 2))
        log.write_text(f"user,item,time\n{rows}")
        users.write_text("user,city\n" + "".join(f"{first_user}{user},c{9 - user}\n" for user in range(day + 2)))
        columns: dict[str, Any] = {"user_column": "user", "item_column": "item", "timestamp_column": "time"}
        custom = TabularConfig(events=(log,), context=users, context_columns=("city",), **columns)
        out = tmp_path / "out"
        config = PreprocessConfig(dataset="custom", out=out, split="none", custom=custom, ids="dense", append=day > 0)
        manifest = preprocess(config)
        assert manifest.ids["user_id"].kind == kind
        assert [len(ids.versions) for ids in manifest.ids.values()] == [day + 1] * 3
        for build in (build_loader, build_stream_loader):
            for builder, state in states:
                if builder is build:
                    build(out, CONFIG, rank=0, world_size=1).begin_after(state)
            states.append((build, build(out, CONFIG, rank=0, world_size=1).state_dict()))


def append_day(folder: Path, day: int) -> Path:
    """Write or append a day of a log with integers, of which `auto` numbers the items: they fill gaps later on."""
    log, out = folder / f"day{day}.csv", folder / "all"
    items = [[90, 91], [*range(60)]][day]
    rows = [f"{1000 * day + item % 7},{item},{1_772_086_400 + 86_400 * day + item}\n" for item in items]
    log.write_text("user,item,time\n" + "".join(rows))
    custom = TabularConfig(events=(log,), user_column="user", item_column="item", timestamp_column="time")
    preprocess(PreprocessConfig(dataset="custom", out=out, split="none", custom=custom, append=day > 0))
    return out


BUILDERS: dict[str, Any] = {
    "plain": partial(build_loader, config=CONFIG),
    "balanced alone": partial(build_loader, config=CONFIG, balance=BALANCE),
    "Balancer": partial(build_loader, config=CONFIG),
    "windows of time": partial(
        build_loader, config=replace(CONFIG, order=TimeWindows(every="1d"), max_num_candidates=9)
    ),
    "stream": partial(build_stream_loader, config=CONFIG),
}


def test_a_dataset_is_continued_after_new_users_and_items_were_appended_on_any_number_of_ranks(tmp_path: Path) -> None:
    out, states = append_day(tmp_path, 0), {}
    for name, build in BUILDERS.items():
        loader = build(out, rank=0, world_size=1)
        with Balancer(loader, BALANCE) if name == "Balancer" else nullcontext(loader) as batches:
            list(batches)
            states[name] = batches.state_dict()
    append_day(tmp_path, 1)
    for name, build in BUILDERS.items():
        for world_size in (1, 3):
            items: list[int] = []
            for rank in range(world_size):
                loader = build(out, rank=rank, world_size=world_size)
                loader.begin_after(states[name])
                assert loader.epoch == 1
                with (
                    Balancer(loader, BALANCE)
                    if name == "Balancer" and world_size == 1
                    else nullcontext(loader) as batches
                ):
                    for batch in batches:
                        items += batch.features["item_id"].values().tolist()
            raw = pl.read_parquet(out / "vocabulary_item_id.parquet").get_column("value").gather([i - 1 for i in items])
            expected = range(60) if name == "windows of time" else [*range(60), 90, 91]
            assert sorted(raw.unique()) == [*expected], name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", [build_loader, build_stream_loader])
def test_keys_keep_their_rows_when_tables_grow_or_the_state_is_refused(
    days: tuple[Path, Path], build: Any, mode: Any
) -> None:
    def make(day: int, num_embeddings: int) -> Any:
        key_map = KeyMap(num_embeddings=num_embeddings, world_size=2, mode=mode)
        return build(days[day], replace(CONFIG, key_maps={"item_id": key_map}), rank=0, world_size=1)

    roomy, tight = (make(0, num_embeddings).state_dict() for num_embeddings in (9, 3))
    make(1, 9).begin_after(roomy)
    if mode == "continuous":
        make(1, 5).begin_after(tight)
        return
    with pytest.raises(StateError, match=rf"state stores item_id with routing {mode} \(num_embeddings 3.* uses {mode}"):
        make(1, 5).begin_after(tight)
    with pytest.raises(StateError, match=r"but this job uses continuous"):
        build(days[1], CONFIG, rank=0, world_size=1).begin_after(roomy)
