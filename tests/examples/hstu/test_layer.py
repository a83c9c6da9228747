import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evenrank.core.errors import ConfigError
from hstu.config import HSTUConfig
from hstu.layer import NORM_EPS, HSTULayer, tensor_parallel
from tests.examples.hstu.exactness import gradients_by_name, gradients_of, joined
from tests.examples.hstu.samples import CONFIG, make_batch, make_ranking, make_retrieval, make_sequences, random_samples
from tests.ranks import RankPool


def _norm(row: Tensor) -> Tensor:
    return (row - row.mean()) / (row.var(correction=0) + NORM_EPS).sqrt()


def _sees(query: int, key: int, contextual: int, history: int) -> bool:
    if key >= history:
        return query == key
    return query < contextual or key <= query


def _one_by_one(layer: HSTULayer, tokens: Tensor, contextual: int, candidates: int) -> Tensor:
    """Return the output for one sample [tokens, hidden]; the norms have their initial weights."""
    heads, head_dim = CONFIG.heads, CONFIG.head_dim
    weight = layer.uvqk.weight.view(heads, 4, head_dim, CONFIG.hidden)
    bias = layer.uvqk.bias.view(heads, 4, head_dim)
    u, v, q, k = (
        [[silu(weight[head, part] @ _norm(row) + bias[head, part]) for head in range(heads)] for row in tokens]
        for part in range(4)
    )
    rows = []
    for i in range(len(tokens)):
        attended = torch.zeros(heads, head_dim, dtype=tokens.dtype)
        for head in range(heads):
            for j in range(len(tokens)):
                if _sees(i, j, contextual, len(tokens) - candidates):
                    score = q[i][head] @ k[j][head] / math.sqrt(head_dim)
                    attended[head] += silu(score) / CONFIG.max_length * v[j][head]
        gated = _norm(attended.flatten()) * torch.cat(u[i])
        rows.append(tokens[i] + layer.output.weight @ gated + layer.output.bias)
    return torch.stack(rows)


def test_a_layer_is_its_equations() -> None:
    torch.manual_seed(0)
    layer = HSTULayer(CONFIG).double()
    tokens = torch.randn(9, CONFIG.hidden, dtype=torch.float64)
    sequences = make_sequences([6, 0, 3], [2, 0, 0], [2, 0, 1])
    expected = torch.cat([_one_by_one(layer, tokens[:6], 2, 2), _one_by_one(layer, tokens[6:], 0, 1)])
    update = torch.randn_like(tokens)
    torch.testing.assert_close(sum(layer(tokens - update, update, sequences)), expected, rtol=1e-12, atol=1e-12)


def test_dropout_is_before_the_output() -> None:
    layer = HSTULayer(replace(CONFIG, dropout=0.999999)).double()
    tokens = torch.randn(3, CONFIG.hidden, dtype=torch.float64)
    sequences = make_sequences([3], [0], [0])
    stream, update = layer(tokens, torch.zeros_like(tokens), sequences)
    assert torch.equal(stream, tokens)
    torch.testing.assert_close(update, layer.output.bias.expand_as(update))  # nothing but the bias is left
    assert not torch.allclose(layer.eval()(tokens, torch.zeros_like(tokens), sequences)[1], layer.output.bias)


class _Allocations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bytes: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._bytes[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def live_bytes(self, model: nn.Module) -> int:
        """Return how much is still allocated, besides the model's parameters and their gradients."""
        owned = [tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad)]
        storages = {tensor.untyped_storage()._cdata for tensor in owned if tensor is not None}
        noted = [entry for storage, entry in self._bytes.items() if storage not in storages]
        return sum(count for reference, count in noted if not reference.expired())


def _train(config: HSTUConfig, *, autocast: bool) -> tuple[Any, list[Tensor], int]:
    """Return the logits, all gradients, and the bytes kept for the backward pass."""
    model = make_ranking(config)
    if autocast:
        model.float()
    with _Allocations() as allocations:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss_sums, logits = model(make_batch(random_samples(12)))
            kept = allocations.live_bytes(model)
        loss_sums.sum().backward()
        logits = logits.tolist()
        del loss_sums
    assert allocations.live_bytes(model) == 0  # what is computed again is freed
    return logits, gradients_of(model), kept


