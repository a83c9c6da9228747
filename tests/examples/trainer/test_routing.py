import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingConfig

import hstu.embeddings
from evenrank.core.errors import EvenrankError
from evenrank.datasets.distributions import Uniform
from evenrank.preprocess import PreprocessConfig, SyntheticConfig, log_config, preprocess
from hstu.embeddings import fill_rows
from tests.examples.trainer.jobs import Trained, check_failures, log_lines, run, settings, together
from tests.ranks import RankPool
from trainer.checkpoints import check_files, complete_checkpoints
from trainer.routing import make_key_maps, remap_job

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "remap.py"
SHARDED = {"embeddings": "sharded", "min_sharded_rows": 200, "user_id": True, "learning_rate": 0.01, "epochs": 9}
OTHER_RANKS = 1e-4  # gradients are added in another order


def _job(out: Path, data: Path, ranks: int, **options: Any) -> dict[str, Any]:
    """Return the options of a job whose steps have 12 samples on any number of ranks."""
    return settings(out, data, batch_size=12 // ranks, **{**SHARDED, **options})


def _run_routed(rank: int, world_size: int, options: dict[str, Any]) -> Trained:
    """Run a job on this rank; whatever its routing, an item has the same initial values."""

    def fill(rows: Tensor, table: EmbeddingConfig, *, first_row: int, seed: int) -> None:
        values = torch.empty(table.num_embeddings, table.embedding_dim)
        fill_rows(values, table, first_row=0, seed=seed)
        key_maps = make_key_maps({table.name: table.num_embeddings}, options["routing"], world_size)
        keys = torch.arange(table.num_embeddings)
        whole = torch.zeros_like(values)
        whole[key_maps[table.name](keys) if key_maps else keys] = values
        with torch.no_grad():
            rows.copy_(whole[first_row : first_row + len(rows)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hstu.embeddings, "fill_rows", fill)
        return run(rank, world_size, options)


def test_only_a_remapped_job_goes_on_with_equal_losses(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    _, expected = together(ranks.run(2, run, _job(tmp_path / "whole", small_dataset, 2, max_steps=8)))

    def check(out: str, num_ranks: int, routing: str, first: int, last: int) -> None:
        options = _job(tmp_path / out, small_dataset, num_ranks, routing=routing, max_steps=last)
        _, losses = together(ranks.run(num_ranks, _run_routed, options))
        assert list(losses) == list(range(first, last + 1))
        assert losses == pytest.approx({step: expected[step] for step in losses}, rel=OTHER_RANKS)

    check("hashed", 2, "hash_roundrobin", 1, 3)
    check("hashed", 1, "hash_roundrobin", 4, 5)  # does not depend on the number of ranks
    new = remap_job(tmp_path / "hashed", tmp_path / "on 3", routing="roundrobin", ranks=3)
    assert new == tmp_path / "on 3" / "checkpoints" / "step-00000005"
    check("on 3", 3, "roundrobin", 6, 6)
    options = _job(tmp_path / "on 3", small_dataset, 2, routing="roundrobin", max_steps=9)
    stored = "stores item_id with routing roundrobin (num_embeddings "
    remedy = "for a job of this trainer: scripts/remap.py"
    uses = ", world_size 3), but this job uses roundrobin"
    check_failures(ranks.try_run(2, run, options), stored, uses, remedy)
    remap_job(tmp_path / "on 3", tmp_path / "stock", routing="continuous")
    check("stock", 2, "continuous", 7, 8)
    remapped, evaluation = (log_lines(tmp_path / out, "eval")[0] for out in ("stock", "whole"))
    assert remapped == pytest.approx(evaluation, abs=1e-3)


def test_features_that_cannot_name_modules(ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of older datasets may have dots, and modules have an attribute `type`."""
    monkeypatch.setattr(log_config, "check_new_names", lambda names: None)
    features = {name: Uniform(low=1, high=200) for name in ("user.age", "type", "type-")}
    config = SyntheticConfig(num_users=100, lengths=Uniform(low=5, high=20), contextual=features)
    data = tmp_path / "data"
    preprocess(PreprocessConfig(dataset="synthetic", out=data, synthetic=config))

    def losses_of(out: str, max_steps: int, routing: str = "continuous") -> dict[int, float]:
        options = {"min_sharded_rows": 150, "max_steps": max_steps, "routing": routing}
        return together(ranks.run(2, run, _job(tmp_path / out, data, 2, **options)))[1]

    expected = losses_of("whole", 4)
    losses_of("first", 2)
    remap_job(tmp_path / "first", tmp_path / "then", routing="roundrobin", ranks=2)
    losses = losses_of("then", 4, "roundrobin")
    assert losses == pytest.approx({step: expected[step] for step in (3, 4)}, rel=OTHER_RANKS)
    (saved,) = (tmp_path / "then").glob("*/step-*4/settings.json")
    assert all(f'"{name}"' in saved.read_text().replace("\\", "") for name in features)


@pytest.fixture(scope="module")
def replicated(ranks: RankPool, small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a job whose tables are not sharded."""
    out = tmp_path_factory.mktemp("replicated")
    ranks.run(1, run, settings(out, small_dataset, max_steps=1))
    shutil.copytree(out / "checkpoints", out / "damaged" / "checkpoints")
    (part,) = (out / "damaged").rglob("__0_0.distcp")
    part.write_bytes(part.read_bytes()[:-1])
    return out


@pytest.mark.parametrize(
    ("out", "target", "options", "message"),
    [
        ("", "new", {"routing": "best"}, "routing must be one of continuous, roundrobin, hash_roundrobin, "),
        ("", "new", {"routing": "roundrobin"}, "depends on the number of ranks; pass the new job's as --r"),
        ("", "new", {"ranks": 2}, "--ranks applies to --routing roundrobin, not to --routing continuous; leave it out"),
        ("missing", "new", {}, "missing has no complete checkpoint; pass the --out"),
        ("", "", {}, "has checkpoints already; choose another folder"),
        ("", "new", {}, "has no sharded tables, so it loads with any number of r"),
        ("damaged", "new", {}, "step-00000001 is damaged (__0_0.distcp is not as it was saved"),
    ],
)
def test_mistakes_are_one_line(replicated: Path, out: str, target: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EvenrankError, match=re.escape(message)) as caught:
        remap_job(replicated / out, replicated / target, **{"routing": "continuous", **options})
    assert "\n" not in str(caught.value)
    assert not (replicated / "new").exists()


def test_the_command_passes_its_arguments_on(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "old"), str(tmp_path / "new"), "--routing", "roundrobin", "--ranks", "3"]
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=280)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {tmp_path / 'old'} has no complete checkpoint; pass the --out of a job that has saved one\n"
    )


@pytest.mark.long
def test_a_copy_that_is_killed_leaves_none_or_a_whole_one(ranks: RankPool, small_dataset: Path, tmp_path: Path) -> None:
    ranks.run(2, run, _job(tmp_path / "old", small_dataset, 2, max_steps=2))
    source, folder = tmp_path / "old" / "checkpoints" / "step-00000002", tmp_path / "new" / "checkpoints"
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    folders = [str(tmp_path / "old"), str(tmp_path / "new")]
    command = [sys.executable, str(SCRIPT), *folders, "--routing", "hash_roundrobin"]
    for seen in ("*.partial", "*.partial/.metadata", "*.partial/settings.json"):
        with subprocess.Popen(command) as copying:
            while copying.poll() is None and not list(folder.glob(seen)):
                time.sleep(0.0005)
            copying.kill()
        for complete in complete_checkpoints(folder):  # it was faster
            check_files(complete)
            shutil.rmtree(complete)
        assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    subprocess.run(command, check=True, timeout=280)
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]  # and nothing of those that were killed
    new = _job(tmp_path / "new", small_dataset, 2, max_steps=3, routing="hash_roundrobin")
    assert [list(part.samples) for part in ranks.run(2, run, new)] == [[3], [3]]
