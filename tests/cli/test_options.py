from pathlib import Path

import pytest

from evenrank.cli.options import page_path, write_page
from evenrank.core.errors import ConfigError, DataError


def test_the_page_is_next_to_its_data_and_never_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "out" / "ml.v2"
    data.mkdir(parents=True)
    (tmp_path / "link").symlink_to(data)
    monkeypatch.chdir(data)
    assert page_path(data, None) == page_path(Path(), None) == tmp_path / "out" / "ml.v2-report.html"
    assert page_path(data, tmp_path / "x.html") == tmp_path / "x.html"
    inside = (data / "page.html", tmp_path / "link" / "page.html", Path("train/page.html"))
    for chosen, message in (
        *((page, "is inside the dataset") for page in inside),
        (tmp_path, "is a folder; --html needs the name of a file"),
    ):
        with pytest.raises(ConfigError, match=message):
            page_path(data, chosen)


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "new" / "page.html"
    write_page(page, "old")
    assert page.read_text() == "old"

    def fail(self: Path, target: Path) -> None:
        assert self.read_text() == "new"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(DataError, match=r"page\.html could not be written: No space left on device; choose another"):
        write_page(page, "new")
    assert page.read_text() == "old"
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]
