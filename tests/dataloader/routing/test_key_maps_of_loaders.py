"""Loaders with `key_maps` yield the same batches with rows of tables instead of keys."""

import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from evenrank.core.errors import ConfigError, RankError, StateError
from evenrank.dataloader import (
    LoaderConfig,
    Mixture,
    RandomBatches,
    SemanticIdConfig,
    SequenceBatch,
    StreamConfig,
    build_loader,
    build_stream_loader,
    merge_stream_states,
    random_codes,
)
from evenrank.dataloader.balance import BalanceConfig, HSTUCost
from evenrank.dataloader.balance.ranks.consistency import check_settings
from evenrank.dataloader.routing import MODES, KeyMap, Mode
from tests.datasets.crafted import copy_dataset

COST = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)
RANKS: dict[str, Any] = {"rank": 0, "world_size": 2}


def _maps(mode: Mode, world_size: int = 2) -> dict[str, KeyMap]:
    sizes = {"item_id": 503, "user_id": 301, "segment": 10}
    return {name: KeyMap(num_embeddings=size, world_size=world_size, mode=mode) for name, size in sizes.items()}


def _config(key_maps: Mapping[str, KeyMap], **options: Any) -> LoaderConfig:
    settings: dict[str, Any] = {"batch_size": 8, "user_id": True, "max_num_candidates": 1, "key_maps": key_maps}
    return LoaderConfig(**settings | options)


def _plain(path: Path, key_maps: Mapping[str, KeyMap]) -> Iterable[SequenceBatch]:
    return build_loader(path, _config(key_maps), **RANKS)


def _with_workers(path: Path, key_maps: Mapping[str, KeyMap]) -> Iterable[SequenceBatch]:
    return build_loader(path, _config(key_maps, num_workers=2, order="time"), **RANKS)


def _pickled(path: Path, key_maps: Mapping[str, KeyMap]) -> Iterable[SequenceBatch]:
    return pickle.loads(pickle.dumps(build_loader(path, _config(key_maps), **RANKS)))  # type: ignore[no-any-return]


def _balanced(path: Path, key_maps: Mapping[str, KeyMap]) -> Iterable[SequenceBatch]:
    return build_loader(path, _config(key_maps), balance=BalanceConfig(cost=COST, window=3), **RANKS)


def _mixed(path: Path, key_maps: Mapping[str, KeyMap]) -> Iterable[SequenceBatch]:
    other = copy_dataset(path, path.with_name("other")) if not path.with_name("other").exists() else None
    return build_loader(Mixture(weights={path: 2.0, other or path.with_name("other"): 1.0}), _config(key_maps), **RANKS)


def _streamed(path: Path, key_maps: Mapping[str, KeyMap]) -> Iterable[SequenceBatch]:
    return build_stream_loader(path, _config(key_maps), StreamConfig(num_shards=4, buffer_rows=50), **RANKS)


