"""Loaders whose ranks would not train the same samples in the same way are found, whatever setting differs."""

import dataclasses
import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchdata.nodes import Loader as NodeLoader
from torchdata.nodes import Mapper, Prefetcher

from evenrank.core.errors import RankError
from evenrank.dataloader import (
    LoaderConfig,
    RandomBatches,
    SemanticIdConfig,
    StreamConfig,
    build_loader,
    build_stream_loader,
    random_codes,
)
from evenrank.dataloader.balance import BalanceConfig, Balancer, HSTUCost
from evenrank.dataloader.balance.ranks.consistency import check_settings
from evenrank.dataloader.collate.semantic_ids import CodeTable
from evenrank.dataloader.rank_loader import PER_RANK
from evenrank.dataloader.routing import KeyMap
from evenrank.dataloader.state.resume_point import _FORMAT
from tests.dataloader.resuming import with_changes
from tests.ranks import RankFailure, RankPool

COST = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1, interleave_actions=False)
CODES = random_codes(501, levels=2, codebook_size=8)
OTHER_CODES = CodeTable(codes=CODES.codes[::-1].copy(), codebook_sizes=CODES.codebook_sizes)
# Another valid value of each setting.
CHANGES: dict[type, dict[str, Any]] = {
    LoaderConfig: {
        "batch_size": 9,
        "split": "eval",
        "max_history_length": 7,
        "user_id": True,
        "order": "rows",
        "seed": 1,
        "drop_last": True,
        "num_workers": 1,
        "prefetch": 3,
        "persistent_workers": True,
        "pin_memory": True,
        "max_num_candidates": 1,
        "num_tasks": 3,
        "candidate_actions": True,
        "extra_events": ("timestamp_ms",),
        "key_maps": {"item_id": KeyMap(num_embeddings=501, world_size=2, mode="roundrobin")},
    },
    SemanticIdConfig: {
        "key_maps": {"segment": KeyMap(num_embeddings=501, world_size=2, mode="roundrobin")},
        "codes": OTHER_CODES,
        "label_offsets": True,
        "history_labels": True,
        "candidate_feature": True,
    },
    StreamConfig: {"num_shards": 9, "buffer_rows": 9, "open_shards": 9},
}


def _transform(batch: Any, rng: np.random.Generator) -> Any:
    return batch


def _other_transform(batch: Any, rng: np.random.Generator, scale: int = 1) -> Any:
    return batch


def _identity(path: Path, record: type, change: Mapping[str, Any]) -> Mapping[str, Any]:
    ranks: dict[str, Any] = {"rank": 0, "world_size": 2}
    if record is StreamConfig:
        return build_stream_loader(path, LoaderConfig(batch_size=8), StreamConfig(**change), **ranks).rank_invariants()
    options = {"batch_size": 8, **({"codes": CODES} if record is SemanticIdConfig else {}), **change}
    return build_loader(path, record(**options), **ranks).rank_invariants()


def _compare(*identities: Mapping[str, Any]) -> None:
    """Compare identities as if they were those of ranks 0, 1, ..."""
    check_settings([{**identity, "rank": rank} for rank, identity in enumerate(identities)])


def test_every_setting_is_known_to_the_tests_below() -> None:
    """A new setting is compared unless it is listed as one that may differ; add another value of it above."""
    for record, changes in CHANGES.items():
        own = {field.name for field in dataclasses.fields(record)}
        common = {field.name for field in dataclasses.fields(LoaderConfig)} if record is SemanticIdConfig else set()
        assert own - common - set(changes) <= {"codebook_sizes"}  # compared with the codes


@pytest.mark.parametrize(
    ("record", "name"), [(record, name) for record, changes in CHANGES.items() for name in changes]
)
def test_ranks_may_differ_in_no_setting_that_decides_on_what_is_trained(
    small_dataset: Path, record: type, name: str
) -> None:
    first = _identity(small_dataset, record, {})
    other = _identity(small_dataset, record, {name: CHANGES[record][name]})
    pickle.loads(pickle.dumps(other))
    if name in PER_RANK:
        _compare(first, other)
    else:
        with pytest.raises(RankError, match=f"^{name} differs between ranks: ") as raised:
            _compare(first, other)
        assert "\n" not in str(raised.value)


