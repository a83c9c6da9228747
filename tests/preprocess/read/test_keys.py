from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.core.hashing import mix64
from evenrank.preprocess.read import keys as key_table
from evenrank.preprocess.read.keys import KeyTable, TextValues, by_bucket, encode_keys, text_keys

words = st.integers(-(2**63), 2**63 - 1)


def colliding(texts: pl.Series) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.zeros(len(texts), dtype=np.int64)


@given(st.lists(words, unique=True, max_size=50), st.lists(words, max_size=50))
def test_a_table_finds_the_index_of_each_of_its_keys_and_no_other(keys: list[int], others: list[int]) -> None:
    queries = [*others, *reversed(keys)]
    found = KeyTable(np.array(keys, dtype=np.int64)).find(np.array(queries, dtype=np.int64))
    assert found.tolist() == [keys.index(query) if query in keys else -1 for query in queries]


@given(st.lists(st.one_of(st.integers(0, 5), words), max_size=60), st.integers(0, 2**64 - 1))
def test_keys_are_numbered_by_first_appearance_whatever_the_seed(keys: list[int], seed: int) -> None:
    distinct, codes = encode_keys(np.array(keys, dtype=np.int64), np.uint64(seed))
    assert distinct.tolist() == list(dict.fromkeys(keys))
    assert distinct[codes].tolist() == keys


def test_a_table_grows_while_keys_are_numbered() -> None:
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 20_000)
    keys = np.concatenate([keys, keys[::-1]])
    distinct, codes = encode_keys(keys, np.uint64(1))
    assert len(distinct) == 20_000
    np.testing.assert_array_equal(distinct[codes], keys)


@given(st.lists(words, max_size=60), st.integers(0, 4))
def test_events_are_sorted_by_the_leading_bits_of_their_hash_and_stay_in_order(keys: list[int], num_bits: int) -> None:
    order, offsets = by_bucket(np.array(keys, dtype=np.int64), num_bits)
    hashes = mix64(np.array(keys, dtype=np.int64).view(np.uint64)).tolist()
    buckets = [(word >> (64 - num_bits)) for word in hashes]
    assert order.tolist() == sorted(range(len(keys)), key=lambda event: buckets[event])
    assert offsets.tolist() == [sum(bucket < index for bucket in buckets) for index in range((1 << num_bits) + 1)]


@given(st.lists(st.text(max_size=20), unique=True, max_size=30))
def test_keys_of_texts_depend_on_all_their_bytes_and_on_nothing_else(texts: list[str]) -> None:
    keys = text_keys(pl.Series(texts, dtype=pl.String))
    assert len(set(keys.tolist())) == len(texts)
    assert [text_keys(pl.Series([text]))[0] for text in texts] == keys.tolist()
    sliced = pl.concat([pl.Series(["other"]), pl.Series(texts, dtype=pl.String)]).slice(1)
    assert text_keys(sliced).tolist() == keys.tolist()


@pytest.mark.parametrize("num_bits", [0, 3])
@pytest.mark.parametrize("limit", [4, 1_000_000])
def test_every_text_is_in_the_part_of_its_key_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bits: int, limit: int
) -> None:
    monkeypatch.setattr(key_table, "_BUFFERED_ROWS", limit)
    values = TextValues(tmp_path, num_bits)
    batches = [[f"text {index * step % 40}" for index in range(15)] for step in (1, 3, 7)]
    pieces = [values.of_piece(number) for number in range(2)]
    for batch, piece in zip(batches, (*pieces, pieces[0]), strict=True):
        assert piece.add(pl.Series(batch)).tolist() == text_keys(pl.Series(batch)).tolist()
    for piece in pieces:
        piece.flush()
    parts = [values.part(index) for index in range(1 << num_bits)]
    texts = sorted(text for part in parts for text in part["value"])
    assert texts == sorted({text for batch in batches for text in batch})
    for index, part in enumerate(parts):
        assert part["key"].to_list() == text_keys(part["value"]).tolist()
        hashes = mix64(part["key"].to_numpy().view(np.uint64))
        assert [(word >> (64 - num_bits)) for word in hashes.tolist()] == [index] * len(part)


def test_two_texts_with_one_key_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_table, "text_keys", colliding)
    values = TextValues(tmp_path, 0)
    values.add(pl.Series(["b", "a", "b"]))
    values.flush()
    with pytest.raises(DataError, match=r"the ids 'a' and 'b' have the same 64-bit hash; rename one of them"):
        values.part(0)
