from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import DataError
from evenrank.preprocess.read import keys as key_table
from evenrank.preprocess.read.keys import KeyTable, TextValues, encode_keys, text_keys

words = st.integers(-(2**63), 2**63 - 1)


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


@given(st.lists(st.text(max_size=20), unique=True, max_size=30))
def test_keys_of_texts_depend_on_all_their_bytes_and_on_nothing_else(texts: list[str]) -> None:
    keys = text_keys(pl.Series(texts, dtype=pl.String))
    assert len(set(keys.tolist())) == len(texts)
    assert [text_keys(pl.Series([text]))[0] for text in texts] == keys.tolist()
    sliced = pl.concat([pl.Series(["other"]), pl.Series(texts, dtype=pl.String)]).slice(1)
    assert text_keys(sliced).tolist() == keys.tolist()


def test_two_texts_with_one_key_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_table, "text_keys", lambda texts: np.zeros(len(texts), dtype=np.int64))
    values = TextValues(tmp_path, 0)
    values.add(pl.Series(["b", "a", "b"]))
    values.flush()
    with pytest.raises(DataError, match=r"the ids 'a' and 'b' have the same 64-bit hash; rename one of them"):
        values.part(0)
