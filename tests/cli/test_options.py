"""Where pages go, and how they are written."""

from pathlib import Path

import pytest

from evenrank.cli.options import page_path, write_page
from evenrank.core.errors import ConfigError, DataError


def test_the_page_of_a_dataset_is_next_to_it_and_never_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "out" / "ml.v2"
    data.mkdir(parents=True)
    assert page_path(data, None) == tmp_path / "out" / "ml.v2-report.html"
    assert page_path(data, tmp_path / "x.html") == tmp_path / "x.html"
    monkeypatch.chdir(data)
    assert page_path(Path(), None) == tmp_path / "out" / "ml.v2-report.html"
    (tmp_path / "link").symlink_to(data)
    for inside in (data / "page.html", tmp_path / "link" / "page.html", Path("train/page.html")):
        with pytest.raises(ConfigError, match="is inside the dataset"):
            page_path(data, inside)
    with pytest.raises(ConfigError, match="is a folder"):
        page_path(data, tmp_path)


def test_the_page_of_a_log_is_next_to_it_and_never_replaces_it(tmp_path: Path) -> None:
    log = tmp_path / "run.1.jsonl"
    log.touch()
    (tmp_path / "link.html").symlink_to(log)
    assert page_path(log, None) == tmp_path / "run.1-report.html"
    assert page_path(log, tmp_path / "x.html") == tmp_path / "x.html"
    for chosen in (log, tmp_path / "link.html"):
        with pytest.raises(ConfigError, match="is the log, which the page would replace"):
            page_path(log, chosen)
    with pytest.raises(ConfigError, match="is a folder; --html needs the name of a file"):
        page_path(log, tmp_path)


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
