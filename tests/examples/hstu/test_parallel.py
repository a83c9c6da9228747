"""Tensor parallelism changes no logit and no gradient, alone and beside data parallelism."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.training import scale_loss
from hstu.config import HSTUConfig
from hstu.layer import ShardedLayerNorm, tensor_parallel
from tests.examples.hstu.samples import CONFIG, make_batch, make_ranking, make_retrieval, random_samples
from tests.ranks import RankPool

Result = tuple[Tensor, dict[str, Tensor]]  # logits, gradients by parameter


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = _whole(parameter.grad).clone()
    return gradients


def _run(model: nn.Module, samples: list[Any]) -> Result:
    loss_sums, logits = model(make_batch(samples))
    loss_sums.sum().backward()
    return logits.detach(), _gradients(model)


def _divided(rank: int, world_size: int, config: HSTUConfig, dtype: torch.dtype) -> Result:
    model = make_ranking(config).to(dtype)
    if rank:  # the replicated parameters of the first rank count
        for parameter in model.parameters():
            parameter.data.mul_(2)
    tensor_parallel(model, init_device_mesh("cpu", (world_size,)))
    return _run(model, random_samples(6))


def _error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).abs().max())


@pytest.mark.parametrize("recompute", [False, True])
def test_logits_and_gradients_agree_with_those_of_one_rank(ranks: RankPool, recompute: bool) -> None:
    config = replace(CONFIG, recompute=recompute)
    logits, gradients = _run(make_ranking(config), random_samples(6))
    for world_size in (2, 4):
        for divided_logits, divided_gradients in ranks.run(world_size, _divided, config, torch.float64):
            torch.testing.assert_close(divided_logits, logits, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(divided_gradients, gradients, rtol=1e-12, atol=1e-12)


def test_in_float32_errors_are_like_those_of_one_rank(ranks: RankPool) -> None:
    exact_logits, exact_gradients = _run(make_ranking(), random_samples(6))
    logits, gradients = _run(make_ranking().float(), random_samples(6))
    for world_size in (1, 2, 4):
        for divided_logits, divided_gradients in ranks.run(world_size, _divided, CONFIG, torch.float32):
            assert divided_logits.dtype == torch.float32
            assert _error(divided_logits, exact_logits) <= 2 * _error(logits, exact_logits)
            for name, exact in exact_gradients.items():
                assert _error(divided_gradients[name], exact) <= 5 * _error(gradients[name], exact), name


class _Exchanges(TorchDispatchMode):
    """Notes what ranks exchange: the operation and the number of values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what is inside is seen as well
        if "c10d" in func.namespace and not func.__name__.startswith(("wait", "_wrap")):
            name = func.__name__.split(".")[0].strip("_")
            self.seen.append((name, sum(leaf.numel() for leaf in tree_leaves(args[0]))))
        return func(*args, **(kwargs or {}))


def _norm(rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor, list[tuple[str, int]], list[tuple[str, int]]]:
    torch.manual_seed(0)
    norm = nn.LayerNorm(8).double()
    nn.init.normal_(norm.weight)
    values = torch.randn(5, 8, dtype=torch.float64) + 100
    upstream = torch.randn(5, 8, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (world_size,))
    mine = slice(8 // world_size * rank, 8 // world_size * (rank + 1))
    sharded = ShardedLayerNorm(norm, mesh)
    local = values[:, mine].clone().requires_grad_()
    with _Exchanges() as forward:
        result = sharded(local)
    with _Exchanges() as backward:
        result.backward(upstream[:, mine])

    values.requires_grad_()
    expected = norm(values)
    expected.backward(upstream)
    assert values.grad is not None
    assert local.grad is not None
    assert norm.weight.grad is not None
    assert isinstance(sharded.weight.grad, DTensor)
    return (
        result.detach() - expected[:, mine].detach(),
        local.grad - values.grad[:, mine],
        sharded.weight.grad.to_local() - norm.weight.grad[mine],
        forward.seen,
        backward.seen,
    )


def test_a_divided_norm_exchanges_statistics_alone(ranks: RankPool) -> None:
    for world_size in (2, 4):
        for *differences, forward, backward in ranks.run(world_size, _norm):
            for difference in differences:
                assert difference.abs().max() < 1e-12
            assert forward == [("allreduce", 5)] * 2  # a sum and a sum of squares per row
            assert backward == [("allreduce", 5)] * 2


def _on_a_mesh(rank: int, world_size: int) -> tuple[list[dict[str, list[int]]], list[dict[str, Tensor]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data = mesh["dp"].get_local_rank()
    model = make_ranking()
    tensor_parallel(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    batches = [make_batch(random_samples(8, seed=step)[4 * data : 4 * data + 4], first_id=4 * data) for step in (0, 1)]
    seen, gradients = [], []
    with Balancer(batches, BalanceConfig(cost=CONFIG.cost()), group=mesh["dp"]) as balancer:
        for batch in balancer:
            seen.append({"ids": batch.sample_ids.tolist(), "items": batch.features["item_id"].values().tolist()})
            model.zero_grad()
            loss_sums, _ = model(batch)
            scale_loss(loss_sums.sum(), batch).backward()
            gradients.append(_gradients(model))
    return seen, gradients


def test_beside_data_parallelism_peers_have_equal_batches_and_gradients_are_those_of_one_process(
    ranks: RankPool,
) -> None:
    results = ranks.run(4, _on_a_mesh)
    assert results[0][0] == results[1][0]
    assert results[2][0] == results[3][0]
    assert results[0][0] != results[2][0]
    seen = [[results[rank][0][step]["ids"] for rank in (0, 2)] for step in (0, 1)]
    assert seen != [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2  # samples have moved
    for step in (0, 1):
        assert sorted(seen[step][0] + seen[step][1]) == list(range(8))
        model = make_ranking()
        batch = make_batch(random_samples(8, seed=step))
        (model(batch)[0].sum() / batch.loss_tokens).backward()
        expected = _gradients(model)
        for _, gradients in results:
            torch.testing.assert_close(gradients[step], expected, rtol=1e-10, atol=1e-10)


def _retrieval(rank: int, world_size: int) -> Tensor:
    model = make_retrieval()
    tensor_parallel(model.dense, init_device_mesh("cpu", (world_size,)))
    return model.places_of_targets(make_batch(random_samples(6, predict="next")))


def test_retrieval_ranks_are_those_of_one_rank(ranks: RankPool) -> None:
    expected = make_retrieval().places_of_targets(make_batch(random_samples(6, predict="next")))
    for result in ranks.run(2, _retrieval):
        assert result.tolist() == expected.tolist()


def _too_many(rank: int, world_size: int) -> str:
    with pytest.raises(ConfigError) as error:
        tensor_parallel(make_ranking(replace(CONFIG, heads=3)), init_device_mesh("cpu", (world_size,)))
    return str(error.value)


def test_heads_that_cannot_be_divided_are_refused(ranks: RankPool) -> None:
    expected = "3 heads cannot be divided among 2 ranks; use a divisor"
    assert ranks.run(2, _too_many) == [expected] * 2
