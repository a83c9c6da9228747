"""A model on all ranks and its optimizer, and TorchRec's training pipelines by name, driven until the data end."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.optim.keyed import CombinedOptimizer

from evenrank.core.errors import ConfigError
from evenrank.training import make_dmp_optimizer
from hstu import shard
from trainer.config import TrainConfig
from trainer.world import World

Batch = TypeVar("Batch")
Read = TypeVar("Read", contravariant=True)


class Parallel(NamedTuple):
    """A model whose gradients are averaged over the ranks, and its optimizer."""

    model: DistributedModelParallel
    optimizer: CombinedOptimizer


def distribute(model: nn.Module, config: TrainConfig, world: World) -> Parallel:
    """Return a model on all ranks. Collective: every rank must call this.

    The rows of large tables of `hstu.Embeddings` are distributed over the ranks, and backward updates them by row-wise
    Adagrad; all other parameters are on all ranks, and AdamW updates them.
    """
    rate, is_cached = config.embedding_learning_rate, config.pipeline == "prefetch"
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": rate, "eps": 1e-8}
    parallel = shard(model, world.device, fused=fused, cached=is_cached, seed=config.seed)

    def adamw(parameters: list[Tensor]) -> torch.optim.Optimizer:
        is_fused = True if world.device.type == "cuda" else None  # otherwise a step launches several kernels
        return torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=0.0, fused=is_fused)

    return Parallel(parallel, make_dmp_optimizer(parallel, adamw))


class PipelineStep(NamedTuple):
    """The result of a pipeline for a batch, on the device."""

    batch: Any
    loss: Tensor
    """The scalar that the optimizer step minimized, detached."""
    output: Any
    """Of the model."""


class Pipeline(Protocol[Read]):
    """The interface of TorchRec's pipelines."""

    def progress(self, dataloader_iter: Iterator[Read]) -> PipelineStep:
        """Train or evaluate the next batch, pulling others ahead; raises StopIteration once all of them are done."""

    def reset(self) -> None:
        """Drop the batches that were pulled ahead; the next `progress` may be given another iterator."""


class _Forward:
    """A model and its loss as one function of a batch, as TorchRec's pipelines call models."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor]) -> None:
        self._model, self._loss = model, loss

    @property
    def training(self) -> bool:
        """Whether pipelines call `backward` and step the optimizer."""
        return self._model.training

    def __call__(self, batch: Any) -> tuple[Tensor, PipelineStep]:
        output = self._model(batch)
        loss = self._loss(output, batch)
        return loss, PipelineStep(batch, loss.detach(), output)


def make_pipeline(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device | str,
    *,
    loss: Callable[[Any, Batch], Tensor],
) -> Pipeline[Batch]:
    """Make a pipeline that trains a model, and evaluates it while it is in evaluation mode; see `run_pipeline`.

        none          TrainPipelineBase: copies the next batch to the device while this one trains
        sparse-dist   TrainPipelineSparseDist: also sends the ids of sharded tables to the ranks that hold their rows
        prefetch      PrefetchTrainPipelineSparseDist: also fills the device's caches of tables that are in host memory

    For the last two, the model is a DistributedModelParallel whose forward torch.fx can trace: it passes fields of the
    batch to sharded modules, and leaves the rest to other modules. `loss` makes a scalar of its output and the batch.
    """
    device, forward = torch.device(device), _Forward(model, loss)
    if name == "none":
        # It uses only `training` and the call of the model, and takes no `custom_model_fwd`.
        return cast(Pipeline[Batch], TrainPipelineBase(cast(nn.Module, forward), optimizer, device))
    if name == "prefetch" and device.type != "cuda":
        raise ConfigError(f"the pipeline 'prefetch' needs a CUDA device, got {device}; use 'sparse-dist' or 'none'")
    make = PrefetchTrainPipelineSparseDist if name == "prefetch" else TrainPipelineSparseDist
    return cast(Pipeline[Batch], make(model, optimizer, device, custom_model_fwd=forward, pipeline_postproc=True))


def run_pipeline(pipeline: Pipeline[Batch], batches: Iterable[Batch]) -> Iterator[PipelineStep]:
    """Yield the step of each batch, until the data end and the pipeline is empty.

    In training mode each step is an optimizer step. To evaluate, call `model.eval()` and iterate under
    `torch.no_grad()`. Afterwards the model is restored: it may be called directly, or run on other batches in another
    mode. Closing the iterator drops the batches that were pulled ahead; to pause after n steps, run `islice(iterator,
    n)`. After an error in a step, create a new model and pipeline.

    Collective where the model is: every rank must run equally many batches, as balanced ones are.
    """
    iterator = iter(batches)
    while True:
        try:
            step = pipeline.progress(iterator)
        except StopIteration:
            break
        try:
            yield step
        except GeneratorExit:
            break
    pipeline.reset()
    if isinstance(pipeline, TrainPipelineSparseDist):  # which replaces the forward of sharded modules
        model = pipeline.detach()
        # TorchRec 1.6 adds nested modules that ran a batch ahead to the top, with a dot in their names, so that a
        # direct call would get the ids of an earlier batch.
        top = getattr(model, "module", model)
        for replaced in getattr(pipeline, "_pipelined_postprocs", ()):
            parent, dot, name = replaced.fqn.rpartition(".")
            setattr(top.get_submodule(parent), name, replaced.postproc_module)
            if dot:
                top._modules.pop(replaced.fqn, None)
        pipeline.attach()
