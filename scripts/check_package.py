"""Build the sdist and the wheel, and try the wheel in empty environments, from another directory.

    .venv/bin/python scripts/check_package.py

The wheel is built from the sdist, so the sdist has what building needs. In one environment, planning runs without
extras, and preprocessing and reports with theirs. In another, for training, a user's program balances batches without
the other extras, and mypy and Pyright check its types; then the demo, the examples and tests from the sdist run against
the installed wheel. What docs/how-to/install.md says to install with PyTorch is resolved, for each tested release of
it.
"""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from evenrank.core.errors import ConfigError
from evenrank.core.optional_imports import check_releases, torch_releases

ROOT = Path(__file__).resolve().parent.parent
TESTED = torch_releases()
DEFAULT = runpy.run_path(str(ROOT / "scripts" / "install.py"))["DEFAULT"]
# The tests of the sdist that run: some of each kind that needs neither processes nor a browser.
TESTS = ("tests/core", "tests/datasets", "tests/dataloader/collate", "tests/dataloader/balance/partition")
TEST_TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "xxhash")
# Examples show how to train with them.
TRAINERS = ("accelerate", "lightning", "transformers")
# Not needed for training.
NOT_FOR_TRAINING = ("polars", "matplotlib")

# Of the sdist: trains, and its types must be clean from the wheel.
USER_PROGRAM = "tests/typing/user_program.py"

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command in a clean environment and return its output; exit with it if the command fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    shown = " ".join(str(part) for part in command)[:100].split("\n")[0]
    if done.returncode != 0:
        sys.exit(f"package: {shown} failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    last_line = (done.stdout.strip().splitlines() or [""])[-1]
    print(f"package: {Path(shown.split()[0]).name} {shown.partition(' ')[2]}: {last_line}", flush=True)
    return done.stdout


def check_missing(evenrank: Path, *arguments: str, extra: str, cwd: Path) -> None:
    """Exit unless a command fails with one line that names the extra to install."""
    done = subprocess.run([evenrank, *arguments], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode != 2 or done.stderr.count("\n") != 1 or f"pip install 'evenrank[{extra}]'" not in done.stderr:
        sys.exit(f"package: evenrank {arguments[0]} without its extra: exit code {done.returncode}, {done.stderr}")
    print(f"package: evenrank {arguments[0]} without its extra: {done.stderr.strip()}", flush=True)


def check_absent(python: Path, packages: tuple[str, ...], *, cwd: Path) -> None:
    """Exit if one of these packages can be imported."""
    code = f"from importlib.util import find_spec; print(*filter(find_spec, {packages!r}))"
    if found := run(python, "-c", code, cwd=cwd).strip():
        sys.exit(f"package: {found} is installed, which only other extras need")


def installed(python: Path, package: str, *, cwd: Path) -> str:
    """Return the version of an installed package."""
    return run(python, "-c", f"from importlib.metadata import version; print(version({package!r}))", cwd=cwd).strip()


def check_sdist(sdist: Path, folder: Path) -> Path:
    """Unpack the sdist and return its folder, after checking that it has what is needed to build and test."""
    shutil.unpack_archive(sdist, folder)  # in any Python 3.11; a `filter` is known since 3.11.4
    (unpacked,) = folder.iterdir()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    needed = [name for name in tracked if not name.startswith((".", "typings/"))]
    if missing := [name for name in needed if not (unpacked / name).is_file()]:
        sys.exit(f"package: the sdist lacks {', '.join(missing)}; list them in MANIFEST.in")
    return unpacked


def check_documented_installs(wheel: Path) -> None:
    """Resolve what docs/how-to/install.md installs with PyTorch; exit unless its releases were tested together."""
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    lines = re.findall(r'pip install "(?:evenrank|\.)(\[(?:train|torch)[^`\n]*)', page)
    varied = [line.replace(DEFAULT, extra) for extra in TESTED for line in lines]
    if not {f'[{extra}]"' for extra in TESTED} <= {*varied}:
        sys.exit(f"package: docs/how-to/install.md does not install the extra {DEFAULT}")
    for line in dict.fromkeys(varied):
        extra, *words = shlex.split(f'"{line}')
        requirements, options = [f"evenrank{extra} @ {wheel.as_uri()}"], ["--python-platform", "x86_64-manylinux_2_28"]
        for word in words:
            if word.endswith(".txt"):  # at an address
                options.append(str(ROOT / "constraints" / word.rpartition("/")[2]))
            elif word.startswith("--"):
                options.append(word)
            else:
                requirements.append(f"fbgemm-gpu @ {(ROOT / word).as_uri()}" if word.startswith("./") else word)
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", *options, "-"]
        text = "\n".join(requirements)
        done = subprocess.run(command, input=text, env=ENVIRONMENT, capture_output=True, text=True)
        found = dict(re.findall(r"^(torch|fbgemm-gpu(?:-cpu)?|torchrec)==(\S+)$", done.stdout, re.M))
        try:
            check_releases(found)
        except ConfigError as error:
            sys.exit(f'package: pip install "evenrank{line}: {error}')
        if len(found) != 3 or any({*found.values()} != {*TESTED[extra]} for extra in TESTED if extra in line):
            sys.exit(f'package: pip install "evenrank{line} resolves to {found} {done.stderr}')
        print(f'package: pip install "evenrank{line} resolves to {found}', flush=True)


def try_commands(wheel: Path, folder: Path, *, work: Path) -> None:
    """Run the commands that need no PyTorch, first without extras; writes the dataset `data`."""
    venv.create(folder, with_pip=True)
    python, evenrank = folder / "bin" / "python", folder / "bin" / "evenrank"
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=work)
    check_absent(python, (*NOT_FOR_TRAINING, "pooch", "requests", "tqdm", "jinja2", "torch"), cwd=work)
    run(evenrank, "--version", cwd=work)
    run(python, "-m", "evenrank", "--version", cwd=work)
    run(evenrank, "simulate", "zipf", "--ranks", "8", "--steps", "2", "--batch-size", "4", cwd=work)
    check_missing(evenrank, "preprocess", "--dataset", "synthetic", extra="preprocess", cwd=work)

    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[preprocess,reports]", cwd=work)
    run(evenrank, "preprocess", "--dataset", "synthetic", "--users", "200", "--out", "data", cwd=work)
    run(evenrank, "inspect", "data", cwd=work)
    run(evenrank, "simulate", "data", "--ranks", "8", "--steps", "2", "--batch-size", "4", cwd=work)


def try_training(wheel: Path, folder: Path, *, work: Path, sdist: Path) -> None:
    """Balance the dataset `data` where only PyTorch and its extra are installed, and run tests of the sdist."""
    venv.create(folder, with_pip=True)
    python, evenrank = folder / "bin" / "python", folder / "bin" / "evenrank"
    # As docs/how-to/install.md says: PyTorch first, whose build is then kept.
    run(python, "-m", "pip", "install", "--quiet", f"torch=={TESTED[DEFAULT].torch}", cwd=work)
    before = installed(python, "torch", cwd=work)
    run(python, ROOT / "scripts" / "install.py", wheel, cwd=work)
    if (after := installed(python, "torch", cwd=work)) != before:
        sys.exit(f"package: installing evenrank replaced torch {before} by {after}")
    run(python, "-m", "pip", "check", cwd=work)
    program = shutil.copy(sdist / USER_PROGRAM, work)  # mypy takes the folder of the sdist for a package
    run(python, program, "data", cwd=work)
    run(sys.executable, "-m", "mypy", "--strict", "--python-executable", python, program, cwd=work)
    run(sys.executable, "-m", "pyright", "--pythonpath", python, program, cwd=work)
    check_absent(python, NOT_FOR_TRAINING, cwd=work)
    check_missing(evenrank, "preprocess", "--dataset", "synthetic", extra="preprocess", cwd=work)

    torchrun = (folder / "bin" / "torchrun", "--nproc_per_node", "2")
    run(*torchrun, "-m", "evenrank", "inspect-balance", "data", "--batch-size", "8", cwd=work)
    run(*torchrun, ROOT / "examples" / "ddp_sasrec.py", "--data", "data", "--steps", "20", cwd=work)

    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[preprocess,reports]", *TEST_TOOLS, *TRAINERS, cwd=work)
    run(evenrank, "demo", cwd=work)
    run(python, "-P", "-m", "pytest", *TESTS, cwd=sdist)
    run(python, "-P", "-m", "pytest", "-m", "examples", "--numprocesses", "auto", "tests/examples", cwd=sdist)


def main() -> None:
    """Build and try."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("dist", "sdist", "work"):
            (folder / name).mkdir()
        work = folder / "work"
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
        (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
        run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=work)
        run(sys.executable, "-m", "check_wheel_contents", wheel, cwd=work)
        unpacked = check_sdist(sdist, folder / "sdist")
        check_documented_installs(wheel)
        try_commands(wheel, folder / "light", work=work)
        try_training(wheel, folder / "training", work=work, sdist=unpacked)


if __name__ == "__main__":
    main()
