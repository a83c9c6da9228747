"""What tests of HTML pages share: reading them as text, and showing them in a headless Chromium."""

import json
import os
import re
import shutil
import subprocess
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
parent.document.title = JSON.stringify([
  [innerWidth, root.scrollWidth - root.clientWidth],
  getComputedStyle(document.querySelector(".columns")).gridTemplateColumns.split(" ").length,
  Math.min(...widths),
  [...document.querySelectorAll("section")].map((section) => section.id),
]);
</script>"""


def text_of(html: str) -> str:
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html)))


def sections_of(html: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', html)


def external_parts(html: str) -> list[Any]:
    """Return what would run or load something: scripts, style sheets, images, frames, links."""
    return re.findall(r"<script|<link|<img|<iframe|@import|(?:src|href)=.[^#]|url\([^#]", html)


def check_browser_shows(folder: Path, html: str, *, width: int, columns: int, sections: list[str]) -> None:
    """Check that a browser of this width shows all sections, nothing wider than itself, and no errors."""
    frame, log, page, picture = (folder / name for name in ("frame.html", "chromium.log", "page.html", "page.png"))
    frame.write_text(
        "<!DOCTYPE html><title></title><script>console.log('the frame')</script><iframe frameborder=0 "
        f'style="width: {width}px" srcdoc="{escape(html.replace("</body>", f"{MEASURE}</body>"))}">'
    )
    dom = _chromium(folder, frame, "--dump-dom", "--enable-logging", f"--log-file={log}")
    # Without the line of the frame, the log would have no messages of the console at all.
    assert re.findall(r"CONSOLE.*?\] (.*), source", log.read_text(errors="replace")) == ['"the frame"']
    title = dom[dom.index("<title>") + len("<title>") : dom.index("</title>")]
    width_and_overflow, num_columns, narrowest_plot, shown = json.loads(unescape(title))
    assert (width_and_overflow, num_columns, shown) == ([width, 0], columns, sections)
    assert narrowest_plot > 250
    page.write_text(html, encoding="utf-8")
    _chromium(folder, page, f"--window-size={width},844", f"--screenshot={picture}")
    assert int.from_bytes(picture.read_bytes()[16:20], "big") == width  # in the header of a PNG
    assert picture.stat().st_size > 10_000  # a page of one colour is smaller


def _chromium(folder: Path, page: Path, *options: str) -> str:
    assert CHROMIUM
    quiet = ["disable-gpu", "no-first-run", "disable-background-networking", "disable-component-update", "disable-sync"]
    switches = [f"--{name}" for name in ("headless", "no-sandbox", *quiet)]
    command = [CHROMIUM, *switches, f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()]
    environment = {**os.environ, "HOME": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=True, env=environment).stdout
