from pathlib import Path

from matplotlib.figure import Figure

from rendering.figures import save


def test_a_figure_is_written_with_its_folder_at_150_dpi(tmp_path: Path) -> None:
    save(Figure(figsize=(2, 1)), tmp_path / "new" / "a.png")
    header = (tmp_path / "new" / "a.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert [int.from_bytes(header[start : start + 4]) for start in (16, 20)] == [300, 150]
