"""`VectorLookup` compared with the file, for batches of loaders with and without key maps, and as a part of a model."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenrank.core.errors import DataError, StateError
from evenrank.dataloader import LoaderConfig, VectorLookup, build_loader
from evenrank.dataloader import vectors as lookups
from evenrank.dataloader.routing import MODES, KeyMap
from evenrank.datasets import open_store, open_vectors
from tests.datasets.crafted import copy_dataset
from tests.datasets.test_vectors import add_vectors
from tests.pages import single_rank

WAYS: tuple[dict[str, Any], ...] = ({}, {"device": "cpu"}, {"on_host": True})


@pytest.fixture(scope="module")
def data(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_dataset(small_dataset, tmp_path_factory.mktemp("vectors") / "data")
    for of, dtype in {"item_id": "float16", "user_id": "float32"}.items():
        add_vectors(folder, of, dtype=dtype)
    return folder


@settings(max_examples=20)
@given(
    of=st.sampled_from(["item_id", "user_id"]),
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    way=st.sampled_from(WAYS),
    mode=st.sampled_from([None, *MODES]),
    more_rows=st.integers(0, 9),
    at_once=st.sampled_from([1, 1 << 26]),
)
def test_each_id_has_the_row_of_the_file(
    data: Path, of: str, shape: list[int], dtype: Any, way: Any, mode: Any, more_rows: int, at_once: int
) -> None:
    vectors = np.array(open_vectors(data, of))
    vectors = np.concatenate([vectors, np.zeros((more_rows, vectors.shape[1]), dtype=vectors.dtype)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookups, "_BYTES_AT_ONCE", at_once)
        key_map = None if mode is None else KeyMap(num_embeddings=len(vectors), world_size=3, mode=mode)
        lookup = VectorLookup(open_store(data), of, key_map=key_map, **way)
    size = len(vectors) - (more_rows if key_map is None else 0)
    ids = torch.from_numpy(np.random.default_rng(sum(shape)).integers(0, size, shape)).to(dtype)
    found = lookup(ids if key_map is None else key_map(ids))
    assert (lookup.num_ids, lookup.width) == (size, vectors.shape[1])
    assert found.shape == (*shape, vectors.shape[1])
    assert found.numpy().dtype == vectors.dtype
    assert found.tolist() == vectors[ids.numpy()].tolist()


@pytest.mark.parametrize("way", WAYS)
def test_batches_with_key_maps_have_the_vectors_of_batches_without(data: Path, way: dict[str, Any]) -> None:
    key_map = KeyMap(num_embeddings=600, world_size=2, mode="hash_roundrobin")
    configs = [LoaderConfig(batch_size=16, key_maps=maps) for maps in ({}, {"item_id": key_map})]
    loaders = [build_loader(data, config, rank=0, world_size=1) for config in configs]
    by_id, by_row = (VectorLookup(data, key_map=each, **way) for each in (None, key_map))
    for plain, mapped in zip(*loaders, strict=True):
        ids, rows = (batch.features["item_id"].values() for batch in (plain, mapped))
        assert not torch.equal(ids, rows)
        assert torch.equal(by_id(ids), by_row(rows))


@pytest.mark.parametrize("way", WAYS)
def test_a_model_saves_trains_and_broadcasts_no_vectors_and_copies_have_them(data: Path, way: dict[str, Any]) -> None:
    lookup = VectorLookup(data, **way)
    model = nn.Sequential(lookup, nn.Linear(5, 2, dtype=torch.float16))
    assert [*model.state_dict()] == ["1.weight", "1.bias"]
    ids, expected = torch.arange(9), np.array(open_vectors(data))[:9].tolist()
    copies = (
        copy.deepcopy(lookup),
        pickle.loads(pickle.dumps(lookup)),
        lookup.to("cpu"),
        lookup.to_empty(device="cpu"),
    )
    for each in copies:
        assert each(ids).tolist() == expected
    if "on_host" in way:
        assert len(pickle.dumps(lookup)) < 2000
    assert torch.compile(lookup, backend="eager", fullgraph="on_host" not in way)(ids).tolist() == expected
    with single_rank():
        parallel = DistributedDataParallel(model)
        assert not parallel.modules_buffers
        parallel(ids).sum().backward()
    assert model[1].weight.grad is not None
    doubled = lookup.to(torch.float32)(ids)
    assert doubled.dtype == (torch.float16 if "on_host" in way else torch.float32)
    assert doubled.tolist() == expected


def test_a_state_of_other_vectors_is_refused(data: Path, tmp_path: Path) -> None:
    changed = copy_dataset(data, tmp_path / "changed")
    add_vectors(changed, dtype="float32")
    config = LoaderConfig(batch_size=16)
    loaders = [build_loader(folder, config, rank=0, world_size=1) for folder in (data, data, changed)]
    next(iter(loaders[0]))
    state = loaders[0].state_dict()
    loaders[1].load_state_dict(state)
    with pytest.raises(StateError, match="the dataset"):
        loaders[2].load_state_dict(state)


@pytest.mark.parametrize("ids", [[-1], [0, 497]])
def test_an_id_that_is_none_is_an_error(data: Path, ids: list[int]) -> None:
    with pytest.raises(IndexError):
        VectorLookup(data)(torch.tensor(ids))
    with pytest.raises(DataError, match=rf"ids must be in 0..496, as in the dataset of the vectors, got {min(ids)} to"):
        VectorLookup(data, on_host=True)(torch.tensor(ids))


@pytest.mark.gpu
@pytest.mark.parametrize("way", [{"device": "cuda"}, {"on_host": True}])
def test_vectors_come_to_the_device_of_the_ids(data: Path, way: dict[str, Any]) -> None:
    lookup, vectors = VectorLookup(data, **way), torch.from_numpy(np.array(open_vectors(data)))
    for seed in range(20):  # while the copy before is perhaps in flight
        ids = torch.randint(len(vectors), (5000,), generator=torch.Generator().manual_seed(seed))
        found = lookup(ids.cuda())
        assert found.device.type == "cuda"
        assert torch.equal(found.cpu(), vectors[ids])
    assert torch.equal(VectorLookup(data).cuda()(ids.cuda()).cpu(), vectors[ids])
