"""Run the first stage of a Dockerfile without a container engine: its commands, in a temporary folder as the root.

    .venv/bin/python scripts/try_dockerfile.py docker/cpu.Dockerfile [ARGUMENT=VALUE...]

It shows that the commands install what they should, not that they do so on the base image. Paths below /opt and /src
are moved into the temporary folder.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def first_stage(text: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions after the first FROM, until the next one, as ("RUN", "command")."""
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    instructions = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    num_stages = 0
    for instruction in filter(None, map(str.strip, instructions)):
        name, _, value = instruction.partition(" ")
        num_stages += name == "FROM"
        if num_stages == 1 and name != "FROM":
            yield name, value


def run_stage(text: str, *, context: Path, root: Path, arguments: Mapping[str, str]) -> None:
    """Run the first stage of a Dockerfile.

    Args:
        text: of the Dockerfile.
        context: what COPY copies from.
        root: what stands for the root of the image's file system.
        arguments: values of ARG, in place of the defaults.

    Raises:
        subprocess.CalledProcessError: a command failed.
        ValueError: the stage has an instruction other than ARG, ENV, WORKDIR, COPY and RUN.
    """
    environment = dict(os.environ)
    folder = root
    for name, raw in first_stage(text):
        value = re.sub(r"(?<![\w.])/(?=opt/|src\b)", f"{root}/", raw)
        if name in ("ARG", "ENV"):
            for word in shlex.split(value):
                variable, _, default = word.partition("=")
                environment[variable] = arguments.get(variable, default) if name == "ARG" else default
        elif name == "WORKDIR":
            folder = Path(value)
            folder.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *sources, target = value.split()
            for source in sources:
                _copy(context / source, folder / target)
        elif name == "RUN":
            print(f"try_dockerfile: {raw}", flush=True)
            subprocess.run(["sh", "-ec", value], cwd=folder, env=environment, check=True)
        else:
            raise ValueError(
                f"{name} is not an instruction that this script runs; expected ARG, ENV, WORKDIR, COPY, RUN"
            )


def _copy(source: Path, target: Path) -> None:
    if source.is_file():
        shutil.copy(source, target)
        return
    tracked = subprocess.run(["git", "ls-files"], cwd=source, check=True, capture_output=True, text=True).stdout
    for name in tracked.splitlines():
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target / name)


def main() -> None:
    """Run the stage, and show what it installed."""
    if len(sys.argv) < 2:
        sys.exit("try_dockerfile: pass a Dockerfile, such as docker/cpu.Dockerfile")
    arguments = dict(argument.partition("=")[::2] for argument in sys.argv[2:])
    with tempfile.TemporaryDirectory() as folder:
        run_stage(Path(sys.argv[1]).read_text(), context=ROOT, root=Path(folder), arguments=arguments)
        command = [f"{folder}/opt/evenrank/bin/evenrank", "--version"]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
