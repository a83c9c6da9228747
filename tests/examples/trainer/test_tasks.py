from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evenrank.dataloader import LoaderConfig
from evenrank.datasets import read_manifest
from evenrank.training.flops import ModelFlops, mlp_flops
from hstu.layer import HSTULayer
from trainer.config import TrainConfig
from trainer.tasks import Task, ranking, retrieval
from trainer.world import World

WORLD = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.mark.parametrize("make", [ranking, retrieval])
def test_the_model_has_the_shape_of_the_settings(small_dataset: Path, make: Callable[..., Task]) -> None:
    shape: dict[str, Any] = {"hidden": 16, "heads": 4, "layers": 3, "recompute": True, "dropout": 0.25}
    config = TrainConfig(attention="padded", fused_norms=False, **shape)
    task = make(config, read_manifest(small_dataset), WORLD)
    layers = [module for module in task.dense.modules() if isinstance(module, HSTULayer)]
    assert len(layers) == 3
    for layer in layers:
        assert (layer.heads, layer.head_dim, layer.recompute, layer.dropout.p) == (4, 4, True, 0.25)
        assert (layer.attention.name, layer.fused_norms) == ("padded", False)
        assert isinstance(layer.attention, task.attention)


@pytest.mark.parametrize("make", [ranking, retrieval])
def test_keys_are_mapped_for_data_parallel_ranks(
    small_dataset: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Task]
) -> None:
    monkeypatch.setattr(World, "data_size", property(lambda world: world.size // 2))  # without a device mesh
    manifest = read_manifest(small_dataset)
    sizes = manifest.vocabulary_sizes

    def found(min_rows: int, world_size: int = 3) -> dict[str, tuple[int, int]]:
        config = TrainConfig(user_id=True, embeddings="sharded", min_sharded_rows=min_rows, routing="roundrobin")
        task = make(config, manifest, World(rank=0, size=2 * world_size, device=torch.device("cpu")))
        read = task.read(batch_size=4)
        assert dict(read.key_maps) == task.key_maps
        return {name: (one.num_embeddings, one.world_size) for name, one in task.key_maps.items()}

    assert found(sizes["item_id"]) == {"item_id": (sizes["item_id"], 3)}
    assert found(sizes["item_id"] + 1) == {}
    everything = {name: (size, 2) for name, size in sizes.items() if name != "action"}
    assert found(1, world_size=2) == everything


def test_flops_are_those_of_a_ranks_heads(small_dataset: Path) -> None:
    def flops(config: TrainConfig) -> ModelFlops:
        return ranking(config, read_manifest(small_dataset), WORLD).flops

    config = TrainConfig(hidden=16, heads=4, layers=3, embedding_dim=8)
    whole, divided = flops(config), flops(replace(config, tensor_parallel=2))
    assert divided.per_pair == whole.per_pair // 2
    all_ranks_alike = mlp_flops((8, 16, 16))
    assert divided.per_token - all_ranks_alike == (whole.per_token - all_ranks_alike) // 2
    assert divided.per_prediction == whole.per_prediction


def test_no_rank_has_a_sharded_table_in_full(small_dataset: Path) -> None:
    sizes = {"user_id": 50_000_000, "item_id": 50_000_000, "action": 256}
    config = TrainConfig(num_tasks=8, user_id=True, embeddings="sharded", embedding_dim=128)
    manifest = replace(read_manifest(small_dataset), contextual={}, vocabulary_sizes=sizes)
    task = ranking(config, manifest, WORLD)
    tables = {name.split(".")[-2]: (weight.shape, weight.device) for name, weight in task.model.named_parameters()}
    assert tables["user_id"] == tables["item_id"] == ((50_000_000, 128), torch.device("meta"))
    assert tables["action"] == ((256, 128), torch.device("cpu"))
    read = task.read(batch_size=32)
    assert isinstance(read, LoaderConfig)
    assert (task.num_tasks, read.user_id, read.num_tasks) == (8, True, 8)