KINDS = (_plain, _with_workers, _pickled, _balanced, _mixed, _streamed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", KINDS)
def test_batches_have_rows_instead_of_keys_and_are_the_same_otherwise(
    small_dataset: Path, make: Callable[..., Iterable[SequenceBatch]], mode: Mode
) -> None:
    key_maps = _maps(mode)
    num_batches = 0
    for batch, mapped in zip(make(small_dataset, {}), make(small_dataset, key_maps), strict=True):
        num_batches += 1
        others: dict[str, Any] = dict(mapped.tensors())
        for name, tensor in batch.tensors():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(tensor, others[name])
            elif tensor is not None and name != "features":
                assert torch.equal(tensor.values(), others[name].values())
        assert torch.equal(batch.features.lengths(), mapped.features.lengths())
        for name in batch.features.keys():  # noqa: SIM118
            keys, rows = batch.features[name].values(), mapped.features[name].values()
            assert torch.equal(rows, key_maps[name](keys) if name in key_maps else keys)
    assert num_batches > 10


def test_semantic_ids_have_rows_of_users_and_context(small_dataset: Path) -> None:
    maps = {name: key_map for name, key_map in _maps("hash_roundrobin").items() if name != "item_id"}
    codes = random_codes(503, levels=2, codebook_size=8)
    batches, mapped = (
        build_loader(small_dataset, SemanticIdConfig(batch_size=8, codes=codes, user_id=True, key_maps=used), **RANKS)
        for used in ({}, maps)
    )
    for batch, other in zip(batches, mapped, strict=True):
        for name in batch.features.keys():  # noqa: SIM118
            keys = batch.features[name].values()
            assert torch.equal(other.features[name].values(), maps[name](keys) if name in maps else keys)


def test_states_say_how_keys_are_mapped(small_dataset: Path) -> None:
    for make in (_plain, _streamed):
        loader: Any = make(small_dataset, _maps("roundrobin"))
        next(iter(loader))
        state = loader.state_dict()
        again: Any = make(small_dataset, _maps("roundrobin"))
        again.load_state_dict(state)
        for other in (_maps("hash_roundrobin"), _maps("roundrobin", 4), {}):
            refusing: Any = make(small_dataset, other)
            before = refusing.state_dict()
            with pytest.raises(
                StateError, match=r"state stores item_id with routing roundrobin \(.* but this job uses "
            ):
                refusing.load_state_dict(state)
            assert refusing.state_dict() == before


def _resumed(loader: Any, state: Mapping[str, Any]) -> Any:
    loader.load_state_dict(state)
    return loader


def test_a_loader_keeps_the_maps_that_it_was_given(small_dataset: Path) -> None:
    maps = _maps("roundrobin")
    loader = build_loader(small_dataset, _config(maps), **RANKS)
    before = loader.state_dict()
    maps.clear()
    assert loader.state_dict() == before
    assert hash(_config(_maps("roundrobin"))) == hash(_config({}))


def test_states_of_streams_with_other_maps_are_not_merged(small_dataset: Path) -> None:
    states = []
    for rank, mode in enumerate(MODES[1:]):
        config = _config(_maps(mode))
        loader = build_stream_loader(small_dataset, config, StreamConfig(num_shards=4), rank=rank, world_size=2)
        next(iter(loader))
        states.append(loader.state_dict())
    with pytest.raises(StateError, match=r"^states 0 and 1 cannot be merged: dist_type is "):
        merge_stream_states(states)


def test_ranks_must_map_keys_alike(small_dataset: Path) -> None:
    identities = [
        build_loader(small_dataset, _config(_maps(mode)), rank=rank, world_size=2).rank_invariants()
        for rank, mode in enumerate(MODES[1:])
    ]
    with pytest.raises(RankError, match=r"^key_maps differs between ranks: "):
        check_settings(identities)
    reordered = [_maps("roundrobin"), dict(reversed(_maps("roundrobin").items()))]
    check_settings(
        [
            build_loader(small_dataset, _config(maps), rank=rank, world_size=2).rank_invariants()
            for rank, maps in enumerate(reordered)
        ]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"key_maps": KeyMap(num_embeddings=9, world_size=2, mode="roundrobin")},
            "key_maps must be a dict of KeyMaps by feature, got a KeyMap",
        ),
        (
            {"key_maps": {"action": KeyMap(num_embeddings=9, world_size=2, mode="roundrobin")}},
            "key_maps cannot have 'action': actions are labels too, and times are no keys",
        ),
        (
            {
                "key_maps": {"timestamp_ms": KeyMap(num_embeddings=9, world_size=2, mode="roundrobin")},
                "extra_events": ("timestamp_ms",),
            },
            "key_maps cannot have 'timestamp_ms': actions are labels too, and times are no keys",
        ),
        ({"key_maps": {"item_id": "roundrobin"}}, "key_maps must have a KeyMap for 'item_id', got 'roundrobin'"),
        (
            {"key_maps": {"video_id": KeyMap(num_embeddings=9, world_size=2, mode="roundrobin")}},
            "key_maps has 'video_id', which is no feature of the batches; they have segment, item_id, action",
        ),
        (
            {"key_maps": {"user_id": KeyMap(num_embeddings=300, world_size=2, mode="roundrobin")}},
            "key_maps has 'user_id', which is no feature of the batches; they have segment, item_id, action",
        ),
        (
            {"key_maps": {"item_id": KeyMap(num_embeddings=9, world_size=2, mode="roundrobin")}},
            "item_id is up to 496 in the dataset, too large for a table of num_embeddings=9; pass "
            "manifest.vocabulary_sizes['item_id'] or more",
        ),
    ],
)
def test_maps_that_do_not_fit_the_batches_are_refused(
    small_dataset: Path, options: dict[str, Any], message: str
) -> None:
    for build in (build_loader, build_stream_loader):
        with pytest.raises(ConfigError) as raised:
            build(small_dataset, LoaderConfig(batch_size=8, **options), **RANKS)
        assert str(raised.value) == message


def test_items_with_codes_cannot_be_mapped() -> None:
    with pytest.raises(ConfigError, match=r"^key_maps cannot have 'item_id' here: batches have the codes of items; "):
        SemanticIdConfig(batch_size=8, codes=random_codes(503, levels=2, codebook_size=8), key_maps=_maps("roundrobin"))


def test_random_batches_are_mapped() -> None:
    plain, mapped = (
        RandomBatches(_config(maps, user_id=False), num_batches=2, **RANKS)
        for maps in ({}, {"item_id": KeyMap(num_embeddings=1 << 21, world_size=2, mode="hash_roundrobin")})
    )
    for batch, other in zip(plain, mapped, strict=True):
        keys = batch.features["item_id"].values()
        expected = KeyMap(num_embeddings=1 << 21, world_size=2, mode="hash_roundrobin")(keys)
        assert torch.equal(other.features["item_id"].values(), expected)
