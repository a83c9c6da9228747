import dataclasses
import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import Loader as NodeLoader
from torchdata.nodes import Mapper, Prefetcher

from evenrank.core.errors import ConfigError, RankError
from evenrank.dataloader import (
    LoaderConfig,
    Negatives,
    RandomBatches,
    SequenceBatch,
    StreamConfig,
    build_loader,
    build_stream_loader,
    random_codes,
)
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.balance.ranks.agree import check_settings
from evenrank.dataloader.codes import CodeTable
from evenrank.dataloader.routing import KeyMap
from evenrank.dataloader.sampling.epoch_positions import _FORMAT
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import ids_of
from tests.dataloader.resuming import with_changes
from tests.ranks import RankPool

CODES = random_codes(501, levels=2, codebook_size=8)
OTHER_CODES = CodeTable(codes=CODES.codes[::-1].copy(), codebook_sizes=CODES.codebook_sizes)
CODED = partial(LoaderConfig, codes=CODES)
# Another valid value of each setting.
CHANGES: dict[Any, dict[str, Any]] = {
    LoaderConfig: {
        **dict.fromkeys(("batch_size", "max_history_length", "seed", "num_workers", "prefetch", "num_tasks"), 9),
        **dict.fromkeys(("user_id", "drop_last", "persistent_workers", "pin_memory", "candidate_actions"), True),
        "split": "eval",
        "device": "cpu",
        "order": "rows",
        "max_num_candidates": 1,
        "extra_events": ("timestamp_ms",),
        **dict.fromkeys(("label", "weight"), "timestamp_ms"),
        "context": (),
        "negatives": Negatives(count=1),
        "key_maps": {"item_id": KeyMap(num_embeddings=501, world_size=2, mode="roundrobin")},
    },
    CODED: {
        "key_maps": {"segment": KeyMap(num_embeddings=501, world_size=2, mode="roundrobin")},
        "codes": OTHER_CODES,
        **dict.fromkeys(("label_offsets", "history_labels", "candidate_feature", "draw_alternatives"), True),
    },
    StreamConfig: {"lanes": 9, "window_rows": 9, "poll_seconds": 9},
    RandomBatches: {"num_workers": 2, "num_tasks": 2},
}

# Settings that affect speed, not the contents of batches.
MAY_DIFFER = {"num_workers", "prefetch", "persistent_workers", "pin_memory", "device", "poll_seconds"}


def _transform(batch: Any, rng: np.random.Generator) -> Any:
    return batch


def _other_transform(batch: Any, rng: np.random.Generator, scale: int = 1) -> Any:
    return batch


def _identity(path: Path, record: Any, change: Mapping[str, Any], transform: Any = None) -> Mapping[str, Any]:
    ranks: dict[str, Any] = {"rank": 0, "world_size": 2}
    if record is StreamConfig:
        loader = build_stream_loader(path, LoaderConfig(batch_size=8), StreamConfig(**change), rank=0, world_size=2)
        return loader.rank_invariants()
    if record is RandomBatches:
        return RandomBatches(LoaderConfig(batch_size=8, **change), num_batches=3, **ranks).rank_invariants()
    return build_loader(path, record(**{"batch_size": 8, **change}), **ranks, transform=transform).rank_invariants()


def _compare(*identities: Mapping[str, Any]) -> None:
    """Compare identities as if they were those of ranks 0, 1, ..."""
    check_settings([{**identity, "rank": rank} for rank, identity in enumerate(identities)])


def test_every_setting_is_known_to_the_tests_below() -> None:
    """A new setting is compared unless it is listed as one that may differ; add another value of it above."""
    known = {name for changes in CHANGES.values() for name in changes}
    for record in (LoaderConfig, StreamConfig):
        names = {field.name for field in dataclasses.fields(record)}
        assert names - known <= {"codebook_sizes"}  # compared with the codes


@pytest.mark.parametrize(
    ("record", "name"), [(record, name) for record, changes in CHANGES.items() for name in changes]
)
def test_ranks_may_differ_in_no_setting_of_training(
    small_dataset: Path, record: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)  # for pin_memory
    first, other = (_identity(small_dataset, record, change) for change in ({}, {name: CHANGES[record][name]}))
    pickle.loads(pickle.dumps(other))
    if name in MAY_DIFFER:
        _compare(first, other)
    else:
        with pytest.raises(RankError, match=f"^{name} differs between ranks: ") as raised:
            _compare(first, other)
        assert "\n" not in str(raised.value)


def test_codes_are_compared_by_their_contents_and_transforms_by_name(small_dataset: Path, tmp_path: Path) -> None:
    for name in ("here.npy", "there.npy"):
        np.save(tmp_path / name, CODES.codes.T)
    tables = [CODES, tmp_path / "here.npy", tmp_path / "there.npy", dataclasses.replace(CODES, codebook_sizes=(9, 8))]
    *same, sizes = (_identity(small_dataset, LoaderConfig, {"codes": table}) for table in tables)
    _compare(*same)
    with pytest.raises(RankError, match=r"^codes differs between ranks: 2 levels of 501 items, codebook_sizes \[8, 8"):
        _compare(same[0], sizes)
    transforms = [_transform, partial(_other_transform, scale=1), partial(_other_transform, scale=2), None]
    plain, *scaled, without = (_identity(small_dataset, LoaderConfig, {}, transform) for transform in transforms)
    _compare(*scaled)
    for other, name in ((scaled[0], "_other_transform"), (without, "None")):
        message = f"transform differs between ranks: _transform on rank 0, {name} on rank 1"
        with pytest.raises(RankError, match=message):
            _compare(plain, other)


def test_identity_is_computed_once_but_for_the_seed(small_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    build: Any = build_stream_loader if kind == "stream" else build_loader
    loader = build(path, LoaderConfig(batch_size=4), **ranks)
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
        message = (
            "ranks 0 to 1 failed: the loader was created for world_size 3, but 2 ranks balance together; create it"
        )
        assert failure.message.startswith(f"{message} with world_size=2")


def _anew(batch: SequenceBatch, rng: np.random.Generator) -> SequenceBatch:
    """Return the same samples as a batch that knows nothing of its position."""
    names = ("batch_size", "num_real", "features", "labels", "num_candidates", "sample_ids")
    return SequenceBatch(**{name: getattr(batch, name) for name in names})


@pytest.mark.parametrize("is_balanced", [False, True])
@pytest.mark.parametrize("build", [build_loader, build_stream_loader])
def test_a_batch_made_anew_keeps_its_position(small_dataset: Path, build: Any, is_balanced: bool) -> None:
    def make(transform: Any) -> Any:
        loader = build(small_dataset, LoaderConfig(batch_size=8), rank=0, world_size=1, transform=transform)
        return Balancer(loader, BalanceConfig(cost=COST)) if is_balanced else loader

    expected = [(batch.epoch, batch.step, batch.position, ids_of(batch)) for batch in make(None)]
    loader = make(_anew)
    assert [(batch.epoch, batch.step, batch.position, ids_of(batch)) for batch in loader] == expected
    iterator = iter(loader)
    state = loader.state_dict(after=[next(iterator), next(iterator)][1])
    resumed = make(_anew)
    resumed.load_state_dict(state)
    assert [ids_of(batch) for batch in resumed] == [ids_of(batch) for batch in iterator]
    if not is_balanced:
        with pytest.raises(ConfigError, match="the transform returned a NoneType; return the batch to yield"):
            next(iter(make(lambda batch, rng: None)))
