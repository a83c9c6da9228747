"""Build the sdist and the wheel, and try the wheel in an empty environment, from another directory.

    .venv/bin/python scripts/check_package.py

The wheel is built from the sdist, so the sdist has what building needs. Without torch, the commands run; with torch, a
small program balances batches; and tests from the sdist run against the installed wheel.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The tests of the sdist that run: some of each kind that needs neither processes nor a browser.
TESTS = ("tests/core", "tests/datasets", "tests/dataloader/collate", "tests/dataloader/balance/partition")
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")

# Prints how many samples it has trained.
PROGRAM = """
import evenrank
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import Balancer, HSTUCost
from evenrank.datasets import ConfigError
from evenrank.training import scale_loss

loader = build_loader("data", LoaderConfig(batch_size=8, max_num_candidates=1), rank=0, world_size=1)
with Balancer(loader, cost=HSTUCost(hidden=64, heads=1, head_dim=64, layers=1, interleave_actions=True)) as balancer:
    trained = 0
    for batch in balancer:
        scale_loss(batch.features["item_id"].values().float().sum(), batch, dp_size=1)
        trained += batch.num_real
assert trained == loader.num_samples > 0, (trained, loader.num_samples)
try:
    build_loader("data", LoaderConfig(batch_size=0), rank=0, world_size=1)
except ConfigError as error:
    print(f"trained {trained} samples with evenrank {evenrank.__version__}; an error reads: {error}")
"""


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command in a clean environment; exit with its output if it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    shown = " ".join(str(part) for part in command)[:100].split("\n")[0]
    if done.returncode != 0:
        sys.exit(f"package: {shown} failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    last_line = (done.stdout.strip().splitlines() or [""])[-1]
    print(f"package: {Path(shown.split()[0]).name} {shown.partition(' ')[2]}: {last_line}", flush=True)


def check_sdist(sdist: Path, folder: Path) -> Path:
    """Unpack the sdist and return its folder, after checking that it has what is needed to build and test."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    needed = [name for name in tracked if not name.startswith((".", "typings/"))]
    if missing := [name for name in needed if not (unpacked / name).is_file()]:
        sys.exit(f"package: the sdist lacks {', '.join(missing)}; list them in MANIFEST.in")
    return unpacked


def main() -> None:
    """Build and try."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("dist", "sdist", "work"):
            (folder / name).mkdir()
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
        (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
        unpacked = check_sdist(sdist, folder / "sdist")

        venv.create(folder / "env", with_pip=True)
        bin_folder, work = folder / "env" / "bin", folder / "work"
        run(bin_folder / "python", "-m", "pip", "install", "--quiet", wheel, cwd=work)
        evenrank = bin_folder / "evenrank"
        run(evenrank, "--version", cwd=work)
        run(evenrank, "preprocess", "--dataset", "synthetic", "--users", "200", "--out", "data", cwd=work)
        run(evenrank, "inspect", "data", cwd=work)
        run(evenrank, "simulate", "data", "--ranks", "8", "--steps", "2", "--batch-size", "4", cwd=work)

        run(bin_folder / "python", ROOT / "scripts" / "install.py", wheel, cwd=work)
        run(bin_folder / "python", "-c", PROGRAM, cwd=work)
        run(bin_folder / "python", "-m", "pip", "install", "--quiet", *TEST_TOOLS, cwd=work)
        run(bin_folder / "python", "-m", "pytest", *TESTS, cwd=unpacked)


if __name__ == "__main__":
    main()
