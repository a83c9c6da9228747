"""What laws do not see of loaders: settings that ranks must share, what is left out, transforms."""

import dataclasses
import itertools
import logging
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchdata.nodes import Loader as NodeLoader
from torchdata.nodes import Mapper, Prefetcher

from evenrank.core.errors import DataError, RankError, StateError
from evenrank.dataloader import (
    CodeTable,
    Cross,
    LoaderConfig,
    Negatives,
    Pools,
    RandomBatches,
    SequenceBatch,
    StochasticLength,
    StreamConfig,
    build_loader,
    build_stream_loader,
    random_codes,
)
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.balance.ranks.agree import check_settings
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets import open_store
from evenrank.datasets.schema import DataFile, read_manifest, sha256_of
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import all_ids, ids_of
from tests.datasets.crafted import add_targets, change_table, copy_dataset, set_columns, write_manifest
from tests.ranks import RankPool

CODES = random_codes(501, levels=2, codebook_size=8)
CODED, ONE_TARGET = partial(LoaderConfig, codes=CODES), partial(LoaderConfig, max_num_candidates=1)
KEY_MAP = KeyMap(num_embeddings=501, world_size=2, mode="roundrobin")
ONE: dict[str, Any] = {"rank": 0, "world_size": 1}
# Another valid value of each setting.
CHANGES: dict[Any, dict[str, Any]] = {
    LoaderConfig: {
        **dict.fromkeys(("batch_size", "max_history_length", "seed", "num_workers", "prefetch", "num_tasks"), 9),
        **dict.fromkeys(("user_id", "drop_last", "persistent_workers", "pin_memory", "candidate_actions"), True),
        "split": "eval",
        "device": "cpu",
        "order": "rows",
        "max_num_candidates": 1,
        "pad_tokens_to": (64, 128),
        "extra_events": ("timestamp_ms",),
        **dict.fromkeys(("label", "weight"), "timestamp_ms"),
        "context": (),
        "negatives": Negatives(count=1),
        "stochastic_length": StochasticLength(alpha=1.5),
        "candidate_sets": "sets.parquet",
        "key_maps": {"item_id": KEY_MAP},
    },
    CODED: {
        "key_maps": {"segment": KEY_MAP},
        "codes": dataclasses.replace(CODES, codes=CODES.codes[::-1].copy()),
        **dict.fromkeys(("label_offsets", "history_labels", "candidate_feature", "draw_alternatives"), True),
    },
    ONE_TARGET: {
        "pools": Pools(values=(1,)),
        "item_features": ("genre",),
        "target_features": {"hour": "timestamp_ms // 3600000 % 24"},
        "crosses": {"pair": Cross(of=("user_id", "item_id"), size=9)},
    },
    StreamConfig: {"lanes": 9, "window_rows": 9, "poll_seconds": 9},
    RandomBatches: {"num_workers": 2, "num_tasks": 2},
}
# Settings that affect speed, not the contents of batches.
MAY_DIFFER = {"num_workers", "prefetch", "persistent_workers", "pin_memory", "device", "poll_seconds"}


def _invariants(path: Path, record: Any, change: Mapping[str, Any], transform: Any = None) -> Mapping[str, Any]:
    ranks: dict[str, Any] = {"rank": 0, "world_size": 2}
    if record is StreamConfig:
        loader = build_stream_loader(path, LoaderConfig(batch_size=8), StreamConfig(**change), rank=0, world_size=2)
        return loader.rank_invariants()
    if record is RandomBatches:
        return RandomBatches(LoaderConfig(batch_size=8, **change), num_batches=3, **ranks).rank_invariants()
    return build_loader(path, record(**{"batch_size": 8, **change}), **ranks, transform=transform).rank_invariants()


def _compare(*invariants: Mapping[str, Any]) -> None:
    """Compare invariants as if they were those of ranks 0, 1, ..."""
    check_settings([{**of_rank, "rank": rank} for rank, of_rank in enumerate(invariants)])


