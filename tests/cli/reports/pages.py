"""What tests of HTML pages share: reading them as text, and showing them in a headless Chromium."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

# Runs inside the page, which is in a frame: a frame can be as narrow as a phone, a window cannot.
MEASURE = """<script>
const root = document.documentElement;
const widths = [...document.querySelectorAll("figure svg")].map((svg) => svg.getBoundingClientRect().width);
parent.document.title = JSON.stringify({
  width: innerWidth,
  overflow: root.scrollWidth - root.clientWidth,
  columns: getComputedStyle(document.querySelector(".columns")).gridTemplateColumns.split(" ").length,
  narrowest_plot: Math.min(...widths),
  sections: [...document.querySelectorAll("section")].map((section) => section.id),
});
</script>"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A page as a browser shows it; lengths are in CSS pixels."""

    width: int
    overflow: int
    columns: int
    narrowest_plot: float
    sections: list[str]


def text_of(html: str) -> str:
    """Return the text of a page, with single spaces."""
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html)))


def sections_of(html: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', html)


def external_parts(html: str) -> list[Any]:
    """Return what would run or load something: scripts, style sheets, images, frames, links."""
    return re.findall(r"<script|<link|<img|<iframe|@import|(?:src|href)=.[^#]|url\([^#]", html)


def show_in_frame(folder: Path, html: str, *, width: int) -> tuple[Layout, list[str]]:
    """Show a page in a frame of this width; return its layout and what it writes to the console."""
    frame, log = folder / "frame.html", folder / "chromium.log"
    page = escape(html.replace("</body>", f"{MEASURE}</body>"))
    frame.write_text(
        "<!DOCTYPE html><title></title><script>console.log('the frame')</script>"
        f'<iframe style="width: {width}px" frameborder=0 srcdoc="{page}">'
    )
    dom = _chromium(folder, frame, "--dump-dom", "--enable-logging", f"--log-file={log}")
    title = dom[dom.index("<title>") + len("<title>") : dom.index("</title>")]
    frame_line, *page_lines = re.findall(r"CONSOLE.*?\] (.*), source", log.read_text(errors="replace"))
    assert frame_line == '"the frame"'  # else the log has no console messages at all
    return Layout(**json.loads(unescape(title))), page_lines


def screenshot(folder: Path, html: str, *, width: int) -> bytes:
    """Return a PNG of the top of a page."""
    page, picture = folder / "shown.html", folder / "shown.png"
    page.write_text(html, encoding="utf-8")
    _chromium(folder, page, f"--window-size={width},844", f"--screenshot={picture}")
    return picture.read_bytes()


def check_browser_shows(folder: Path, html: str, *, width: int, columns: int, sections: list[str]) -> None:
    """Check that a browser of this width shows all sections, nothing wider than itself, and no errors."""
    layout, console = show_in_frame(folder, html, width=width)
    assert console == []
    assert (layout.width, layout.overflow, layout.columns) == (width, 0, columns)
    assert layout.narrowest_plot > 250
    assert layout.sections == sections
    picture = screenshot(folder, html, width=width)
    assert int.from_bytes(picture[16:20], "big") == width  # in the header of a PNG
    assert len(picture) > 10_000  # a page of one colour is smaller


def _chromium(folder: Path, page: Path, *options: str) -> str:
    assert CHROMIUM
    quiet = ["disable-gpu", "no-first-run", "disable-background-networking", "disable-component-update", "disable-sync"]
    switches = [f"--{name}" for name in ("headless", "no-sandbox", *quiet)]
    command = [CHROMIUM, *switches, f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()]
    environment = {**os.environ, "HOME": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=True, env=environment).stdout
