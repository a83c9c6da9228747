"""Key maps of loaders, and what states say of them."""

import itertools
import json
import logging
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from evenrank.core.errors import RankError, StateError
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
from evenrank.dataloader.routing import MODES, KeyMap, Mode, check_dist_type, dist_type, map_features, read_dist_type
from evenrank.datasets.distributions import Uniform
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.balance.costs import COST

RANKS: dict[str, Any] = {"rank": 0, "world_size": 2}
Maps = Mapping[str, KeyMap]


def _maps(mode: Mode, world_size: int = 2) -> dict[str, KeyMap]:
    sizes = {"item_id": 503, "user_id": 301, "segment": 10}
    return {name: KeyMap(num_embeddings=size, world_size=world_size, mode=mode) for name, size in sizes.items()}


def _config(key_maps: Maps, **options: Any) -> LoaderConfig:
    settings: dict[str, Any] = {"batch_size": 8, "user_id": True, "max_num_candidates": 1, "key_maps": key_maps}
    return LoaderConfig(**settings | options)


WINDOWS = BalanceConfig(cost=COST, window=3)
STREAM = StreamConfig(lanes=4, window_rows=20)
DATA = RandomData(items=Uniform(high=502))
OF_CODES: Any = {"codes": random_codes(503, levels=2, codebook_size=8)}
KINDS: dict[str, Callable[[Path, Maps], Any]] = {
    "plain": lambda path, maps: build_loader(path, _config(maps), **RANKS),
    "workers": lambda path, maps: build_loader(path, _config(maps, num_workers=2, order="rows"), **RANKS),
    "pickled": lambda path, maps: pickle.loads(pickle.dumps(build_loader(path, _config(maps), **RANKS))),
    "balanced": lambda path, maps: build_loader(path, _config(maps), balance=WINDOWS, **RANKS),
    "mixture": lambda path, maps: build_loader(Mixture(weights={path: 2.0, str(path): 1.0}), _config(maps), **RANKS),
    "stream": lambda path, maps: build_stream_loader(path, _config(maps), STREAM, **RANKS),
    "random": lambda path, maps: RandomBatches(_config(maps, user_id=False), DATA, num_batches=12, **RANKS),
    "semantic ids": lambda path, maps: build_loader(path, _config(maps, **OF_CODES), **RANKS),
}
UNKNOWN = {"random": ("user_id", "segment"), "semantic ids": ("item_id",)}  # features that these batches lack


@pytest.mark.parametrize("kind", KINDS)
def test_batches_have_rows_instead_of_keys(small_dataset: Path, kind: str) -> None:
    plain = [*KINDS[kind](small_dataset, {})]
    assert len(plain) > 10
    for mode in MODES:
        key_maps = {name: key_map for name, key_map in _maps(mode).items() if name not in UNKNOWN.get(kind, ())}
        for batch, mapped in zip(plain, KINDS[kind](small_dataset, key_maps), strict=True):
            assert bits_of(mapped) == bits_of(batch.replace(features=map_features(batch.features, key_maps)))


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
        with pytest.raises(StateError, match=r"state stores item_id with routing roundrobin \(.* but this job uses "):
            refusing.load_state_dict(state)
        assert refusing.state_dict() == before


def test_ranks_must_map_keys_alike(small_dataset: Path) -> None:
    reordered = dict(reversed(_maps("roundrobin").items()))
    for build in (build_loader, build_stream_loader):
        first, same, other = (
            build(small_dataset, _config(maps), rank=rank, world_size=2).rank_invariants()
            for rank, maps in ((0, _maps("roundrobin")), (1, reordered), (1, _maps("hash_roundrobin")))
        )
        check_settings([first, same])
        with pytest.raises(RankError, match="key_maps differs between ranks"):
            check_settings([first, other])
    assert hash(_config(reordered)) == hash(_config({}))


MAPS = [KeyMap(num_embeddings=size, world_size=w, mode=mode) for mode in MODES for size in (9, 10) for w in (2, 4)]


def test_just_maps_to_the_same_rows_are_accepted() -> None:
    for before, now in itertools.product(MAPS, MAPS):
        saved = dist_type({"item_id": before})
        (found,) = read_dist_type(saved, source="it").values()
        assert found.describe() == before.describe()
        same_table = (before.mode, before.num_embeddings) == (now.mode, now.num_embeddings)
        if same_table and (before.mode != "roundrobin" or before.world_size == now.world_size):
            check_dist_type(saved, {"item_id": now}, source="it")
            continue
        with pytest.raises(
            StateError, match=rf"^it stores item_id with routing {before.mode} \(.*job uses {now.mode} \("
        ):
            check_dist_type(saved, {"item_id": now}, source="it")


def test_the_entry_has_the_mode_its_constants_and_the_size_of_each_table(caplog: pytest.LogCaptureFixture) -> None:
    hashed = KeyMap(num_embeddings=100, world_size=4, mode="hash_roundrobin")
    text = dist_type({"user_id": KeyMap(num_embeddings=7, world_size=2, mode="roundrobin"), "item_id": hashed})
    entry = json.loads(text)
    assert list(entry) == ["item_id", "user_id"]
    assert entry["user_id"] == {"mode": "roundrobin", "num_embeddings": 7, "world_size": 2}
    assert entry["item_id"].keys() == {"mode", "num_embeddings", "constants"}
    assert 0x243F6A8885A308D3 in entry["item_id"]["constants"]
    entry["item_id"]["constants"][0] += 1
    with pytest.raises(
        StateError, match=r"uses hash_roundrobin \(num_embeddings 100\) with other constants; use the same"
    ):
        check_dist_type(json.dumps({"item_id": entry["item_id"]}), {"item_id": hashed}, source="it")
    with pytest.raises(StateError, match=r"^it stores item_id with routing hash_roundrobin \(.*use the rel"):
        read_dist_type(json.dumps(entry), source="it")
    # Keys without a map are continuous.
    continuous = {"user_id": KeyMap(num_embeddings=7, world_size=2, mode="continuous")}
    assert dist_type({}) == "{}"
    check_dist_type("{}", continuous, source="it")
    check_dist_type(dist_type(continuous), {}, source="it")
    assert read_dist_type(None, source="it") == {}
    check_dist_type(None, {}, source="it", notify=False)
    assert not caplog.records
    with caplog.at_level(logging.WARNING, logger="evenrank"):
        check_dist_type(None, {}, source="the checkpoint")
    assert caplog.messages == [
        "the checkpoint has no dist_type, so its tables count as continuous: row k has key k, as in stock TorchRec"
    ]
