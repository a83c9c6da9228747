"""Parallel models: replicated on all ranks, with large tables sharded over them, or with heads divided among them."""

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchrec.optim.keyed import CombinedOptimizer

from hstu.embeddings import make_optimizer, shard
from hstu.layer import tensor_parallel
from trainer.config import TrainConfig
from trainer.world import World


class Parallel:
    """A model whose gradients are averaged over the data-parallel ranks, and its optimizer.

    Attributes:
        model: to be called with batches.
        optimizer: of all its parameters.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the states of model and optimizer, for torch.distributed.checkpoint. Collective."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, possibly on other ranks. Collective."""
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


class Replicated(Parallel):
    """All parameters are on all ranks."""

    def __init__(self, model: nn.Module, config: TrainConfig, world: World) -> None:
        # As TorchRec's DistributedModelParallel wraps what it does not shard.
        self.model = DistributedDataParallel(
            model.to(world.device), gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
        )
        self.optimizer = _adamw(list(self.model.parameters()), config)


class DividedHeads(Parallel):
    """Heads are divided along `tp` of the world's mesh, and what each rank then has is sharded along `dp`."""

    def __init__(self, model: nn.Module, config: TrainConfig, world: World) -> None:
        assert world.mesh is not None
        tensor_parallel(model.to(world.device), world.mesh["tp"])
        fully_shard(model, mesh=world.mesh["dp"])
        self.model = model
        self.optimizer = _adamw(list(model.parameters()), config)


class Sharded(Parallel):
    """The rows of large tables are distributed over the data-parallel ranks; backward updates them by row-wise Adagrad.

    Where heads are divided, peers have equal rows, and all else is as in `DividedHeads`.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, world: World) -> None:
        fused = {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": config.embedding_learning_rate,
            "eps": 1e-8,
        }
        if world.mesh is not None:  # the tables are in no device's memory yet
            tensor_parallel(model.get_submodule("dense").to(world.device), world.mesh["tp"])
        sharded = shard(
            model,
            world.device,
            fused=fused,
            group=world.data,
            cached=config.pipeline == "prefetch",
            seed=config.seed,
        )
        self.model = sharded
        self.optimizer: CombinedOptimizer = make_optimizer(sharded, lambda parameters: _adamw(parameters, config))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of model and optimizer; those of tables are ShardedTensors."""
        for _, keyed in self.optimizer.optimizers:
            if not keyed.state:  # before the first step; torch.distributed.checkpoint loads what is there already
                keyed.init_state()
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load them."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def distribute(model: nn.Module, config: TrainConfig, world: World) -> Parallel:
    """Return a model as the settings distribute it. Collective: every rank must call this."""
    if config.embeddings == "sharded":
        return Sharded(model, config, world)
    return (Replicated if world.mesh is None else DividedHeads)(model, config, world)


def _adamw(parameters: list[Any], config: TrainConfig) -> torch.optim.Optimizer:
    # Otherwise a step launches several kernels, for DTensors even several for each.
    fused = True if parameters[0].device.type == "cuda" else None
    return torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=fused)
