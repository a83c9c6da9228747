from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evenrank.core.errors import ConfigError
from evenrank.datasets import read_manifest
from evenrank.training.flops import ModelFlops, mlp_flops
from hstu.layer import HSTULayer
from trainer.config import TrainConfig
from trainer.hstu_tasks import ranking, retrieval
from trainer.tasks import Task
from trainer.world import World

WORLD = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.mark.parametrize("make", [ranking, retrieval])
def test_the_model_has_the_shape_and_the_computation_of_the_settings(
    small_dataset: Path, make: Callable[..., Task]
) -> None:
    config = TrainConfig(
        hidden=16, heads=4, layers=3, recompute=True, attention="padded", dropout=0.25, fused_norms=False
    )
    task = make(config, read_manifest(small_dataset), WORLD)
    layers = [module for module in task.dense.modules() if isinstance(module, HSTULayer)]
    assert len(layers) == 3
    for layer in layers:
        assert (layer.heads, layer.head_dim, layer.recompute, layer.dropout.p) == (4, 4, True, 0.25)
        assert layer.attention.name == "padded"
        assert not layer.fused_norms
        assert isinstance(layer.attention, task.attention)


def test_flops_are_those_of_a_ranks_heads(small_dataset: Path) -> None:
    def flops(config: TrainConfig) -> ModelFlops:
        return ranking(config, read_manifest(small_dataset), WORLD).flops

    config = TrainConfig(hidden=16, heads=4, layers=3, embedding_dim=8)
    whole, divided = flops(config), flops(replace(config, tensor_parallel=2))
    assert divided.per_pair == whole.per_pair // 2
    all_ranks_alike = mlp_flops((8, 16, 16))
    assert divided.per_token - all_ranks_alike == (whole.per_token - all_ranks_alike) // 2
    assert divided.per_prediction == whole.per_prediction


def test_an_unknown_attention_is_an_error_that_lists_the_known(small_dataset: Path) -> None:
    with pytest.raises(ConfigError, match="no attention is called 'flash'; known are padded, triton, auto"):
        ranking(TrainConfig(attention="flash"), read_manifest(small_dataset), WORLD)