@pytest.mark.parametrize(("autocast", "itemsize"), [(False, 8), (True, 2)])
def test_norms_and_activations_are_not_kept_and_gradients_are_equal_bit_for_bit(autocast: bool, itemsize: int) -> None:
    config = replace(CONFIG, dropout=0.3, layers=3)
    *results, kept = _train(config, autocast=autocast)
    *again, again_kept = _train(replace(config, recompute=True), autocast=autocast)
    torch.testing.assert_close(again, results, rtol=0, atol=0)
    num_tokens = sum(make_batch(random_samples(12)).features.length_per_key())
    width = CONFIG.hidden + 4 * CONFIG.heads * CONFIG.head_dim  # of LayerNorm's output and SiLU's
    assert kept - again_kept >= config.layers * num_tokens * width * itemsize


def test_a_graph_can_be_used_twice() -> None:
    model = make_ranking(replace(CONFIG, recompute=True))
    loss = model(make_batch(random_samples(4)))[0].sum()
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def _run(
    model: nn.Module, samples: list[Any], group: dist.ProcessGroup | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    loss_sums, logits = model(make_batch(samples).to(next(model.parameters()).device))
    loss_sums.sum().backward()
    gradients = joined(model, gradients_by_name(dict(model.named_parameters())), group)
    return logits.detach().cpu(), {name: gradient.cpu() for name, gradient in gradients.items()}


def _divided(rank: int, world_size: int, config: HSTUConfig, dtype: torch.dtype, device: str = "cpu") -> Any:
    model = make_ranking(config).to(dtype)
    if rank:  # the replicated parameters of the first rank count
        for parameter in model.parameters():
            parameter.data.mul_(2)
    if device == "cuda":
        torch.cuda.set_device(rank)
        dist.new_group(backend="nccl")
    mesh = init_device_mesh(device, (world_size,))
    tensor_parallel(model.to(device), mesh)
    return _run(model, random_samples(6), mesh.get_group())


@pytest.mark.parametrize(("num_ranks", "recompute"), [(2, False), (4, True)])
def test_logits_and_gradients_agree_with_those_of_one_rank(ranks: RankPool, num_ranks: int, recompute: bool) -> None:
    config = replace(CONFIG, recompute=recompute)
    expected = _run(make_ranking(config), random_samples(6))
    for divided in ranks.run(num_ranks, _divided, config, torch.float64):
        torch.testing.assert_close(divided, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("config", "dtype", "tolerance"),
    [(CONFIG, torch.float64, 1e-10), (replace(CONFIG, attention="triton", head_dim=64), torch.float32, 1e-3)],
)
def test_over_nccl_results_are_those_of_one_rank(config: HSTUConfig, dtype: torch.dtype, tolerance: float) -> None:
    expected = _run(make_ranking(replace(config, attention="padded")), random_samples(6))
    pool = RankPool()
    try:
        for result in pool.run(2, _divided, config, dtype, "cuda"):
            torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance, check_dtype=False)
    finally:
        pool.stop()


def _places(rank: int, world_size: int) -> list[int]:
    mesh = init_device_mesh("cpu", (world_size,))
    model = make_retrieval()
    tensor_parallel(model.dense, mesh)
    with pytest.raises(ConfigError, match="3 heads cannot be divided among 2 ranks; use a divisor"):
        tensor_parallel(make_ranking(replace(CONFIG, heads=3)), mesh)
    return model.places_of_targets(make_batch(random_samples(6, predict="next"))).tolist()


def test_places_are_those_of_one_rank_and_heads_that_cannot_be_divided_are_refused(ranks: RankPool) -> None:
    expected = make_retrieval().places_of_targets(make_batch(random_samples(6, predict="next"))).tolist()
    assert ranks.run(2, _places) == [expected] * 2
