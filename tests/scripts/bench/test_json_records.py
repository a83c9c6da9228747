from pathlib import Path
from typing import Any

import json_records
import pytest

from evenrank.core.errors import DataError

KIND = ("a kind", 2)


def load(path: Path) -> Any:
    return json_records.load(path, KIND, lambda content: content["number"], remedy="write it again")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "a kind", "version": 1, "number": 7}', "is version 1 of 'a kind'"),
        ('{"format": "other", "version": 2}', "is version 2 of 'other'"),
        ('{"format": "a kind", "version": 2}', "cannot be read as 'a kind': 'number'"),
        ("[]", "cannot be read as 'a kind'"),
        (None, "No such file"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_the_remedy(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "record.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=rf"^{path} .*{message}.*; write it again$") as caught:
        load(path)
    assert "\n" not in str(caught.value)
