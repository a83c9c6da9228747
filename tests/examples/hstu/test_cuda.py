"""On GPUs: no synchronization in a step, and tensor parallelism over NCCL."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchrec import EmbeddingCollection

from hstu.config import HSTUConfig, tables
from hstu.layer import tensor_parallel
from tests.examples.hstu.samples import CONFIG, SIZES, make_batch, make_ranking, make_retrieval, random_samples
from tests.ranks import RankPool

PADDED = replace(CONFIG, attention="padded")
JAGGED = replace(CONFIG, attention="triton", head_dim=64)


@pytest.mark.gpu
def test_automatic_attention_has_kernels_or_pads() -> None:
    for head_dim, expected in ((CONFIG.head_dim, "padded"), (64, "triton")):
        batch = make_batch(random_samples(4)).to("cuda")
        logits = []
        for attention in ("auto", expected):
            torch.manual_seed(0)
            model = make_ranking(replace(CONFIG, attention=attention, head_dim=head_dim))
            model.embeddings = EmbeddingCollection(tables=tables(SIZES, CONFIG))
            logits.append(model.float().cuda()(batch)[1])
        assert torch.equal(*logits)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("attention", [PADDED, JAGGED], ids=["padded", "triton"])
@pytest.mark.parametrize("task", ["ranking", "retrieval"])
def test_a_step_does_not_synchronize(task: str, attention: HSTUConfig, recompute: bool) -> None:
    config = replace(attention, recompute=recompute, dropout=0.1)
    retrieval = task == "retrieval"
    model: nn.Module = make_retrieval(config) if retrieval else make_ranking(config)
    model.embeddings = EmbeddingCollection(tables=tables(SIZES, config, retrieval=retrieval))
    model.float().cuda()
    samples = random_samples(8, predict="next" if retrieval else "candidates")
    batch = make_batch(samples, rows=10).to("cuda")
    for mode in ("default", "error"):  # the first step loads libraries
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            model(batch)[0].sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def _run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits and the gradients by parameter, on the CPU."""
    device = next(model.parameters()).device
    loss_sums, logits = model(make_batch(random_samples(6)).to(device))
    loss_sums.sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        gradients[name] = whole.cpu()
    return logits.detach().cpu(), gradients


def _divided(rank: int, world_size: int, config: HSTUConfig, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    assert isinstance(group, dist.ProcessGroup)
    model = make_ranking(config).to("cuda", dtype)
    tensor_parallel(model, DeviceMesh.from_group(group, "cuda"))
    result = _run(model)
    dist.destroy_process_group(group)
    return result


def _error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact.double()).norm())


def _joined(gradients: dict[str, Tensor]) -> Tensor:
    """Return all values: of a parameter with few of them, the error is a matter of luck."""
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_over_nccl_logits_and_gradients_agree_with_those_of_one_rank(world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    logits, gradients = _run(make_ranking(PADDED))
    padded = replace(JAGGED, attention="padded")
    exact_logits, exact_gradients = _run(make_ranking(padded))
    best_logits, best_gradients = _run(make_ranking(padded).to("cuda", torch.float32))
    pool = RankPool()
    try:
        for divided_logits, divided_gradients in pool.run(world_size, _divided, PADDED, torch.float64):
            torch.testing.assert_close(divided_logits, logits, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(divided_gradients, gradients, rtol=1e-10, atol=1e-10)
        for divided_logits, divided_gradients in pool.run(world_size, _divided, JAGGED, torch.float32):
            assert _error(divided_logits, exact_logits) <= 2 * _error(best_logits, exact_logits)
            mine, best, exact = (
                _joined(gradients) for gradients in (divided_gradients, best_gradients, exact_gradients)
            )
            assert _error(mine, exact) <= 5 * _error(best, exact)
    finally:
        pool.stop()
