import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.hashing import mix64, mix_word

WORDS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20)


def test_the_hash_is_splitmix64() -> None:
    # The first outputs of SplitMix64 with seed 1234567, as published with its reference implementation.
    golden_ratio = np.uint64(0x9E3779B97F4A7C15)
    states = np.uint64(1234567) + golden_ratio * np.arange(1, 4, dtype=np.uint64)
    assert mix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(WORDS)
def test_words_hash_alike_in_arrays_and_in_compiled_loops(words: list[int]) -> None:
    values = np.array(words, dtype=np.uint64)
    assert [int(mix_word(value)) for value in values] == mix64(values).tolist()
    assert values.tolist() == words  # the input is not changed
