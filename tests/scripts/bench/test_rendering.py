from pathlib import Path

from matplotlib.figure import Figure

from rendering.figures import save
from rendering.markdown_tables import table


def test_a_figure_is_written_with_its_folder_at_150_dpi(tmp_path: Path) -> None:
    save(Figure(figsize=(2, 1)), tmp_path / "new" / "a.png")
    header = (tmp_path / "new" / "a.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert [int.from_bytes(header[start : start + 4]) for start in (16, 20)] == [300, 150]


def test_columns_are_aligned_and_bars_in_cells_escaped() -> None:
    assert table(("run", "ms", "MFU"), [("a|b", "1.5", "30%"), ("c", "2", "-")]) == (
        "| run | ms | MFU |\n| --- | ---: | ---: |\n| a\\|b | 1.5 | 30% |\n| c | 2 | - |\n"
    )


def test_any_number_of_columns_may_be_left_aligned() -> None:
    assert table(("run", "lengths", "ms"), [], left=2).splitlines()[1] == "| --- | --- | ---: |"
    assert table(("ms",), [], left=0).splitlines()[1] == "| ---: |"
