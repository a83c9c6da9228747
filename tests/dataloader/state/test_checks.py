from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenrank.core.errors import StateError
from evenrank.dataloader.state.checks import check_vocabulary, decode, encode
from evenrank.datasets.schema import IdSummary, VocabularyVersion

AA, BB = (VocabularyVersion(sha256=sha256, size=1) for sha256 in ("aa", "bb"))


def test_ids_of_a_state_must_keep_their_meaning_where_both_say_it() -> None:
    ids = {"item_id": IdSummary(rule="dense", kind="int64", versions=(AA, BB))}
    for known in ("aa", "bb"):
        check_vocabulary(f'{{"item_id": "dense int64 {known}", "city": "dense text 00"}}', ids, source="it")
    with pytest.raises(StateError, match=r"^it has item_id with the vocabulary cc, which this dataset, with the voc"):
        check_vocabulary('{"item_id": "dense int64 cc"}', ids, source="it")
    for damaged in ("x", "[]", "[" * 100_000):
        with pytest.raises(
            StateError, match=r"^corrupt it: field 'vocabulary' cannot be decoded; use another checkpoint"
        ):
            check_vocabulary(damaged, ids, source="it")


@pytest.mark.parametrize(
    "state",
    [
        {"a": [1, 2.5, None, True, "x", b"y", (1, 2), {3}], 4: {}},
        torch.Generator().get_state(),
        np.random.default_rng(0).bit_generator.state,
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.int64(7),
    ],
)
def test_states_of_anyones_loaders_are_kept_without_pickling(state: Any) -> None:
    assert repr(decode(encode(state))) == repr(state)


def test_no_code_is_run_from_a_state(tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> Any:
            return (tmp_path / "ran").touch, ()

    with pytest.raises(StateError, match=r"contains .*, which is not loaded from files by default; if you trust"):
        decode(encode(Malicious()))
    assert not (tmp_path / "ran").exists()
