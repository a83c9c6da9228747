import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "check_site.py"
HOME = '<h1 id="top">Home</h1><a href="guide/">guide</a><a href="guide/#setup">set-up</a><a href="#top">top</a>'
GUIDE = '<h2 id="setup">Set-up</h2><a href="..">home</a><img src="../plot.png"><a href="https://example.org/x">out</a>'


def _run(folder: Path, home: str = HOME, guide: str = GUIDE) -> subprocess.CompletedProcess[str]:
    (folder / "guide").mkdir()
    (folder / "index.html").write_text(home)
    (folder / "guide" / "index.html").write_text(guide)
    (folder / "plot.png").touch()
    return subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True)


def test_a_site_without_dead_links_passes(tmp_path: Path) -> None:
    canonical = '<link rel="canonical" href="https://example.org/">'  # is not fetched
    run = _run(tmp_path, home=HOME + canonical + '<a href="/evenrank/guide/#setup">absolute</a>')
    assert (run.returncode, run.stderr) == (0, "")


PROBLEMS = {
    '<a href="gide/">': "gide/: there is no such file",
    '<a href="guide/#set-up">': "guide/#set-up: there is no such anchor",
    '<a href="/guide/">': "/guide/: leaves the site, which is at /evenrank/",
    '<script src="https://cdn.example.org/a.js">': "https://cdn.example.org/a.js: fetched from another host",
}


def test_each_problem_is_a_line_and_makes_the_exit_code_1(tmp_path: Path) -> None:
    run = _run(tmp_path, home=HOME + "".join(PROBLEMS))
    assert run.returncode == 1
    assert sorted(run.stderr.splitlines()) == sorted(f"index.html: {problem}" for problem in PROBLEMS.values())
