"""Check that every link in the built documentation leads somewhere: files, anchors, and nothing fetched from elsewhere.

    python scripts/check_site.py site

Run by `make docs`. mkdocs checks the links in Markdown; this checks those of the pages, whatever wrote them.
"""

import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches when it shows a page; a link is followed only when a reader clicks it.
_FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}
_NOT_FETCHED = {"canonical", "prev", "next", "alternate", "edit"}  # as `rel` of a <link>


@dataclass
class _Page(HTMLParser):
    """The links and anchors of a page."""

    links: list[tuple[str, bool]] = field(default_factory=list)  # target, whether a browser fetches it
    anchors: set[str] = field(default_factory=lambda: {""})

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        is_relation = tag == "link" and values.get("rel") in _NOT_FETCHED
        for name in ("href", "src"):
            if name in values:
                self.links.append((values[name], (tag, name) in _FETCHED and not is_relation))


def check_site(site: Path, base: str) -> list[str]:
    """Return a line for each dead link, and for each thing that a page fetches from another host.

    Args:
        site: the folder of the built site.
        base: path of the site on its host, such as `/evenrank/`, with which absolute links begin.
    """
    pages = {path.resolve(): _parse(path) for path in sorted(site.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        for target, is_fetched in page.links:
            if (problem := _problem(target, is_fetched, path, pages, site, base)) is not None:
                problems.append(f"{where}: {target}: {problem}")
    return problems


def _parse(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text())
    return page


def _problem(target: str, is_fetched: bool, path: Path, pages: dict[Path, _Page], site: Path, base: str) -> str | None:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return "fetched from another host" if is_fetched and parts.scheme != "data" else None
    link = unquote(parts.path)
    if link.startswith("/") and not link.startswith(base):
        return f"leaves the site, which is at {base}"
    file = site / link.removeprefix(base) if link.startswith("/") else path.parent / link if link else path
    file = file.resolve()
    if file.is_dir():
        file /= "index.html"
    if not file.is_file():
        return "there is no such file"
    fragment = unquote(parts.fragment)
    if file in pages and fragment not in pages[file].anchors:
        return "there is no such anchor"
    return None


if __name__ == "__main__":
    sys.exit("\n".join(check_site(Path(sys.argv[1]), "/evenrank/")) or None)  # an empty text would be a failure
