import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_site.py"
HOME = '<h1 id="top">Home</h1><a href="guide/">guide</a><a href="guide/#setup">set-up</a><a href="#top">top</a>'
HOME += '<link rel="canonical" href="https://example.org/"><a href="/evenrank/guide/#setup">absolute</a>'
GUIDE = '<h2 id="setup">Set-up</h2><a href="..">home</a><img src="../plot.png"><a href="https://example.org/x">out</a>'
PROBLEMS = {
    '<a href="gide/">': "gide/: there is no such file",
    '<a href="guide/#set-up">': "guide/#set-up: there is no such anchor",
    '<a href="/guide/">': "/guide/: leaves the site, which is at /evenrank/",
    '<script src="https://cdn.example.org/a.js">': "https://cdn.example.org/a.js: fetched from another host",
}


def test_each_problem_is_a_line_and_makes_the_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "guide").mkdir()
    (tmp_path / "guide" / "index.html").write_text(GUIDE)
    (tmp_path / "plot.png").touch()
    for added, problems in (("", []), ("".join(PROBLEMS), sorted(PROBLEMS.values()))):
        (tmp_path / "index.html").write_text(HOME + added)
        run = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True)
        assert run.returncode == bool(problems)
        assert sorted(run.stderr.splitlines()) == [f"index.html: {problem}" for problem in problems]
