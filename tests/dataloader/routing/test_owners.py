"""Owners of keys in arrays and tensors, against Python's integers, published hashes, and fbgemm."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError
from evenrank.dataloader.routing import MODES, KeyMap, Mode, Routing, hash_keys, owner_rank
from evenrank.dataloader.routing.key_map import check_routing
from evenrank.dataloader.routing.owners import owners_and_rows
from tests.dataloader.routing.reference import hash_word, keys_of, owner_and_row, signed

# Of `fmix64`, from the tests of other implementations.
PUBLISHED = {
    0: 0,
    1: 0xB456BCFC34C2CB2C,
    2: 0x3ABF2A20650683E7,
    3: 0x0B5181C509F8D8CE,
    42: 0x810879608E4259CC,
    0xDEADBEEFCAFEBABE: 0x7082995008F0C48C,
    2**63 - 1: 0xABB93DF0A930EDEA,
    2**63: 0x8F780810AF31A493,
    2**64 - 1: 0x64B5720B4B825F21,
}

modes = st.sampled_from(MODES)
world_sizes = st.one_of(st.integers(1, 64), st.sampled_from([65, 1000, 2**31, 2**62 + 1, 2**63 - 1]))
tables = st.one_of(st.integers(1, 200), st.integers(1, 2**63 - 1))
keys_and_bits = st.sampled_from((32, 64)).flatmap(
    lambda bits: st.tuples(st.lists(keys_of(bits), max_size=30), st.just(bits))
)


def test_hashes_are_the_published_ones() -> None:
    words = np.array(list(PUBLISHED), dtype=np.uint64)
    assert hash_keys(words).tolist() == list(PUBLISHED.values())
    assert hash_keys(words.view(np.int64)).tolist() == list(PUBLISHED.values())
    assert [hash_word(word) for word in PUBLISHED] == list(PUBLISHED.values())


@settings(max_examples=200)
@given(keys_and_bits, world_sizes, modes, tables)
def test_owners_are_those_of_pythons_integers(
    keys_and_bits: Any, world_size: int, mode: Mode, num_embeddings: int
) -> None:
    keys, bits = keys_and_bits
    routing = Routing(mode=mode, num_embeddings=num_embeddings)
    expected = [owner_and_row(key, world_size, routing, bits) for key in keys]
    array = np.array(keys, dtype=f"int{bits}")
    of_both_kinds: list[Any] = [array, torch.from_numpy(array)]
    for each in of_both_kinds:
        found = owner_rank(each, world_size, mode, num_embeddings)
        assert found.dtype in (np.int64, torch.int64)
        assert found.tolist() == [owner for owner, _ in expected]
    _, rows = owners_and_rows(array, world_size, routing)
    assert rows.dtype == array.dtype
    assert rows.tolist() == [signed(row, bits) for _, row in expected]


@pytest.mark.parametrize("mode", MODES)
def test_keys_of_other_widths_have_the_owners_of_int64(mode: Mode) -> None:
    keys = np.array([-128, -3, -1, 0, 1, 5, 127])
    expected = owner_rank(keys, 7, mode, 20)
    for dtype in (np.int8, np.int16, *([np.int32] if mode != "continuous" else [])):
        assert np.array_equal(owner_rank(keys.astype(dtype), 7, mode, 20), expected)
    assert np.array_equal(owner_rank(keys[3:].astype(np.uint8), 7, mode, 20), expected[3:])
    assert np.array_equal(owner_rank(keys.view(np.uint64), 7, mode, 20), expected)


@pytest.mark.parametrize("mode", MODES)
def test_owners_have_the_shape_of_the_keys_which_stay_as_they_are(mode: Mode) -> None:
    keys = np.arange(-6, 6).reshape(3, 4)
    expected = owner_rank(keys.reshape(-1), 3, mode, 5).reshape(3, 4)
    assert np.array_equal(owner_rank(keys, 3, mode, 5), expected)
    assert np.array_equal(owner_rank(keys.T, 3, mode, 5), expected.T)
    assert owner_rank(torch.from_numpy(keys).T, 3, mode, 5).tolist() == expected.T.tolist()
    assert owner_rank(np.array(-6), 3, mode, 5).shape == ()
    assert owner_rank(torch.tensor(-6), 3, mode, 5).item() == expected[0, 0]
    assert owner_rank(np.empty((0, 2), dtype=np.int64), 3, mode, 5).shape == (0, 2)
    assert np.array_equal(keys, np.arange(-6, 6).reshape(3, 4))


@given(keys_and_bits, st.integers(1, 64), st.integers(1, 300))
def test_ranges_are_those_of_fbgemm(keys_and_bits: tuple[list[int], int], world_size: int, rows: int) -> None:
    keys, bits = keys_and_bits
    tensor = torch.from_numpy(np.array(keys, dtype=f"int{bits}"))
    lengths, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
        torch.ones(len(keys), dtype=torch.int64),
        tensor,
        bucketize_pos=False,
        sequence=False,
        block_sizes=torch.tensor([-(-rows // world_size)], dtype=tensor.dtype),
        my_size=world_size,
    )
    expected = lengths.view(world_size, len(keys)).argmax(dim=0).tolist() if keys else []
    assert owner_rank(tensor, world_size, "continuous", rows).tolist() == expected


@pytest.mark.parametrize("keys", [np.arange(0, 200_000, 4), np.arange(50_000) * 1_000_003])
def test_hashing_spreads_patterns_that_round_robin_or_ranges_put_on_one_rank(keys: NDArray[np.int64]) -> None:
    loads = np.bincount(owner_rank(keys, 4, "hash_roundrobin"), minlength=4)
    rows = KeyMap(num_embeddings=int(keys.max()) + 1, world_size=4, mode="hash_roundrobin")(keys)
    loads_of_rows = np.bincount(owner_rank(rows, 4, "continuous", int(keys.max()) + 1), minlength=4)
    for spread in (loads, loads_of_rows):
        assert spread.max() < 1.03 * len(keys) / 4


WITHOUT_TABLE: dict[str, Any] = {"mode": "roundrobin", "num_embeddings": None}


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (owner_rank, {"keys": np.array([1.0])}, "keys must be integers, got float64"),
        (owner_rank, {"keys": torch.tensor([1.0])}, "keys must be int32 or int64, got torch.float32"),
        (owner_rank, {"keys": torch.tensor([1], dtype=torch.int16)}, "got torch.int16"),
        (owner_rank, {"keys": [1, 2]}, "must be a NumPy array or a tensor, got list"),
        (Routing, {"mode": "modulo"}, "must be one of continuous, roundrobin, hash_roundrobin, got 'modulo'"),
        (Routing, {"mode": "continuous"}, "needs num_embeddings"),
        (Routing, {"mode": "continuous", "num_embeddings": 0}, r"at least 1 and below 2\^63, got 0"),
        *((Routing, {"mode": "roundrobin", "num_embeddings": n}, f"got {n}") for n in (2**63, True, 2.0)),
        *(
            (check_routing, WITHOUT_TABLE | {"world_size": size}, f"world_size .*, got {size}")
            for size in (0, -1, 2**63, 2.0, True)
        ),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[..., object], arguments: dict[str, Any], message: str) -> None:
    of_owners = {"world_size": 2, "mode": "roundrobin"} if make is owner_rank else {}
    with pytest.raises(ConfigError, match=message):
        make(**of_owners, **arguments)
