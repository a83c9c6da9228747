"""Parallel models: replicated, or with large tables sharded; in either case, maybe with the heads of layers divided."""

from collections.abc import Callable
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torchrec.optim.keyed import CombinedOptimizer

from evenrank.dataloader.balance.ranks.process_group import process_group_of
from evenrank.training import make_dmp_optimizer
from hstu.divided import divided_parameters
from hstu.embeddings import shard
from hstu.layer import tensor_parallel
from trainer.config import TrainConfig
from trainer.world import World


class Parallel:
    """A model whose gradients are averaged over the data-parallel ranks, and its optimizer.

    Args:
        model: with the names of whose parameters states are saved.
        world: its ranks.

    Attributes:
        model: to be called with batches.
        optimizer: of all its parameters.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, model: nn.Module, world: World) -> None:
        self._divided = divided_parameters(model)
        self._mesh = world.mesh

    def state_dict(self) -> dict[str, Any]:
        """Return the states of model and optimizer, for torch.distributed.checkpoint. Collective.

        What ranks have of divided heads are parts of DTensors, so that other ranks can load it.
        """
        return self._with_divided(self._get_state(), self._as_dtensor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, possibly on other ranks. Collective."""
        self._set_state(self._with_divided(state, lambda whole, _: whole.to_local()))

    def _get_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def _as_dtensor(self, part: Tensor, dim: int) -> DTensor:
        assert self._mesh is not None
        return DTensor.from_local(part, self._mesh["tp"], [Shard(dim)])

    def _with_divided(self, state: dict[str, Any], function: Callable[[Any, int], Tensor]) -> dict[str, Any]:
        """Return states with function(value, dimension) in place of the values of divided parameters."""

        def replace(name: str, value: Any) -> Any:
            if name not in self._divided or value.ndim == 0:  # such as the number of steps
                return value
            return function(value, self._divided[name])

        of_parameters = {
            name: {key: replace(name, value) for key, value in values.items()}
            for name, values in state["optimizer"]["state"].items()
        }
        return {
            "model": {name: replace(name, value) for name, value in state["model"].items()},
            "optimizer": {**state["optimizer"], "state": of_parameters},
        }


class Replicated(Parallel):
    """All parameters are on all data-parallel ranks."""

    def __init__(self, model: nn.Module, config: TrainConfig, world: World) -> None:
        super().__init__(model, world)
        # As TorchRec's DistributedModelParallel wraps what it does not shard.
        self.model = DistributedDataParallel(
            model.to(world.device),
            process_group=process_group_of(world.data),
            gradient_as_bucket_view=True,
            static_graph=True,
            broadcast_buffers=False,
        )
        self.optimizer = _adamw(list(self.model.parameters()), config)

    def _get_state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _set_state(self, state: dict[str, Any]) -> None:
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


class Sharded(Parallel):
    """The rows of large tables are distributed over the data-parallel ranks; backward updates them by row-wise Adagrad.

    Where heads are divided, peers have equal rows.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, world: World) -> None:
        super().__init__(model, world)
        fused = {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": config.embedding_learning_rate,
            "eps": 1e-8,
        }
        sharded = shard(
            model,
            world.device,
            fused=fused,
            group=world.data,
            cached=config.pipeline == "prefetch",
            seed=config.seed,
        )
        self.model = sharded
        self.optimizer: CombinedOptimizer = make_dmp_optimizer(sharded, lambda parameters: _adamw(parameters, config))

    def _get_state(self) -> dict[str, Any]:  # that of tables has ShardedTensors
        for _, keyed in self.optimizer.optimizers:
            if not keyed.state:  # before the first step; torch.distributed.checkpoint loads what is there already
                keyed.init_state()
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _set_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def distribute(model: nn.Module, config: TrainConfig, world: World) -> Parallel:
    """Return a model as the settings distribute it. Collective: every rank must call this."""
    if world.mesh is not None:
        # The rest has equal values on all ranks; sharded tables are in no device's memory yet.
        tensor_parallel(model.get_submodule("dense").to(world.device), world.mesh["tp"])
    return (Sharded if config.embeddings == "sharded" else Replicated)(model, config, world)


def _adamw(parameters: list[Any], config: TrainConfig) -> torch.optim.Optimizer:
    # Otherwise a step launches several kernels.
    fused = True if parameters[0].device.type == "cuda" else None
    return torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=fused)
