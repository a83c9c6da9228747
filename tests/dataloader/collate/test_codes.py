"""Tables of codes and the files that they are read from; `collate/test_collate.py` has what batches show of them."""

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenrank.core.errors import DataError
from evenrank.dataloader.codes import CodeTable, read_codes

# The codes of an item are (item // 10, item % 10) and, for each second one, also (item // 10, 9 - item % 10).
CODES = np.stack([np.arange(40) // 10, np.arange(40) % 10])
FILE = np.stack([CODES, np.where(np.arange(40) % 2, np.stack([CODES[0], 9 - CODES[1]]), -1)], axis=2)
CODES[:, 12] = FILE[:, 12] = -1


@pytest.mark.parametrize("suffix", [".pt", ".npy"])
def test_a_table_is_read_from_a_file_of_tensors(tmp_path: Path, suffix: str) -> None:
    def read(codes: Any, *sizes: Any) -> CodeTable:
        path = tmp_path / f"codes{suffix}"
        torch.save(torch.from_numpy(codes), path) if suffix == ".pt" else np.save(path, codes)
        return read_codes(path, *sizes)

    table, several = read(CODES), read(FILE)
    assert table.codes.tolist() == several.codes.tolist() == CODES.T.tolist()
    assert (table.codebook_sizes, table.level_offsets.tolist()) == ((4, 10), [0, 4])
    assert read(CODES, (16, 16)).level_offsets.tolist() == [0, 16]
    assert table.has_code(np.array([11, 12, 39, 40, -1])).tolist() == [True, False, True, False, False]
    assert several.alternatives is not None
    assert several.alternatives.tolist() == FILE[..., 1:].transpose(1, 2, 0).tolist()
    items, codes = several.all_codes()
    assert items.tolist() == sorted([*range(12), *range(13, 40), *range(1, 40, 2)])
    assert codes[:4].tolist() == [[0, 0], [0, 1], [0, 8], [0, 2]]  # of items 0, 1 and 2
    assert table.all_codes()[1].tolist() == np.delete(CODES, 12, axis=1).T.tolist()
    # Tables are compared by what describes them.
    assert read(FILE[..., :1]).describe() == table.describe() == replace(several, alternatives=None).describe()
    others = replace(several, alternatives=several.alternatives.clip(-1, 0)), read(CODES[:, ::-1].copy())
    assert len({each.describe().split()[-1] for each in (table, several, *others)}) == 4
    assert several.describe().startswith("2 levels of 40 items with 1 alternatives, codebook_sizes [4, 10], ")


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
