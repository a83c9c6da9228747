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
const measure = (selector, width) => [...document.querySelectorAll(selector)].map(width);
parent.document.title = JSON.stringify([
  [innerWidth, root.scrollWidth - root.clientWidth],
  getComputedStyle(document.querySelector(".columns")).gridTemplateColumns.split(" ").length,
  Math.min(...measure("figure svg", (svg) => svg.getBoundingClientRect().width)),
  Math.max(...measure(".scroll", (table) => table.scrollWidth - table.clientWidth)),
  measure("section", (section) => section.id),
]);
</script>"""


def text_of(html: str) -> str:
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html)))


def external_parts(html: str) -> list[Any]:
    """Return what would run or load something: scripts, style sheets, images, frames, links."""
    return re.findall(r"<script|<link|<img|<iframe|@import|(?:src|href)=.[^#]|url\([^#]", html)


def measured_in_browser(folder: Path, html: str, *, width: int) -> list[Any]:
    """Return what `MEASURE` finds in a frame of this width; the page must print no errors."""
    frame, log = folder / "frame.html", folder / "chromium.log"
    frame.write_text(
        "<!DOCTYPE html><title></title><script>console.log('the frame')</script><iframe frameborder=0 "
        f'style="width: {width}px" srcdoc="{escape(html.replace("</body>", f"{MEASURE}</body>"))}">'
    )
    assert CHROMIUM
    quiet = ["disable-gpu", "no-first-run", "disable-background-networking", "disable-component-update", "disable-sync"]
    switches = [f"--{name}" for name in ("headless", "no-sandbox", *quiet, "dump-dom", "enable-logging")]
    command = [CHROMIUM, *switches, f"--user-data-dir={folder / 'profile'}", f"--log-file={log}", frame.as_uri()]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=250, check=True, env={**os.environ, "HOME": str(folder)}
    )
    # Without the line of the frame, the log would have no messages of the console at all.
    assert re.findall(r"CONSOLE.*?\] (.*), source", log.read_text(errors="replace")) == ['"the frame"']
    return list(json.loads(unescape(run.stdout.partition("<title>")[2].partition("</title>")[0])))
