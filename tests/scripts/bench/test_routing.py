import json

import pytest
import routing


def test_patterns_are_spread_in_each_mode(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["routing.py", "--ranks", "2,8", "--keys", "8000", "--draws", "20000"])
    routing.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    row_of = {(row["pattern"], row["ranks"], row["mode"]): row for row in rows}
    num_patterns = len(routing.STRIDES) + len(routing.BLOCKS) + 2 * len(routing.DRAWN)
    assert len(row_of) == len(rows) == num_patterns * 2 * 3  # numbers of ranks, modes

    assert [row_of["stride 2", ranks, "roundrobin"]["keys"] for ranks in (2, 8)] == [2, 2]
    assert row_of["stride 1,009", 8, "roundrobin"]["keys"] == row_of["stride 64", 8, "continuous"]["keys"] == 1
    # The first of four blocks and the last, which ends with the table, are on ranks 0 and 7.
    assert row_of["2,000 ids of 4 blocks of 1,048,576", 8, "continuous"]["keys"] == 2
    assert row_of["2,000 ids of 4 blocks of 1,048,576", 8, "roundrobin"]["keys"] == 1
    assert row_of["stride 64", 8, "hash_roundrobin"]["bound"] == 1.097
    for row in rows:
        if row["mode"] == "hash_roundrobin":
            assert 1 <= row["keys"] < 1 + 1.5 * (row["bound"] - 1)
        assert row["lookups"] == row["keys"] or row["pattern"].startswith(("users", "videos"))
        assert row["lookups"] >= row["hottest"]
    assert {row["hottest"] for row in rows if row["pattern"] == "stride 10"} == {0.0, 0.001}  # of 8,000
    assert row_of["users times 8", 8, "roundrobin"]["lookups"] == 8
    assert 3.0 < row_of["users times 8", 8, "hash_roundrobin"]["hottest"] < 3.3
