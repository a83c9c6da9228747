import logging
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader import LoaderConfig, SemanticIdBatch, build_loader
from evenrank.dataloader.batches.schema import check_contents, schema_of
from evenrank.dataloader.codes import CodeTable, read_codes
from evenrank.dataloader.collate.collate import Collate
from evenrank.dataloader.collate.gather import group_by_store
from evenrank.datasets import open_store
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.dataloader.collate.stores import STORE

# The codes of an item are (item // 10, item % 10); item 12 has none.
CODES = np.stack([np.arange(40) // 10, np.arange(40) % 10])
CODES[:, 12] = -1
FLAGS = ("user_id", "label_offsets", "history_labels", "candidate_feature")


def _collate(rows: list[int], **options: Any) -> SemanticIdBatch:
    table = CodeTable(codes=CODES.T.astype(np.int32), codebook_sizes=(4, 10))
    collate = Collate.create(LoaderConfig(batch_size=3, codes=table, **options), STORE.manifest)
    ids = np.array(rows, dtype=np.int64)
    batch: SemanticIdBatch
    (batch,) = collate(group_by_store([STORE], ids), ids, batch_size=3)
    return batch


def test_each_event_is_one_token_per_level_and_the_last_event_is_the_target() -> None:
    batch = _collate([2], max_history_length=3)
    # Events 30..35: history 32 33 34, target 35; tokens of the second level follow the 4 of the first.
    assert rows_of(batch.features, "semantic_id") == [[3, 4 + 2, 3, 4 + 3, 3, 4 + 4], [], []]
    assert rows_of(batch.features, "age") == [[9], [], []]
    assert rows_of(batch.labels, "label") == [[3, 5], [], []]
    assert batch.sample_ids.tolist() == [2, -1, -1]
    assert (batch.num_real, batch.loss_tokens) == (1, 2)
    assert batch.max_lengths == {"sex": 1, "age": 1, "semantic_id": 6, "label": 2}
    with pytest.raises(IndexError, match="a row has an item without a code; it is not a sample"):
        _collate([0])


@given(
    num_events=st.lists(st.integers(1, 12), max_size=10),
    max_history_length=st.integers(0, 12),
    batch_size=st.integers(1, 4),
    options=st.fixed_dictionaries(dict.fromkeys(FLAGS, st.booleans())),
)
def test_labels_follow_from_the_sample(
    num_events: list[int], max_history_length: int, batch_size: int, options: Any
) -> None:
    offsets = np.concatenate([[0], np.cumsum(num_events)]).astype(np.int64)
    items = np.random.default_rng(len(num_events)).integers(0, 40, offsets[-1])
    columns = {**dict.fromkeys(STORE.columns, offsets[:-1]), "item_id": items}
    store = replace(STORE, offsets=offsets, columns=columns)
    codes = np.random.default_rng(1).integers(0, 9, (40, 2), dtype=np.int32)
    table = CodeTable(codes=codes, codebook_sizes=(9, 9))
    config = LoaderConfig(batch_size=batch_size, codes=table, max_history_length=max_history_length, **options)
    collate = Collate.create(config, store.manifest)
    ids = np.arange(len(num_events))
    num_batches = -(-len(ids) // batch_size)
    seen = 0
    for batch in collate(group_by_store([store], ids), ids, batch_size=batch_size, num_batches=num_batches):
        check_contents(batch, schema_of(batch))
        assert batch.loss_tokens == len(batch.labels.values())
        for row in range(batch.num_real):
            shown = codes[items[offsets[seen] : offsets[seen + 1]][-max_history_length - 1 :]]
            labeled = shown[min(1, len(shown) - 1) :] if options["history_labels"] else shown[-1:]
            token_offsets = np.array([0, 9])
            expected = labeled + token_offsets * options["label_offsets"]
            assert rows_of(batch.labels, "label")[row] == expected.reshape(-1).tolist()
            tokens = shown + token_offsets
            assert rows_of(batch.features, "semantic_id")[row] == tokens[:-1].reshape(-1).tolist()
            if options["user_id"]:
                assert rows_of(batch.features, "user_id")[row] == [offsets[seen]]
            if options["candidate_feature"]:
                assert rows_of(batch.features, "candidate_id")[row] == tokens[-1].tolist()
            seen += 1
    assert seen == len(num_events)


def test_users_without_codes_are_left_out(
    small_dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(small_dataset)
    codes = np.zeros((2, 400), dtype=np.int64)  # the dataset has items above 399
    codes[:, 3] = -1
    np.save(tmp_path / "codes.npy", codes)
    config = LoaderConfig(batch_size=16, codes=tmp_path / "codes.npy", max_history_length=4)
    with caplog.at_level(logging.WARNING, logger="evenrank"):
        loader = build_loader(small_dataset, config, rank=0, world_size=1)
    shown = [store.columns["item_id"][a:b][-5:] for a, b in zip(store.offsets, store.offsets[1:], strict=False)]
    uncoded = [row for row, items in enumerate(shown) if ((items == 3) | (items >= 400)).any()]
    empty = [row for row, items in enumerate(shown) if not len(items)]
    assert {reason: rows.tolist() for reason, rows in loader.left_out_rows.items()} == {
        "no event to predict": empty,
        "an item without a code": uncoded,
    }
    assert loader.num_dropped == len(uncoded) + len(empty) == len(store) - loader.num_samples
    assert f"{len(uncoded)} of {len(store)} rows are left out: an item without a code" in caplog.text
    ids = sorted(sample for batch in loader for sample in ids_of(batch))
    assert ids == sorted(set(range(len(store))) - set(uncoded) - set(empty))


@pytest.mark.parametrize(
    ("without_code", "left_out"),
    # The first user has the items 10..12, the third 30..35, of which 33..35 are shown.
    [((), []), ((10,), [0]), ((12,), [0]), ((30, 32), []), ((33,), [2]), ((35,), [2]), ((10, 35), [0, 2])],
)
def test_an_item_without_a_code_counts_from_the_first_event_that_is_shown_to_the_last(
    without_code: tuple[int, ...], left_out: list[int]
) -> None:
    codes = np.zeros((40, 1), dtype=np.int32)
    codes[list(without_code)] = -1
    config = LoaderConfig(batch_size=3, codes=CodeTable(codes=codes, codebook_sizes=(1,)), max_history_length=2)
    unusable = Collate.create(config, STORE.manifest).unusable(STORE)
    assert {reason: rows.tolist() for reason, rows in unusable.items()} == {
        "no event to predict": [1],
        "an item without a code": left_out,
    }


@pytest.mark.parametrize("suffix", [".pt", ".npy"])
def test_code_tables_are_read_from_tensor_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"codes{suffix}"
    torch.save(torch.from_numpy(CODES), path) if suffix == ".pt" else np.save(path, CODES)
    table = read_codes(path)
    assert table.codes.tolist() == CODES.T.tolist()
    assert table.codebook_sizes == (4, 10)
    assert table.level_offsets.tolist() == [0, 4]
    assert table.has_code(np.array([11, 12, 39, 40, -1])).tolist() == [True, False, True, False, False]
    assert read_codes(path, (16, 16)).level_offsets.tolist() == [0, 16]


class _Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harmed"),)


def _npy(descr: str, shape: str) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(64)


CONTENTS = {"empty": b"", "pickle": pickle.dumps([[1]]), "harmful": pickle.dumps(_Harmful(), protocol=2)}
MALFORMED: dict[str, Any] = {
    **{f"{name}{suffix}": content for suffix in (".npy", ".pt") for name, content in CONTENTS.items()},
    "huge.npy": _npy("'<i8'", "(64, 1000000000000)"),
    "huger.npy": _npy("'<i8'", "(9999999999999999999999, 9)"),
    "deep.npy": _npy("(" * 5000, "(2, 2)"),
    "boolean.npy": _npy("'<i8'", "(True, 8)"),
}
ARRAYS: list[Any] = [
    *(np.array(values) for values in ([[1, None]], 3, [1, 2], [[_Harmful()]])),
    *(np.ones((2, 2), dtype) for dtype in (complex, bool, [("a", "i4")], "M8[s]")),
    *(np.full((2, 2), 2**63, np.uint64), np.ones((2, 0), int)),
]
TENSORS: list[Any] = [
    *(torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2, dtype=torch.complex64).conj(), {"a": torch.ones(2)}),
    *(torch.ones(1, dtype=torch.long).expand(64, 10**11), torch.ones(2, 2, device="meta").long(), _Harmful()),
]


@pytest.mark.parametrize(
    ("table", "sizes", "message"),
    [
        (
            np.zeros(5, dtype=int),
            None,
            r"must contain an integer tensor \[levels, items\] or .* of an item\], got int64 \(5,\)",
        ),
        (np.zeros((2, 5)), None, "must contain an integer tensor"),
        (np.zeros((500, 3), dtype=int), None, "has 500 levels of 3 items, more than 64 levels; transpose the table"),
        (np.full((2, 5), -2), None, "has codes from -2 to -2"),
        (np.array([[1, -1], [1, 1]]), None, "codes.npy: item 1 has codes in some levels only"),
        (CODES, (4, 9), r"below codebook_sizes, \[4, 9\], got -1 to \[3, 9\] in the levels"),
        (CODES, (4,), r"npy has 2 levels of 40 items, but codebook_sizes are \[4\]; pass one size per level$"),
    ],
)
def test_malformed_tables_are_refused(tmp_path: Path, table: NDArray[Any], sizes: Any, message: str) -> None:
    np.save(tmp_path / "codes.npy", table)
    with pytest.raises(DataError, match=message):
        read_codes(tmp_path / "codes.npy", sizes)


@pytest.mark.timeout(60, method="thread")  # a read that waits cannot be interrupted
def test_files_that_are_no_table_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in MALFORMED.items():
        (tmp_path / name).write_bytes(content)
    for number, array in enumerate(ARRAYS):
        np.save(tmp_path / f"array {number}.npy", array, allow_pickle=True)
    for number, tensor in enumerate(TENSORS):
        torch.save(tensor, tmp_path / f"tensor {number}.pt")
    for suffix in (".npy", ".pt"):
        os.mkfifo(tmp_path / f"pipe{suffix}")
    messages = {}
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(DataError) as caught:
            read_codes(path)
        messages[path.name] = str(caught.value).removeprefix(str(path))
        assert messages[path.name] != str(caught.value)
        assert "\n" not in str(caught.value)
    assert not Path("harmed").exists()
    for name in ("array 3.npy", "tensor 5.pt"):
        assert messages[name].startswith(" cannot be read as a tensor without running code from it")
    for suffix in (".npy", ".pt"):
        assert messages[f"pipe{suffix}"].startswith(" is a named pipe, not a regular file")


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.zeros((2, 5), dtype=np.int32), r"integers \[items, levels\] .*, got int32 \[2, 5\]; transpose"),
        (np.zeros((5, 3)), "codes must be integers"),
        (np.array([[0, 1, 4]]), r"below codebook_sizes, \[2, 3, 4\], got 0 to \[0, 1, 4\]"),
        (np.array([[0, -2, 0]]), "codes must be -1"),
        (np.array([[0, 0, 0], [0, -1, 0]]), "item 1 has codes in some levels only"),
    ],
)
def test_a_table_that_is_no_table_of_codes_is_an_error(codes: NDArray[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CodeTable(codes=codes, codebook_sizes=(2, 3, 4))
