import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from evenrank.core.errors import ConfigError, RankError, StateError
from evenrank.dataloader import (
    LoaderConfig,
    Mixture,
    RandomBatches,
    RandomData,
    StreamConfig,
    build_loader,
    build_stream_loader,
    random_codes,
)
from evenrank.dataloader.balance import BalanceConfig
from evenrank.dataloader.balance.ranks.agree import check_settings
from evenrank.dataloader.routing import MODES, KeyMap, Mode, map_features
from evenrank.datasets.distributions import Uniform
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.balance.costs import COST
from tests.datasets.crafted import copy_dataset

RANKS: dict[str, Any] = {"rank": 0, "world_size": 2}


def _maps(mode: Mode, world_size: int = 2) -> dict[str, KeyMap]:
    sizes = {"item_id": 503, "user_id": 301, "segment": 10}
    return {name: KeyMap(num_embeddings=size, world_size=world_size, mode=mode) for name, size in sizes.items()}


def _config(key_maps: Mapping[str, KeyMap], **options: Any) -> LoaderConfig:
    settings: dict[str, Any] = {"batch_size": 8, "user_id": True, "max_num_candidates": 1, "key_maps": key_maps}
    return LoaderConfig(**settings | options)


def _mixture(path: Path) -> Mixture:
    other = path.with_name("other")
    return Mixture(weights={path: 2.0, other if other.exists() else copy_dataset(path, other): 1.0})


Maps = Mapping[str, KeyMap]
WINDOWS = BalanceConfig(cost=COST, window=3)
STREAM = StreamConfig(lanes=4, window_rows=20)
DATA = RandomData(items=Uniform(high=502))
CODES = random_codes(503, levels=2, codebook_size=8)
KINDS: dict[str, Callable[[Path, Maps], Any]] = {
    "plain": lambda path, maps: build_loader(path, _config(maps), **RANKS),
    "workers": lambda path, maps: build_loader(path, _config(maps, num_workers=2, order="rows"), **RANKS),
    "pickled": lambda path, maps: pickle.loads(pickle.dumps(build_loader(path, _config(maps), **RANKS))),
    "balanced": lambda path, maps: build_loader(path, _config(maps), balance=WINDOWS, **RANKS),
    "mixture": lambda path, maps: build_loader(_mixture(path), _config(maps), **RANKS),
    "stream": lambda path, maps: build_stream_loader(path, _config(maps), STREAM, **RANKS),
    "random": lambda path, maps: RandomBatches(_config(maps, user_id=False), DATA, num_batches=12, **RANKS),
    "semantic ids": lambda path, maps: build_loader(
        path, LoaderConfig(batch_size=8, codes=CODES, user_id=True, key_maps=maps), **RANKS
    ),
}
UNKNOWN = {"random": ("user_id", "segment"), "semantic ids": ("item_id",)}  # features that these batches lack


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_have_rows_instead_of_keys(small_dataset: Path, kind: str, mode: Mode) -> None:
    key_maps = {name: key_map for name, key_map in _maps(mode).items() if name not in UNKNOWN.get(kind, ())}
    num_batches = 0
    for batch, mapped in zip(*(KINDS[kind](small_dataset, maps) for maps in ({}, key_maps)), strict=True):
        num_batches += 1
        assert bits_of(mapped) == bits_of(batch.replace(features=map_features(batch.features, key_maps)))
    assert num_batches > 10


@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_states_say_how_keys_are_mapped(small_dataset: Path, kind: str) -> None:
    maps = _maps("roundrobin")
    loader = KINDS[kind](small_dataset, maps)
    next(iter(loader))
    state = loader.state_dict()
    maps.clear()
    assert loader.state_dict() == state  # the loader keeps the maps that it was given
    KINDS[kind](small_dataset, _maps("roundrobin")).load_state_dict(state)
    for other in (_maps("hash_roundrobin"), _maps("roundrobin", 4), {}):
        refusing = KINDS[kind](small_dataset, other)
        before = refusing.state_dict()
        message = r"state stores item_id with routing roundrobin \(.* but this job uses "
        with pytest.raises(StateError, match=message):
            refusing.load_state_dict(state)
        assert refusing.state_dict() == before


def test_ranks_must_map_keys_alike(small_dataset: Path) -> None:
    def of_ranks(build: Callable[..., Any], *maps: Maps) -> list[Any]:
        return [build(small_dataset, _config(each), rank=rank, world_size=2) for rank, each in enumerate(maps)]

    differing = [_maps(mode) for mode in MODES[1:]]
    for build in (build_loader, build_stream_loader):
        with pytest.raises(RankError, match="key_maps differs between ranks"):
            check_settings([loader.rank_invariants() for loader in of_ranks(build, *differing)])
    reordered = _maps("roundrobin"), dict(reversed(_maps("roundrobin").items()))
    check_settings([loader.rank_invariants() for loader in of_ranks(build_loader, *reordered)])
    assert hash(_config(reordered[0])) == hash(_config({}))


NINE_ROWS = KeyMap(num_embeddings=9, world_size=2, mode="roundrobin")


@pytest.mark.parametrize(
    ("key_maps", "message"),
    [
        (NINE_ROWS, "LoaderConfig: key_maps must be of type Mapping[str, KeyMap], got KeyMap("),
        *(
            ({name: NINE_ROWS}, f"key_maps cannot have '{name}': actions are labels too, and times are no keys")
            for name in ("action", "timestamp_ms")
        ),
        (
            {"item_id": "roundrobin"},
            "LoaderConfig: key_maps must be of type Mapping[str, KeyMap], got {'item_id': 'roundrobin'}",
        ),
        *(
            ({name: NINE_ROWS}, f"key_maps has '{name}', which is no feature of the batches; they have segment, item_")
            for name in ("video_id", "user_id")
        ),
        (
            {"item_id": NINE_ROWS},
            "item_id is up to 496 in the dataset, too large for a table of num_embeddings=9; pass",
        ),
    ],
)
def test_maps_that_do_not_fit_the_batches_are_refused(small_dataset: Path, key_maps: Any, message: str) -> None:
    for build in (build_loader, build_stream_loader):
        with pytest.raises(ConfigError) as raised:
            build(small_dataset, _config(key_maps, user_id=False, extra_events=("timestamp_ms",)), **RANKS)
        assert str(raised.value).startswith(message)
    with pytest.raises(ConfigError, match=r"^key_maps cannot have 'item_id' with codes, which batches have in"):
        LoaderConfig(batch_size=8, codes=CODES, key_maps=_maps("roundrobin"))
