"""The kernels, interpreted on the CPU; and on a GPU what only it shows."""

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader.routing import MODES, Mode, Routing, bucketize, gpu_bucketize, owner_rank
from tests.dataloader.routing.reference import EDGES

FOLDER = Path(__file__).parent
ROUTINGS: dict[str, Routing] = {mode: Routing(mode=mode, num_embeddings=5000) for mode in MODES}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_interpreted_kernels_agree_with_pythons_integers() -> None:
    # In another process, since the interpreter is chosen before kernels load.
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(FOLDER / "interpreted_kernels.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_owners_on_a_gpu_are_those_of_arrays(mode: Mode, dtype: torch.dtype) -> None:
    assert gpu_bucketize.HAS_TRITON
    rng = np.random.default_rng(0)
    words = np.concatenate([rng.integers(-(2**63), 2**63 - 1, 3000), np.arange(1000), EDGES])
    keys = torch.from_numpy(words).to(dtype)
    for world_size in (*range(1, 65), 1000, 2**31, 2**62 + 1):
        expected = torch.from_numpy(owner_rank(keys.numpy(), world_size, mode, 700))
        assert torch.equal(owner_rank(keys.cuda(), world_size, mode, 700).cpu(), expected)
    strided = keys[:4000].view(40, 100).cuda().T
    assert torch.equal(owner_rank(strided, 7, mode, 700), owner_rank(strided.contiguous(), 7, mode, 700))


def _large(rng: np.random.Generator, lengths: np.ndarray) -> KeyedJaggedTensor:
    values = np.where(rng.random(lengths.sum()) < 0.5, 64 * rng.integers(0, 99, lengths.sum()), rng.integers(0, 2**62))
    return KeyedJaggedTensor(keys=list(MODES), values=torch.from_numpy(values), lengths=torch.from_numpy(lengths))


def _check_like_the_cpu(kjt: KeyedJaggedTensor, world_size: int, turns: int) -> KeyedJaggedTensor:
    """Compare the groups, and return the batch on the GPU."""
    expected, permutation = bucketize(kjt, world_size, ROUTINGS)
    on_gpu = kjt.to(torch.device("cuda"))
    for _ in range(turns):
        found, found_permutation = bucketize(on_gpu, world_size, ROUTINGS)
        assert found.values().is_cuda
        assert torch.equal(found.values().cpu(), expected.values())
        assert torch.equal(found.lengths().cpu(), expected.lengths())
        assert torch.equal(found_permutation.cpu(), permutation)
    return on_gpu


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 7, 64, 1000])
@pytest.mark.parametrize("kind", ["short", "long", "one long among short"])
def test_large_batches_are_grouped_as_on_the_cpu_every_time(kind: str, world_size: int) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(*{"short": (0, 4), "long": (500, 4097)}.get(kind, (0, 2)), 3 * 200)
    if kind.startswith("one"):
        lengths[::77] = 4096
    # Threads that read counts too early or too late would not always do so.
    _check_like_the_cpu(_large(rng, lengths), world_size, turns=5)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu_with_routings_that_were_used_before() -> None:
    kjt = _large(np.random.default_rng(0), np.full(3 * 50, 20))
    bucketize(kjt.to(torch.device("cuda")), 8, ROUTINGS)
    owner_rank(torch.ones(1, dtype=torch.int64, device="cuda"), 8, "hash_roundrobin")
    fresh = kjt.to(torch.device("cuda"))
    with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        result, _ = bucketize(fresh, 8, ROUTINGS)
        owner_rank(fresh.values(), 8, "hash_roundrobin")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.values().is_cuda


@pytest.mark.gpu
def test_without_triton_the_cpu_finds_owners_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    kjt = _large(np.random.default_rng(0), np.full(3 * 50, 20))
    monkeypatch.setattr(gpu_bucketize, "HAS_TRITON", False)
    on_gpu = _check_like_the_cpu(kjt, 8, turns=1)
    owners = owner_rank(on_gpu.values(), 8, "hash_roundrobin")
    assert torch.equal(owners.cpu(), owner_rank(kjt.values(), 8, "hash_roundrobin"))
