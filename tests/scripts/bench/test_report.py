from pathlib import Path

import pytest

import report

ROWS: list[report.Row] = [
    {"run": "a|b", "steps": 1200, "ms": [1.0, 2.0, 1.5], "mfu": None},
    {"run": "c", "steps": 8, "ms": 12.345, "failure": "out of memory"},
]
TABLE = """\
| run | steps | ms | mfu | failure |
| --- | ---: | ---: | ---: | --- |
| a\\|b | 1,200 | 1.500 ± 0.289 | - | - |
| c | 8 | 12.35 | - | out of memory |
"""


@pytest.mark.processes  # git, for the commit
def test_rows_are_printed_read_again_and_become_a_table_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for row in (machine := report.machine(), *ROWS):
        report.emit(row)
    assert {"date", "commit", "processor", "cores", "memory_gib", "numba"} <= machine.keys()
    report.show(ROWS)  # lists become their mean and its standard error
    (output := tmp_path / "output").write_text(text := capsys.readouterr().out)
    assert text.endswith(f"\n\n{TABLE}")
    report.write(again := tmp_path / "rows.jsonl", ROWS)
    assert report.read([output]) == report.read([again]) == ROWS
    options = ["--columns", "ms"], ["--plot", "ms", "--by", "run", "--into", f"{tmp_path}/plots/ms.png"]
    for given, printed in zip(options, ("| ms |\n| ---: |\n| 1.500 ± 0.289 |\n| 12.35 |\n", ""), strict=True):
        monkeypatch.setattr("sys.argv", ["report.py", str(output), *given])
        report.main()
        assert capsys.readouterr().out == printed
    assert (tmp_path / "plots" / "ms.png").read_bytes().startswith(b"\x89PNG")
    assert [report.cell(value) for value in (0.12345, 5.0, 99.5, 1234.5)] == ["0.123", "5.000", "99.50", "1,234"]