def test_ranks_may_differ_in_no_setting_of_training(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new setting is compared unless it is listed as one that may differ; add another value of it above."""
    folder, file = copy_dataset(small_dataset, tmp_path / "data"), tmp_path / "data" / "items.parquet"
    pq.write_table(pa.table({"item_id": [1, 2], "genre": [3, 4]}), file)
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"user_id": [*range(300)], "candidates": [[1]] * 300}), "sets.parquet")
    table = DataFile(path=file.name, rows=2, sha256=sha256_of(file))
    write_manifest(dataclasses.replace(read_manifest(folder), item_features=table), folder)
    known = {name for changes in CHANGES.values() for name in changes}
    for settings in (LoaderConfig, StreamConfig):
        # The sizes of codebooks are compared with the codes.
        assert {field.name for field in dataclasses.fields(settings)} - known <= {"codebook_sizes"}
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)  # for pin_memory
    for record, changes in CHANGES.items():
        first = _invariants(folder, record, {})
        for name, value in changes.items():
            other = pickle.loads(pickle.dumps(_invariants(folder, record, {name: value})))
            if name in MAY_DIFFER:
                _compare(first, other)
            else:
                with pytest.raises(RankError, match=f"^{name} differs between ranks: .*$"):
                    _compare(first, other)


def _keep(batch: Any, rng: np.random.Generator) -> Any:
    return batch


def _keep_too(batch: Any, rng: np.random.Generator, scale: int = 1) -> Any:
    return batch


def test_codes_are_compared_by_their_contents_and_transforms_by_name(small_dataset: Path, tmp_path: Path) -> None:
    for name in ("here.npy", "there.npy"):
        np.save(tmp_path / name, CODES.codes.T)
    tables = [CODES, tmp_path / "here.npy", tmp_path / "there.npy", dataclasses.replace(CODES, codebook_sizes=(9, 8))]
    *same, sizes = (_invariants(small_dataset, LoaderConfig, {"codes": table}) for table in tables)
    _compare(*same)
    with pytest.raises(RankError, match=r"^codes differs between ranks: 2 levels of 501 items, codebook_sizes \[8, 8"):
        _compare(same[0], sizes)
    transforms = [_keep, partial(_keep_too, scale=1), partial(_keep_too, scale=2), None]
    plain, *scaled, without = (_invariants(small_dataset, LoaderConfig, {}, transform) for transform in transforms)
    _compare(*scaled)
    for other, name in ((scaled[0], "_keep_too"), (without, "None")):
        with pytest.raises(RankError, match=f"transform differs between ranks: _keep on rank 0, {name} on rank 1"):
            _compare(plain, other)


def _same(batch: Any) -> Any:
    return batch


WRAPS: list[Callable[[Any], Any]] = [
    _same,
    lambda loader: Prefetcher(Mapper(loader, _same), 2),
    lambda loader: NodeLoader(Mapper(loader, _same)),
]


def _of_other_world_size(rank: int, world_size: int, path: Path) -> None:
    message = "the loader was created for world_size 3, but 2 ranks balance together; create it with world_size=2"
    builds: list[Any] = [build_loader, build_stream_loader]
    for build, wrap in itertools.product(builds, WRAPS):
        loader = wrap(build(path, LoaderConfig(batch_size=4), rank=rank, world_size=world_size + 1))
        with pytest.raises(RankError, match=message), Balancer(loader, BalanceConfig(cost=COST)) as balancer:
            list(balancer)


def test_loader_of_another_world_size_is_refused_on_every_rank(ranks: RankPool, small_dataset: Path) -> None:
    ranks.run(2, _of_other_world_size, small_dataset)


def _anew(batch: SequenceBatch, rng: np.random.Generator) -> SequenceBatch:
    """Return the same samples as a batch that knows nothing of its position."""
    names = ("batch_size", "num_real", "features", "labels", "num_candidates", "sample_ids")
    return SequenceBatch(**{name: getattr(batch, name) for name in names})


@pytest.mark.parametrize("is_balanced", [False, True])
@pytest.mark.parametrize("build", [build_loader, build_stream_loader])
def test_a_batch_made_anew_keeps_its_position(small_dataset: Path, build: Any, is_balanced: bool) -> None:
    def make(transform: Any) -> Any:
        loader = build(small_dataset, LoaderConfig(batch_size=8), **ONE, transform=transform)
        return Balancer(loader, BalanceConfig(cost=COST)) if is_balanced else loader

    loader, resumed = make(_anew), make(_anew)
    batches = list(loader)
    plain, made = ([(b.epoch, b.step, b.position, ids_of(b)) for b in of] for of in (make(None), batches))
    assert plain == made
    resumed.load_state_dict(loader.state_dict(after=batches[1]))
    assert all_ids(resumed) == all_ids(batches[2:])


def test_rows_that_are_no_samples_are_counted_by_reason(
    small_dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, codes = open_store(small_dataset), CODES.codes.copy()
    codes[3] = codes[400:] = -1
    config = LoaderConfig(batch_size=4, codes=CodeTable(codes=codes, codebook_sizes=(8, 8)), max_history_length=4)
    with caplog.at_level(logging.WARNING, logger="evenrank"):
        loader = build_loader(small_dataset, config, **ONE)
    shown = [store.columns["item_id"][a:b][-5:] for a, b in itertools.pairwise(store.offsets)]
    uncoded = [row for row, items in enumerate(shown) if ((items == 3) | (items >= 400)).any()]
    empty = [row for row, items in enumerate(shown) if not len(items)]
    left_out = {reason: rows.tolist() for reason, rows in loader.left_out_rows.items()}
    assert left_out == {"no event to predict": empty, "an item without a code": uncoded}
    assert loader.num_dropped == len(uncoded) + len(empty) == len(store) - loader.num_samples
    assert f"{len(uncoded)} of {len(store)} rows are left out: an item without a code" in caplog.text
    # A row has no more candidates than targets; without their numbers, users with fewer events are left out.
    data = copy_dataset(small_dataset, tmp_path / "data")
    change_table(data, lambda table: add_targets(table, np.minimum(table["length"].to_numpy(), 2)))
    config = LoaderConfig(batch_size=4, max_num_candidates=5, order="rows")
    of_targets: Any = build_loader(data, config, **ONE)
    counts = [count for batch in of_targets for count in batch.num_candidates[: batch.num_real].tolist()]
    assert counts == [min(2, length) for length in store.lengths.tolist() if length]
    few = {"fewer events than 5 candidates": sum(store.lengths < 5)}
    assert build_loader(small_dataset, config, **ONE).left_out == few


def test_an_open_loader_keeps_its_data_when_the_folder_is_replaced(small_dataset: Path, tmp_path: Path) -> None:
    out, config = copy_dataset(small_dataset, tmp_path / "data"), LoaderConfig(batch_size=8, order="rows")
    loader = build_loader(out, config, **ONE)
    before, pickled = [bits_of(batch.replace(epoch=0)) for batch in loader], pickle.dumps(loader)
    out.rename(tmp_path / "old")
    ones = pa.array([1] * len(open_store(small_dataset)))
    change_table(copy_dataset(small_dataset, out), set_columns({"segment": ones}))
    assert [bits_of(batch.replace(epoch=0)) for batch in loader] == before
    with pytest.raises(DataError, match=r"data was replaced by other data after it was opened; open it again"):
        pickle.loads(pickled)
    with pytest.raises(StateError, match="is of other data"):
        build_loader(out, config, **ONE).load_state_dict(loader.state_dict())
