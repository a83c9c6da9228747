import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.routing import MODES, KeyMap, Mode
from evenrank.dataloader.routing.key_map import rows_per_rank

SIZES = st.integers(1, 3000)
WORLDS = st.integers(1, 70)
LARGE = st.integers(1, 1 << 62)


@given(size=SIZES, world_size=WORLDS, mode=st.sampled_from(MODES))
@example(size=1, world_size=1, mode="hash_roundrobin")
@example(size=5, world_size=4, mode="roundrobin")  # the last rank has no row
@example(size=3, world_size=8, mode="roundrobin")
def test_each_key_has_a_row_of_its_own_and_the_inverse_finds_it(size: int, world_size: int, mode: Mode) -> None:
    key_map = KeyMap(num_embeddings=size, world_size=world_size, mode=mode)
    keys = np.arange(size)
    rows = key_map(keys)
    assert sorted(rows.tolist()) == keys.tolist()
    assert key_map.inverse(rows).tolist() == keys.tolist()
    if size % world_size == 0 and mode == "roundrobin":  # TorchRec's ranges then assign the rows like modulo the keys
        assert np.array_equal(rows // rows_per_rank(size, world_size), keys % world_size)


@given(size=LARGE, world_size=WORLDS, mode=st.sampled_from(MODES), data=st.data())
@example(size=1 << 62, world_size=64, mode="hash_roundrobin", data=None)
def test_tables_of_any_size_have_exact_inverses(size: int, world_size: int, mode: Mode, data: Any) -> None:
    drawn = [] if data is None else data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    keys = np.array([0, size - 1, size // 2, *drawn])
    key_map = KeyMap(num_embeddings=size, world_size=world_size, mode=mode)
    rows = key_map(keys)
    assert rows.min() >= 0
    assert rows.max() < size
    assert len(set(rows.tolist())) == len(set(keys.tolist()))
    assert key_map.inverse(rows).tolist() == keys.tolist()
    if mode == "continuous":
        assert rows.tolist() == keys.tolist()
    if mode == "hash_roundrobin":  # which checkpoints depend on
        assert rows.tolist() == [_reference(key, size) for key in keys.tolist()]


def test_round_robin_gives_each_rank_its_keys_in_turn() -> None:
    key_map = KeyMap(num_embeddings=10, world_size=4, mode="roundrobin")
    assert key_map.inverse(np.arange(10)).tolist() == [0, 4, 7, 1, 5, 8, 2, 6, 9, 3]
    ranks = key_map(np.arange(10)) // rows_per_rank(10, 4)
    assert ranks.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2]


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


@pytest.mark.parametrize("mode", MODES)
def test_results_have_the_shape_and_the_dtype_of_the_keys(mode: Mode) -> None:
    key_map = KeyMap(num_embeddings=12, world_size=4, mode=mode)
    rows = key_map(np.arange(12))
    for dtype in (np.int32, np.int64, np.uint64, np.int8):
        keys = np.arange(12, dtype=dtype).reshape(3, 4)[:, ::2]  # not contiguous
        mapped = key_map(keys)
        assert mapped.dtype == dtype
        assert mapped.tolist() == rows.reshape(3, 4)[:, ::2].tolist()
    for kind in (torch.int32, torch.int64):
        tensor = key_map(torch.arange(12, dtype=kind).reshape(3, 4).T)
        assert tensor.dtype == kind
        assert tensor.tolist() == rows.reshape(3, 4).T.tolist()
    assert keys.tolist() == np.arange(12).reshape(3, 4)[:, ::2].tolist()  # not changed
    assert key_map(np.empty((0, 3), dtype=np.int64)).shape == (0, 3)
    assert key_map(torch.empty(0, dtype=torch.int64)).tolist() == []
    assert key_map(np.array(3)).shape == ()
    assert key_map(torch.tensor(3)).tolist() == key_map(np.array(3)).tolist() == rows[3]
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrong", [-1, 10, 1 << 40])
def test_keys_outside_the_table_are_refused(mode: Mode, wrong: int) -> None:
    key_map = KeyMap(num_embeddings=10, world_size=2, mode=mode)
    of_both_kinds: list[Any] = [np.array([3, wrong]), torch.tensor([3, wrong])]
    for keys in of_both_kinds:
        with pytest.raises(
            DataError, match=rf"^the keys of a table with num_embeddings=10 are 0 to 9, got {wrong}; set"
        ):
            key_map(keys)
        with pytest.raises(DataError, match=f"^the rows of .* are 0 to 9, got {wrong};"):
            key_map.inverse(keys)


def test_dtypes_that_cannot_hold_the_rows_are_refused() -> None:
    key_map = KeyMap(num_embeddings=1 << 33, world_size=2, mode="hash_roundrobin")
    too_narrow: list[Any] = [np.array([3], dtype=np.int32), torch.tensor([3], dtype=torch.int32)]
    for keys in too_narrow:
        with pytest.raises(ConfigError, match=r"can be larger than (torch\.)?int32 holds; convert them to int64$"):
            key_map(keys)
    tensors = [torch.tensor([3.0]), torch.tensor([True]), torch.tensor([3], dtype=torch.uint64)]
    no_integers: list[Any] = [np.array([3.0]), *tensors, np.int64(3), 3, [3]]
    for floats in no_integers:
        with pytest.raises(ConfigError, match=r"^keys must be an array of integers or a tensor of signed integers"):
            key_map(floats)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "modulo"}, "mode must be one of continuous, roundrobin, hash_roundrobin, got 'modulo'"),
        *(
            ({name: number}, f"{name} must be {expected}, got {number}")
            for name in ("num_embeddings", "world_size")
            for expected, numbers in (
                ("at least 1 and at most 2^62", (0, -1, (1 << 62) + 1)),
                ("of type int", (2.0, True, None)),
            )
            for number in numbers
        ),
    ],
)
def test_impossible_maps_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        KeyMap(**{"num_embeddings": 10, "world_size": 2, "mode": "roundrobin", **change})
    assert str(raised.value) == f"KeyMap: {message}"


@pytest.mark.parametrize("keys", [np.arange(0, 200_000, 4), np.arange(50_000) * 1_000_003])
def test_a_permutation_spreads_patterns_that_round_robin_or_ranges_put_on_one_rank(keys: NDArray[np.int64]) -> None:
    size = int(keys.max()) + 1
    rows = KeyMap(num_embeddings=size, world_size=4, mode="hash_roundrobin")(keys)
    assert np.bincount(rows // rows_per_rank(size, 4), minlength=4).max() < 1.03 * len(keys) / 4


def test_arrays_are_mapped_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import numpy as np\n"
        "from evenrank.dataloader.routing import KeyMap\n"
        "assert KeyMap(num_embeddings=9, world_size=3, mode='hash_roundrobin')(np.arange(9)).sum() == 36"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
