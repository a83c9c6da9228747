import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hstu import unfused
from hstu.config import HSTUConfig
from hstu.layer import HSTULayer, pointwise_for
from tests.examples.hstu.exactness import (
    MODES,
    check,
    check_bits,
    check_divided_layers,
    check_whole_layers,
    layer,
)
from tests.examples.hstu.samples import CONFIG, make_sequences, needs_triton
from tests.ranks import RankPool

ROOT = Path(__file__).parents[3]
EACH_MODE = pytest.mark.parametrize("mode", MODES)


@needs_triton
@pytest.mark.parametrize(
    "program",
    [
        ["interpreted.py"],
        ["-P", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "interpreted_ranks.py"],
    ],
    ids=["whole layers", "heads divided between ranks"],
)
def test_interpreted_kernels_and_layers_are_as_exact_as_torchs_operations(program: list[str]) -> None:
    """In other processes, since Triton's interpreter is chosen before kernels are loaded."""
    path = os.pathsep.join(sys.path)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *program[:-1], str(Path(__file__).with_name(program[-1]))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_on_cuda_kernels_are_chosen_unless_they_are_switched_off_or_the_dtype_is_float64(device: str) -> None:
    tokens = torch.zeros(1, 8, device=device)
    is_unfused = [pointwise_for(one, fused=True) is unfused for one in (tokens, tokens.bfloat16())]
    assert is_unfused == [device == "cpu"] * 2
    assert pointwise_for(tokens, fused=False) is pointwise_for(tokens.double(), fused=True) is unfused


@pytest.mark.gpu
@EACH_MODE
@pytest.mark.parametrize("lengths", [(0, 0, 0), (1, 0, 0), (4, 0, 34), (3000, 0, 700)])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 256])
def test_a_layer_is_as_exact_as_torch_and_recomputes_bits(mode: str, lengths: tuple[int, ...], head_dim: int) -> None:
    shape: dict[str, Any] = {"head_dim": head_dim, "lengths": lengths, "device": "cuda"}
    mine, again, reference = (
        layer(mode=mode, fused_norms=fused, recompute=recompute, **shape)
        for fused, recompute in ((True, False), (True, True), (False, False))
    )
    check(mine, reference, layer(mode=None, fused_norms=False, **shape), MODES[mode])
    check_bits(again, mine)


@pytest.mark.gpu
@EACH_MODE
def test_layers_as_a_whole_have_the_bits_of_layers_by_parts(mode: str) -> None:
    check_whole_layers(mode=mode, device="cuda", heads=4)


def _check_divided(rank: int, world_size: int, mode: str) -> None:
    torch.cuda.set_device(rank)
    dist.new_group(backend="nccl")
    check_divided_layers(mode=mode, mesh=init_device_mesh("cuda", (world_size,)))


@pytest.mark.multi_gpu
@EACH_MODE
def test_layers_whose_heads_are_divided_are_as_exact_as_whole_ones(mode: str) -> None:
    pool = RankPool()
    try:
        pool.run(2, _check_divided, mode)
    finally:
        pool.stop()


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["as a whole", "by parts"])
def test_with_recompute_norm_and_activations_are_not_kept(dropout: float) -> None:
    sequences = make_sequences([1000], [0], [0], device="cuda")
    tokens, update = torch.randn(2, 1000, 128, device="cuda", requires_grad=True).unbind()
    kept = []
    for recompute in (False, True):
        shape = HSTUConfig(max_length=1000, hidden=128, heads=2, head_dim=64, dropout=dropout, recompute=recompute)
        module = HSTULayer(shape).cuda()
        module(tokens, update, sequences)  # allocates workspaces
        before = torch.cuda.memory_allocated()
        results = module(tokens, update, sequences)
        kept.append(torch.cuda.memory_allocated() - before)
        del results
    # float32 of LayerNorm's output and of V, Q and K; the gate keeps U as it was, which is kept in any case.
    assert kept[0] - kept[1] >= 1000 * (128 + 3 * 128) * 4


def _change(layer: HSTULayer, change: str) -> None:
    match change:
        case "watched":
            layer.attention.register_forward_hook(lambda *_: None)
        case "gradients watched":
            layer.output.register_full_backward_hook(lambda *_: None)
        case "another output":
            layer.output = nn.Sequential(layer.output)  # type: ignore[assignment]
        case "padded":
            layer.attention.name = "padded"
        case "unfused":
            layer.fused_norms = False
        case "dropout" | "dropout that is off":
            layer.dropout.p = 0.1
            layer.train(change == "dropout")


@pytest.mark.parametrize("other", ["dropout", "watched", "gradients watched", "another output"])
def test_a_layer_that_computes_something_else_or_is_watched_is_not_plain(other: str) -> None:
    layer = HSTULayer(CONFIG)
    for change, is_plain in (("nothing", True), ("dropout that is off", True), (other, False)):
        _change(layer, change)
        assert layer.is_plain() == is_plain


@pytest.mark.gpu
@pytest.mark.parametrize("change", ["nothing", "watched", "dropout", "padded", "unfused"])
def test_plain_layers_are_computed_as_a_whole_if_there_are_kernels(change: str) -> None:
    layer = HSTULayer(replace(CONFIG, hidden=64, heads=1, head_dim=64, attention="triton")).cuda()
    _change(layer, change)
    tokens = torch.randn(5, 64, device="cuda")
    _, update = layer(tokens, tokens, make_sequences([5], [0], [0], device="cuda"))
    assert (type(update.grad_fn).__name__ == "_LayerBackward") == (change == "nothing")
