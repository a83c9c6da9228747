"""Run the programs of tutorials as their pages say, and write what they print into the pages.

    python scripts/tutorial_outputs.py docs/tutorials/ddp-sasrec.md docs/tutorials/torchrec-dmp.md

Outputs are the blocks whose title begins with "Output"; the first one gets what the first torchrun of the page prints,
and so on. Other commands run as well, except pip's. Needs the extras of the programs, and minutes for each page.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_OUTPUT = re.compile(r'(^``` \{ \.text title="Output[^"]*" \}\n)(.*?)(^```$)', re.M | re.S)


def outputs(page: str, folder: Path) -> list[str]:
    """Return what each program of a page prints, run in this folder."""
    (folder / "examples").symlink_to(ROOT / "examples")
    for name, code in re.findall(r"`(\w+\.py)`[^`]*```python\n(.*?)^```$", page, re.M | re.S):
        (folder / name).write_text(code)
    commands = "".join(re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S)).replace("\\\n", " ")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    printed = []
    for command in commands.splitlines():
        words = shlex.split(command, comments=True)
        if words and words[0] != "pip":
            run = subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            printed += [run.stdout] if words[0] == "torchrun" else []
    return printed


def renew(path: Path) -> None:
    """Replace the outputs on a page."""
    page = path.read_text()
    with tempfile.TemporaryDirectory() as folder:
        printed = iter(outputs(page, Path(folder)))
    path.write_text(_OUTPUT.sub(lambda shown: f"{shown[1]}{next(printed)}{shown[3]}", page))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        renew(Path(argument))
