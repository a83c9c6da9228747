"""Key maps, and the batches of loaders that have them."""

import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

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
from evenrank.dataloader.routing import MODES, KeyMap, Mode, map_features
from evenrank.dataloader.routing.key_map import rows_per_rank
from evenrank.datasets.distributions import Uniform
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.balance.costs import COST
from tests.pages import ROOT, blocks

SIZES = st.integers(1, 3000) | st.integers(1, 1 << 62)


def _reference(key: int, num_rows: int) -> int:
    """Return the row of a key, in Python's own integers."""
    mask64 = (1 << 64) - 1

    def mix(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & mask64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & mask64
        return word ^ (word >> 31)

    keys = 0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89
    bits = max(2, (num_rows - 1).bit_length()) // 2
    size = -(-num_rows // (1 << bits))
    while True:
        j, r = divmod(key, 1 << bits)
        for number in (0, 2):
            r = (r + (mix(j ^ keys[number]) >> (64 - bits))) % (1 << bits)
            j = (j + ((mix(r ^ keys[number + 1]) >> 32) * size >> 32)) % size
        key = r * size + j
        if key < num_rows:
            return key


@given(size=SIZES, world_size=st.integers(1, 70), mode=st.sampled_from(MODES), data=st.data())
@example(size=1 << 62, world_size=64, mode="hash_roundrobin", data=None)
@example(size=1, world_size=1, mode="hash_roundrobin", data=None)
@example(size=5, world_size=4, mode="roundrobin", data=None)  # the last rank has no row
@example(size=3, world_size=8, mode="roundrobin", data=None)
def test_each_key_has_a_row_of_its_own_and_the_inverse_finds_it(
    size: int, world_size: int, mode: Mode, data: Any
) -> None:
    key_map = KeyMap(num_embeddings=size, world_size=world_size, mode=mode)
    drawn = [] if data is None else data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    keys = np.arange(size) if size <= 3000 else np.unique([0, size - 1, size // 2, *drawn])
    rows = key_map(keys)
    assert key_map.inverse(rows).tolist() == keys.tolist()
    assert 0 <= rows.min() <= rows.max() < size
    assert len(np.unique(rows)) == len(keys)
    if mode == "continuous":
        assert rows.tolist() == keys.tolist()
    elif mode == "hash_roundrobin":  # which checkpoints depend on
        assert rows[-20:].tolist() == [_reference(key, size) for key in keys[-20:].tolist()]
    elif size % world_size == 0:  # TorchRec's ranges then assign the rows like modulo the keys
        assert np.array_equal(rows // rows_per_rank(size, world_size), keys % world_size)


def test_keys_are_spread_over_ranks() -> None:
    key_map = KeyMap(num_embeddings=10, world_size=4, mode="roundrobin")
    assert key_map.inverse(np.arange(10)).tolist() == [0, 4, 7, 1, 5, 8, 2, 6, 9, 3]
    assert (key_map(np.arange(10)) // rows_per_rank(10, 4)).tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2]
    for keys in (np.arange(0, 200_000, 4), np.arange(50_000) * 1_000_003):  # which the other modes put on one rank
        size = int(keys.max()) + 1
        rows = KeyMap(num_embeddings=size, world_size=4, mode="hash_roundrobin")(keys)
        assert np.bincount(rows // rows_per_rank(size, 4), minlength=4).max() < 1.03 * len(keys) / 4


@pytest.mark.parametrize("mode", MODES)
def test_results_have_the_shape_and_the_dtype_of_the_keys(mode: Mode) -> None:
    key_map = KeyMap(num_embeddings=12, world_size=4, mode=mode)
    rows = key_map(np.arange(12)).reshape(3, 4)
    for dtype in (np.int32, np.int64, np.uint64, np.int8):
        keys = np.arange(12, dtype=dtype).reshape(3, 4)[:, ::2]  # not contiguous
        mapped = key_map(keys)
        assert (mapped.dtype, mapped.tolist()) == (np.dtype(dtype), rows[:, ::2].tolist())
        assert keys.tolist() == np.arange(12).reshape(3, 4)[:, ::2].tolist()  # not changed
    for kind in (torch.int32, torch.int64):
        tensor = key_map(torch.arange(12, dtype=kind).reshape(3, 4).T)
        assert (tensor.dtype, tensor.tolist()) == (kind, rows.T.tolist())
    assert key_map(np.empty((0, 3), dtype=np.int64)).shape == (0, 3)
    assert key_map(torch.empty(0, dtype=torch.int64)).tolist() == []
    assert key_map(torch.tensor(3)).tolist() == key_map(np.array(3)).tolist() == rows[0, 3]
    assert key_map.inverse(key_map(torch.tensor(3))).item() == 3


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 10, 131_263, (1 << 40) + 7])
def test_tensors_on_a_gpu_are_mapped_as_on_the_cpu(mode: Mode, size: int) -> None:
    key_map = KeyMap(num_embeddings=size, world_size=4, mode=mode)
    keys = torch.randint(size, (1000,), generator=torch.Generator().manual_seed(0))
    rows = key_map(keys.cuda())
    assert rows.device.type == "cuda"
    assert rows.tolist() == key_map(keys).tolist()
    assert key_map.inverse(rows).tolist() == keys.tolist()


def test_arrays_are_mapped_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import numpy as np\n"
        "from evenrank.dataloader.routing import KeyMap\n"
        "assert KeyMap(num_embeddings=9, world_size=3, mode='hash_roundrobin')(np.arange(9)).sum() == 36"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_only_the_keys_of_the_mapped_feature_change() -> None:
    items = KeyMap(num_embeddings=100, world_size=4, mode="hash_roundrobin")
    for dtype in (torch.int32, torch.int64):
        values, weights = torch.tensor([1, 2, 90, 7, 5, 6, 7], dtype=dtype), torch.rand(7)
        lengths, keys = torch.tensor([2, 0, 1, 1, 3, 0]), ["user_id", "item_id", "action"]
        mapped = map_features(KeyedJaggedTensor(keys, values, weights, lengths), {"item_id": items})
        assert (mapped.keys(), mapped.values().dtype, mapped.stride()) == (keys, dtype, 2)
        assert mapped.values().tolist() == [1, 2, *items(values[2:4]).tolist(), 5, 6, 7] != values.tolist()
        assert (mapped.lengths().tolist(), mapped.weights().tolist()) == (lengths.tolist(), weights.tolist())
        assert values.tolist() == [1, 2, 90, 7, 5, 6, 7]
    empty = KeyedJaggedTensor(["item_id"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(3, dtype=torch.int64))
    assert map_features(empty, {"item_id": items}).lengths().tolist() == [0, 0, 0]
    uneven = KeyedJaggedTensor(
        keys=["item", "user"],
        values=torch.tensor([3, 4, 5, 6]),
        lengths=torch.tensor([1, 2, 1]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["item", "user"], torch.tensor([[0, 1], [0, 0]])),
    )
    mapped = map_features(uneven, {"item": items})
    assert mapped.values().tolist() == [*items(torch.tensor([3, 4, 5])).tolist(), 6]
    assert (mapped.stride_per_key(), mapped.inverse_indices()[1].tolist()) == ([2, 1], [[0, 1], [0, 0]])


RANKS: dict[str, Any] = {"rank": 0, "world_size": 2}
Maps = Mapping[str, KeyMap]


def _maps(mode: Mode, world_size: int = 2) -> dict[str, KeyMap]:
    sizes = {"item_id": 503, "user_id": 301, "segment": 10}
    return {name: KeyMap(num_embeddings=size, world_size=world_size, mode=mode) for name, size in sizes.items()}


def _config(key_maps: Maps, **options: Any) -> LoaderConfig:
    settings: dict[str, Any] = {"batch_size": 8, "user_id": True, "max_num_candidates": 1, "key_maps": key_maps}
    return LoaderConfig(**settings | options)


WINDOWS, STREAM = BalanceConfig(cost=COST, window=3), StreamConfig(lanes=4, window_rows=20)
DATA = RandomData(items=Uniform(high=502))
OF_CODES: Any = {"codes": random_codes(503, levels=2, codebook_size=8)}
KINDS: dict[str, Callable[[Path, Maps], Any]] = {
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


@pytest.mark.parametrize("kind", ["workers", "stream"])
def test_states_say_how_keys_are_mapped_and_ranks_must_map_them_alike(small_dataset: Path, kind: str) -> None:
    maps = _maps("roundrobin")
    loader = KINDS[kind](small_dataset, maps)
    invariants = loader.rank_invariants()
    next(iter(loader))
    state = loader.state_dict()
    maps.clear()
    assert loader.state_dict() == state  # the loader keeps the maps that it was given
    same = KINDS[kind](small_dataset, dict(reversed(_maps("roundrobin").items())))
    same.load_state_dict(state)
    check_settings([invariants, {**same.rank_invariants(), "rank": 1}])
    for other in (_maps("hash_roundrobin"), _maps("roundrobin", 4), {}):
        refusing = KINDS[kind](small_dataset, other)
        before = refusing.state_dict()
        with pytest.raises(StateError, match=r"state stores item_id with routing roundrobin \(.* but this job uses "):
            refusing.load_state_dict(state)
        assert refusing.state_dict() == before
        with pytest.raises(RankError, match="key_maps differs between ranks"):
            check_settings([invariants, {**refusing.rank_invariants(), "rank": 1}])
    assert hash(_config(_maps("roundrobin"))) == hash(_config({}))


def test_the_code_of_the_page_trains_and_exports_the_rows_of_the_same_keys(small_dataset: Path) -> None:
    load, own, export, _, _ = blocks(ROOT / "docs" / "how-to" / "routing.md")
    names: dict[str, Any] = {"data": small_dataset, "rank": 1, "world_size": 4}
    exec(load, names)
    plain = build_loader(small_dataset, LoaderConfig(batch_size=32), rank=1, world_size=4)
    num_items, items = names["num_items"], names["items"]
    # A trained table has at each row what belongs to its key, here the key itself.
    table = torch.empty(num_items, dtype=torch.int64)
    table[items(torch.arange(num_items))] = torch.arange(num_items)
    for batch, mapped in zip(plain, names["loader"], strict=True):
        assert torch.equal(table[mapped.features["item_id"].values()], batch.features["item_id"].values())
        names["batch"] = SimpleNamespace(features=batch.features)
        exec(own, names)
        assert torch.equal(names["batch"].features.values(), mapped.features.values())
    names |= {"table": table, "nearest_rows": [5, 0, 17]}
    exec(export, names)
    assert names["by_key"].tolist() == list(range(num_items))
    assert names["keys"].tolist() == table[[5, 0, 17]].tolist()