def test_codes_are_compared_by_their_contents(small_dataset: Path, tmp_path: Path) -> None:
    for name in ("here.npy", "there.npy"):
        np.save(tmp_path / name, CODES.codes.T)
    tables = [CODES, dataclasses.replace(CODES, codebook_sizes=(9, 8)), tmp_path / "here.npy", tmp_path / "there.npy"]
    same, sizes, here, there = (_identity(small_dataset, SemanticIdConfig, {"codes": table}) for table in tables)
    _compare(same, here, there)
    with pytest.raises(
        RankError, match=r"^codes differs between ranks: 2 levels of 501 items, codebook_sizes \[8, 8\]"
    ):
        _compare(same, sizes)


def test_transforms_are_compared_by_name(small_dataset: Path) -> None:
    transforms: list[Any] = [_transform, partial(_other_transform, scale=1), partial(_other_transform, scale=2), None]
    identities = [
        build_loader(
            small_dataset, LoaderConfig(batch_size=8), rank=0, world_size=1, transform=transform
        ).rank_invariants()
        for transform in transforms
    ]
    _compare(*identities[1:3])
    with pytest.raises(
        RankError, match="transform differs between ranks: _transform on rank 0, _other_transform on rank 1"
    ):
        _compare(*identities[:2])
    with pytest.raises(RankError, match="transform differs between ranks: _transform on rank 0, None on rank 1"):
        _compare(identities[0], identities[3])


def test_random_batches_are_compared_by_their_settings_and_may_draw_differently() -> None:
    def invariants(rank: int, **options: Any) -> Mapping[str, Any]:
        return RandomBatches(
            LoaderConfig(batch_size=4, **options), num_batches=3, rank=rank, world_size=2
        ).rank_invariants()

    _compare(invariants(0), invariants(1, num_workers=2))
    with pytest.raises(RankError, match="num_tasks differs between ranks: 0 on rank 0, 2 on rank 1"):
        _compare(invariants(0), invariants(1, num_tasks=2))


def test_identity_is_computed_once_and_follows_the_seed_of_a_state(
    small_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = build_loader(small_dataset, LoaderConfig(batch_size=8), rank=0, world_size=1)
    identity = loader.rank_invariants()
    with monkeypatch.context() as patched:
        patched.setattr("evenrank.dataloader.loader.hashlib.sha256", None)
        assert loader.rank_invariants() == identity
        loader.load_state_dict(with_changes(_FORMAT, loader.state_dict(), seed=5))
        assert loader.rank_invariants() == {**identity, "seed": 5}
    assert pickle.loads(pickle.dumps(loader)).rank_invariants() == loader.rank_invariants()


def _of_other_world_size(rank: int, world_size: int, path: Path, kind: str) -> None:
    ranks: dict[str, Any] = {"rank": rank, "world_size": world_size + 1}
    config = LoaderConfig(batch_size=4)
    loader: Any = (
        build_stream_loader(path, config, **ranks) if kind == "stream" else build_loader(path, config, **ranks)
    )
    if kind == "nodes":
        loader = Prefetcher(Mapper(loader, _same), 2)
    if kind == "torchdata's Loader":
        loader = NodeLoader(Mapper(loader, _same))
    with Balancer(loader, BalanceConfig(cost=COST)) as balancer:
        list(balancer)


def _same(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("kind", ["stream", "nodes", "torchdata's Loader"])
def test_loader_of_another_world_size_is_refused_on_every_rank(ranks: RankPool, small_dataset: Path, kind: str) -> None:
    for failure in ranks.try_run(2, _of_other_world_size, small_dataset, kind):
        assert isinstance(failure, RankFailure)
        assert failure.message == (
            "ranks 0 to 1 failed: the loader was created for world_size 3, but 2 ranks balance together; create it "
            "with world_size=2, the number of ranks of the Balancer's group"
        )
